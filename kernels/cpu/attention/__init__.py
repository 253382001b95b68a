"""Has the kernels of paged attention.

    kv_layout.py             the layout of K and V inside a block
    eight_bits.py            K and V in 8 bits: rounding rows, widening lines
    cpu_attention_plan.py    the plan of a step: items of work, planned on the host
    cpu_attention.py         the kernels: attention over items, and the merge of contexts that were cut
    attention_rows.py        the micro-kernels: scores, weights, weighted sums, folds
    attention_tiles.py       products of attention in matrix tiles

Open ``cpu_attention.py`` first. Blocks are allocated and written elsewhere; these kernels only read them.
"""
