"""Kernels of paged attention.

Open ``cpu_attention.py`` first. Blocks are allocated and written elsewhere; these kernels only read them.

cpu_attention_plan.py  division into work items: query rows, and a part of their context
cpu_attention.py       an item: scores, softmax and weighted values, partition by partition
attention_rows.py      these steps in vectors;  attention_tiles.py: in matrix tiles;  latent_tiles.py: the same for MLA
kv_layout.py           the lines of a block;  eight_bits.py: keys and values in 8 bits
token_selection.py     the tokens that sparse attention reads
"""
