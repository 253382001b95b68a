"""Has the CPU kernels of products with weights in few bits.

    few_bit_packing.py   the layout of packed matrices in few bits
    quantized_tiles.py   the innermost products: rows with a panel of codes, group by group
    codes.py             codes of 4 and 8 bits: their order in memory, and how kernels widen them in registers
    input_rows.py        rows in another order of inputs, rows of codes, and sums of a row's groups of inputs

Open ``few_bit_packing.py`` first.
"""
