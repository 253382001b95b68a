"""Choice of tokens on the device, with the same results as engine/sampling.

Read gpu_sampling.py first.
"""
