"""From kernel specs to running machine code.

Open ``program.py`` first. No kernel of a model is defined here.
"""
