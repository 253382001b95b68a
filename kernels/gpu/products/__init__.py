"""Products of rows by matrices in few bits: cuBLAS multiplies by plain ones.

    gpu_packing.py         the layout of a packed matrix in GPU memory, and the packer
    quantized_product.py   the kernels, their launcher and its workspace

Read gpu_packing.py first.
"""
