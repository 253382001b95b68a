"""Map of the matrix products.

    gemm.py             products of rows with packed weights, plain or grouped by expert, with their epilogues
    gemm_tiles.py       the innermost products: a few rows with one panel of weights, in registers
    quantized_tiles.py  the innermost products with weights in few bits: rows with a panel of codes, group by group
    codes.py            codes of 4 and 8 bits: their order in memory, and how kernels widen them in registers
    input_rows.py       rows in another order of inputs, and sums of a row's groups of inputs
    packing.py          the layout of packed weights
    tiles.py            the sizes of tiles, and an adapter's matrices in them
    low_rank.py         what the adapters of a step's rows add to a product
    moe_kernels.py      the kernels around the products of a mixture of experts

Open ``packing.py`` first, then ``gemm.py``. Weights are read and packed into files in ``engine/backends/cpu``.
"""
