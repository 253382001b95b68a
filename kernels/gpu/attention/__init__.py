"""Computes paged attention on a GPU.

    paged_attention          the interface to the engine
    gpu_attention_plan       cuts a step's work into items, on the host
    attention_kernel         attention of decodes and chunks in Triton
    attention_rows           what all kernels do with a tile of rows, and how partial results are joined
    float8_tiles             decodes over keys and values in float8
    overlapped_attention     chunks on Hopper, in Gluon: the softmax runs beside products (off until it was measured)
    parted_attention         attention that is cut at fixed keys (--batch-invariant)
    latent_attention         attention over latents (MLA)
    kv_write, latent_write   what writes keys, values and latents

Read paged_attention.py first.
"""
