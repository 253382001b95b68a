"""Has the kernels that treat rows one by one.

    rows.py         embedding, norms, the choice of sampled rows, logits
    rotate.py       rotary embedding, norms of queries and keys, and the write of K and V into the pool
    latents.py      the same for attention over latents, whose keys are values, too
    token_inputs.py what layers read of a token beside the residual stream, and the number by which they multiply that

Open ``rows.py`` first. The kernels' references in torch are in ``tests/support/cpu_references.py``; matrix
products are in ``products``.
"""
