"""Multiplies rows by matrices in few bits and by adapters; cuBLAS multiplies by plain ones.

Read gpu_packing.py first.
"""
