"""CPU kernels of products with quantized weights.

Open ``quantized_packing.py`` first.
"""
