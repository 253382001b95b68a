"""Kernels of paged attention.

Open ``cpu_attention.py`` first. Blocks are allocated and written elsewhere; these kernels only read them.
"""
