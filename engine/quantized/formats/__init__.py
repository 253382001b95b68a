"""Turns matrices in few bits, as the files of checkpoints hold them, into QuantizedMatrix.

    table.py          the layouts by name, and the choice of one for each matrix by the model's config
    layout.py         the contract of a layout, and what all of them check and unpack
    int32_layouts.py  awq and gptq: codes packed in int32 along one side of the matrix
    compressed.py     compressed-tensors and fp8: packed rows, or one code a byte
    fp4.py            NVFP4 of compressed-tensors and of NVIDIA's Model Optimizer, and MXFP4 of gpt-oss
    bitsandbytes.py   nf4 with its statistics, and int8
    pillion_format.py Pillion's own, of what it converts and quantizes itself

Read layout.py first. Configs, which engine/quantized/quantization_methods.py reads without torch, and layouts that
kernels want stay out of here.
"""
