"""Multiplies rows by quantized matrices, by adapters, and, where cuBLAS is slow, by plain matrices.

Read gpu_packing.py first.
"""
