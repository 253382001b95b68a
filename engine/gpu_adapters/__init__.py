"""Keeps adapters in slots of a GPU's memory.

    gpu_adapters.py    slots in fixed memory, and a step's rows that have an adapter

The kernels that multiply by them are in ``kernels/gpu/products/low_rank_product.py``.
"""
