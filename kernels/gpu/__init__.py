"""Triton kernels for GPUs. Each module has kernels, and a launcher that checks its arguments.

    attention/         paged attention, and the kernel that writes KV
    rows/              norms, gated activations, embedding
    products/          products with plain and quantized matrices
    experts/           mixtures of experts: routing, sorting, products, sums
    sampling/          choice of tokens
    dot.py, fp8.py     the product of two tiles, and 8-bit floats in a kernel's own arithmetic
    blocks.py          copies, gathers and scatters blocks of a pool
    dependent.py       kernels that begin while the previous one still runs
    launch.py          checks that launchers share, and properties of the device
    tuned.py           constants of kernels by architecture, from tuning/*.json

lab/testbed/gpu_reference.py computes the same in plain torch, for tests. Builds without a GPU are rows of
lab/gpu_builds/specs.py. Read rows/gated.py first, the simplest of them. CUDA graphs and buffers of a model belong in
engine/backends/gpu.
"""
