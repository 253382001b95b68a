"""Leads from a ``--model`` flag to weights in memory.

    prepare.py            finds, converts and fingerprints a model: the entry for every component
    fingerprint.py        names a model by what decides its numbers
    model_files.py        resolves the flag; lists weight files
    gguf_names.py         which GGUF files are a model: its parts, and the only one of several files
    generation_config.py  the sampling values that a model recommends, and the flags about them
    model_cache.py        the cache on disk of prepared models
    work_report.py        how far a stage of the preparation is, in lines
    convert.py            foreign tokenizers -> a Hugging Face folder; a tokenizer is tried
    tokenizer_trial.py    what the trial's process does; it imports nothing of Pillion
    tiktoken_files.py     the tokenizer of Kimi K2 -> tokenizer.json
    checkpoint.py         names and shapes of tensors in safetensors files
    weight_format.py      the contract of a format of quantized matrices
    weights.py            checkpoint tensors -> the decoder's weights
    packed_file.py        the mapped file in which the CPU kernels keep packed weights

Read prepare.py first. The forward pass (engine/models), and layouts of weights for one device (engine/backends), stay
out of here. model_files, model_cache, prepare and convert import no torch at their top, because the gateway and the
supervisor start with them.
"""
