"""CPU kernels of products with quantized weights.

quantized_packing.py  layouts of quantized matrices: open this first;  matrix_packing.py: those of any matrix
codes.py              4-bit and 8-bit codes in memory;  rounded_codes.py: as plain weights of bfloat16
quantized_tiles.py    products of rows with codes, group by group
dot_kinds.py          layouts for rows of int8;  dot_tiles.py: their products
group_matrix_tiles.py products of rows with codes or of int8 rows, group by group, in AMX tiles
input_rows.py         preparation of rows: order of inputs, sums of groups, rounding to int8
"""
