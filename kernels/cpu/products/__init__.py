"""Kernels of matrix products.

Open ``packing.py`` first, then ``gemm.py``. Weights are read and packed into files in ``engine/backends/cpu``.
"""
