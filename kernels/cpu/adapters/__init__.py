"""Has the kernels of adapters.

low_rank.py         what the adapters of a step's rows add to a product
virtual_rows.py     embeddings, or keys and values, of an adapter's virtual tokens
adapter_tiles.py    an adapter's matrices in tiles
"""
