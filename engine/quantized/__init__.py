"""Reads checkpoints quantized: what their configs say, how their files lie, and quantizes plain weights.

    quantization.py               how a config says that quantized matrices are stored
    quantization_methods.py       the table of the configs' producers
    auto_round_config.py          the configs of AutoRound
    compressed_tensors_config.py  the configs of compressed-tensors
    formats/                      the formats of files
    gguf_files.py                 GGUF files -> a Hugging Face folder
    gguf_header.py                what such a file's header counts, beside the file's size
    gguf_blocks.py                the blocks of GGUF's types -> quantized matrices
    quantizer.py                  plain matrices and folders -> quantized ones, for --quantization
    shards.py                     writes such a folder's weights

Read quantization.py first. Only the modules about configs and gguf_files import no torch at their top.
"""
