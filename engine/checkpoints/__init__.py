"""From a ``--model`` flag to weights in memory.

    prepare.py            finds, converts and fingerprints a model: the entry point for every component
    fingerprint.py        hash of everything that decides a model's numbers
    model_files.py        resolves the flag; lists weight files
    gguf_names.py         GGUF file names: split files, and the only model of a folder
    generation_config.py  a model's recommended sampling values, and their flags
    model_cache.py        on-disk cache of prepared models
    work_report.py        progress lines of a preparation stage
    convert.py            foreign tokenizers -> a Hugging Face folder; runs the tokenizer trial
    tokenizer_trial.py    the trial's program; imports nothing of Pillion
    tiktoken_files.py     tokenizer of Kimi K2 -> tokenizer.json
    checkpoint.py         names and shapes of tensors in safetensors files
    weight_format.py      interface of a format of quantized matrices
    weights.py            checkpoint tensors -> the decoder's weights
    packed_file.py        mapped file of weights packed for the CPU kernels

Start with prepare.py. The forward pass (engine/models) and device layouts of weights (engine/backends) live elsewhere.
model_files, model_cache, prepare and convert import no torch at module level, because the gateway and the supervisor
start with them.
"""
