"""Defines what travels between components, and its conversion to the values that the code works with.

Open public.py first. Other internal services use their generated messages as they are. No policy comes in here.
"""
