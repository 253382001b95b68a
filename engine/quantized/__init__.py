"""Reads checkpoints quantized: what their configs say, how their files lie, and quantizes plain weights.

    quantization.py               how a config says that quantized matrices are stored
    quantization_methods.py       the table of the configs' producers
    auto_round_config.py          the configs of AutoRound
    compressed_tensors_config.py  the configs of compressed-tensors
    formats/                      the formats of files
    gguf_files.py                 GGUF files -> a Hugging Face folder
    gguf_reader.py                metadata and tensors of such files
    gguf_architectures.py         their names in config.json and in a folder's weights
    gguf_tokenizer.py             metadata -> tokenizer.json
    gguf_pre_tokenizers.py        how kinds of vocabularies split texts
    gguf_blocks.py                the blocks of GGUF's types -> quantized matrices
    quantizer.py                  plain matrices and folders -> quantized ones, for --quantization
    shards.py                     writes such a folder's weights

Read quantization.py first. Of these, only the modules about configs, and about GGUF files but gguf_blocks, import no
torch at their top.
"""
