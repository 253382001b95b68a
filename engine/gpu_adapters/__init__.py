"""Adapters in slots of a GPU's memory.

The kernels are in ``kernels/gpu/products/low_rank_product.py``, and for experts in
``kernels/gpu/experts/expert_adapters.py``.
"""
