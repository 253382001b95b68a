"""Readers of quantized matrices: tensors of checkpoint files -> QuantizedMatrix.

Start with layout.py. Configs are parsed without torch by engine/quantized/quantization_methods.py; layouts for kernels
live in engine/backends.
"""
