"""Triton kernels for GPUs. Each module: kernels, a launcher that checks what it is given, and what is built of them."""
