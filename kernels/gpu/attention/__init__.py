"""Paged attention on a GPU.

    paged_attention          the interface to the engine
    gpu_attention_plan       divides a step's work into items, on the host
    attention_kernel         attention of decodes and chunks in Triton
    attention_rows           operations on a tile of rows common to all kernels, and the merge of partial results
    float8_tiles             decodes over keys and values in float8
    overlapped_attention     chunks on Hopper, in Gluon: the softmax overlaps products (off until measured)
    parted_attention         attention that is cut at fixed keys (--batch-invariant)
    latent_attention         attention over latents (MLA)
    kv_write, latent_write   writes of keys, values and latents

Read paged_attention.py first.
"""
