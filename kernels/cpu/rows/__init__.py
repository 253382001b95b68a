"""Map of the kernels that treat rows one by one.

    rows.py      embedding, norms, the choice of sampled rows, logits
    rotate.py    rotary embedding, norms of queries and keys, and the write of K and V into the pool

Open ``rows.py`` first. Every kernel has its reference in torch below it; matrix products are in ``products``.
"""
