"""Quantized checkpoints: their configs and file formats, and the quantizer of plain weights.

    quantization.py               the config of quantized matrices
    quantization_methods.py       table of the producers of such configs
    auto_round_config.py          configs of AutoRound
    compressed_tensors_config.py  configs of compressed-tensors
    formats/                      file formats
    gguf_files.py                 GGUF files -> a Hugging Face folder
    gguf_reader.py                metadata and tensors of GGUF files
    gguf_architectures.py         GGUF's names -> those of config.json and of a folder's weights
    gguf_tokenizer.py             metadata -> tokenizer.json
    gguf_pre_tokenizers.py        text splitting per kind of vocabulary
    gguf_blocks.py                blocks of GGUF types -> quantized matrices
    quantizer.py                  plain matrices and folders -> quantized ones, for --quantization
    shards.py                     writer of a folder's weights

Start with quantization.py. The modules about configs, and those about GGUF except gguf_blocks, import no torch at
module level.
"""
