"""Has the kernels of matrix products.

    gemm.py             products of rows with packed weights, plain or grouped by expert, with their epilogues
    gemm_tiles.py       the innermost products: a few rows with one panel of weights, in registers
    packing.py          the layout of packed weights
    packed_weight.py    describes a packed matrix
    tiles.py            the sizes of tiles
    moe_kernels.py      the kernels around the products of a mixture of experts

Open ``packing.py`` first, then ``gemm.py``. Weights are read and packed into files in ``engine/backends/cpu``.
"""
