"""Messages between components, and their conversion to the code's values.

Open public.py first. Other internal services use their generated messages directly. There is no policy here.
"""
