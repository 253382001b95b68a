"""Multiplies rows by quantized matrices and by adapters; cuBLAS multiplies by plain ones.

Read gpu_packing.py first.
"""
