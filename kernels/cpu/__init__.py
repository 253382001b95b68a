"""Has the CPU kernels: a model's whole forward pass as machine code that LLVM generates, without a compiler on the
user's machine. docs/cpu.md draws the layouts and explains how a step runs.

    language/     the language in which kernels are written, and the table of instruction sets
    runtime/      compiles kernels, caches their code on disk, and runs programs of kernels on a pool of threads
    rows/         kernels over single rows: embedding, norms, rotary embedding and the KV write, logits
    adapters/     what adapters add to products
    ranks/        sums over the processes that share a model
    products/     matrix products with packed weights, mixture of experts
    quantized/     products with quantized weights
    states/       layers that carry a state from token to token
    attention/    paged attention: the layout of the KV pool, the plan of a step, the kernels

Open ``rows/rows.py`` first: its kernels are the simplest. Models, checkpoints and batches never come in here: a model
becomes a program of kernels in ``engine/backends/cpu``.
"""
