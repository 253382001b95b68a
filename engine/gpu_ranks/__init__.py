"""Tensor parallelism on GPUs, with a GPU per rank or one shared GPU.

Start with ``gpu_rank_loading.py``. The part common to CPUs and GPUs is in ``engine/ranks``.
"""
