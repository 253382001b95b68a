"""Products with quantized matrices, with adapters, and, where cuBLAS is slow, with plain matrices.

Read gpu_packing.py first.
"""
