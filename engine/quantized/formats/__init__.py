"""Turns quantized matrices, as the files of checkpoints hold them, into QuantizedMatrix.

Read layout.py first. Configs, which engine/quantized/quantization_methods.py reads without torch, and layouts that
kernels want stay out of here.
"""
