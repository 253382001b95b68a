"""Triton kernels for GPUs. Each module has kernels, and a launcher that checks its arguments.

    attention/         paged attention, and the kernel that writes KV
    rows/              norms, gated activations, embedding
    products/          products by plain and quantized matrices
    experts/           mixtures of experts: routing, sorting, products, sums
    sampling/          choosing tokens
    dot.py, fp8.py     the product of two tiles, and 8-bit floats in a kernel's own arithmetic
    blocks.py          copies, gathers and scatters blocks of a pool
    dependent.py       kernels that begin while the one before them still runs
    launch.py          checks that launchers share, and facts about the device
    tuned.py           constants of kernels by architecture, from tuning/*.json

What they compute is also there in plain torch, for tests: lab/testbed/gpu_reference.py. Uses that are built without a
GPU are rows of lab/gpu_builds/specs.py. Read rows/gated.py first, the simplest of them. Never in here: CUDA graphs and
buffers of a model (engine/backends/gpu).
"""
