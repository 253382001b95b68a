"""The layouts of matrices in few bits that checkpoints have, one in each file.

    table.py            quant_method -> format
    pillion_format.py   Pillion's own, of what it converts and quantizes itself

Read engine/checkpoints/weight_format.py first, which is the contract. Never in here: products over few bits (kernels).
"""
