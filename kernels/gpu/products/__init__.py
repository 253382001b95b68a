"""Multiplies rows by matrices in few bits and by adapters; cuBLAS multiplies by plain ones.

    gpu_packing.py         the layout of a packed matrix in GPU memory, and the packer
    low_rank_product.py    what the adapters of a step's rows add to a product
    quantized_product.py   the kernels, their launcher and its workspace

Read gpu_packing.py first.
"""
