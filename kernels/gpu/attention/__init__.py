"""Computes paged attention on a GPU.

    paged_attention.py        PagedAttention: plans a step on the host, launches its kernels
    gpu_attention_plan.py     how a step's attention is shared out to a fixed number of programs
    attention_kernel.py       the kernels: attention of a program's items, and the merge of partial results
    kv_write.py               norms and rotates queries and keys, and writes KV into the pool
    latent_attention.py       the same over rows of latents (MLA): LatentAttention and its kernel
    latent_write.py           norms and rotates rows of latents, and writes them into the pool

Read paged_attention.py first.
"""
