"""A model as a plain Hugging Face folder, for transformers, vLLM and `--quantization`.

`python -m lab.testbed.plain_model [MODEL]` prints the folder.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import sys

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from pillion.config import ModelFlags
from pillion.engine.checkpoints.model_cache import CONVERSION_VERSION, ModelCache
from pillion.engine.checkpoints.model_files import SINGLE_NAME, locate
from pillion.engine.checkpoints.prepare import prepare

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def plain_folder(model: str = "demo", dtype: str = "bfloat16") -> pathlib.Path:
    """Return the model's own folder or, for a GGUF file, a cached folder with transformers' conversion of it."""
    source = locate(model, "main", lambda line: None)
    if not source.is_gguf:
        return source.path
    converted = prepare(ModelFlags(model=model, dtype=dtype)).folder

    def fill(folder: pathlib.Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(
            str(source.path.parent), gguf_file=source.path.name, dtype=torch.float32
        )
        tensors = model.state_dict()
        if model.config.tie_word_embeddings:
            del tensors["lm_head.weight"]
        save_file({name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}, folder / SINGLE_NAME)
        for name in _TOKENIZER:
            if (converted / name).exists():
                shutil.copy(converted / name, folder)
        config = json.loads((converted / "config.json").read_text())
        config.pop("quantization_config", None)
        (folder / "config.json").write_text(json.dumps(config, indent=2))

    return ModelCache().folder(f"{converted.name}-plain-{CONVERSION_VERSION}", fill, lambda line: None)


if __name__ == "__main__":
    print(plain_folder(*sys.argv[1:2]))
