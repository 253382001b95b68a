"""Makes running machine code of kernel specs.

Open ``program.py`` first. No kernel of a model is defined here.
"""
