"""Has the CPU kernels of products with weights in few bits.

Open ``few_bit_packing.py`` first.
"""
