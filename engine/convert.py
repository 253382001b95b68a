"""Turns what is no plain Hugging Face folder into one, with transformers, which is imported only when needed."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

from engine.model_config import parse_config
from engine.model_files import SINGLE_NAME, Progress, weight_files
from pillion.errors import ConfigError

_ROPE_FACTORS = "rope_freqs.weight"
_PRIVATE_KEYS = ("quantization_config", "_name_or_path", "_model_name_or_path")


def convert_gguf(source: Path, folder: Path, dtype: str, progress: Progress) -> None:
    """Fills ``folder`` with config, tokenizer and de-quantized weights in ``dtype`` ("bfloat16" or "float32").

    In float32 the weights are exactly the de-quantized ones. Raises ConfigError for a file that is damaged or holds
    an architecture that is not known.
    """
    progress(f"reading {source.name}")
    try:
        from safetensors.torch import save_file
        from transformers import AutoConfig, AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise ConfigError(f"reading GGUF needs the package {error.name}, which is not installed") from None
    logging.disable_progress_bar()
    try:
        read = AutoConfig.from_pretrained(str(source.parent), gguf_file=source.name)
        config = {k: v for k, v in json.loads(read.to_json_string(use_diff=False)).items() if k not in _PRIVATE_KEYS}
        _add_rope(config, source)
        parse_config(config)
        progress("reading the tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
        progress("de-quantizing weights")
        tensors = _dequantize(source, read, dtype)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001  (foreign readers over foreign bytes: whatever they raise, the file is at fault)
        raise ConfigError(f"{source} cannot be read as GGUF: {_first_line(error)}") from None
    progress(f"saving weights in {dtype}")
    save_file(tensors, folder / SINGLE_NAME, metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2), "utf-8")


def _dequantize(source: Path, config: Any, dtype: str) -> dict[str, Any]:
    """Hugging Face name -> tensor. The model is made without memory: transformers takes the names from it."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    # The reader draws a bar of its own, whatever transformers' logging is told; progress has been said already.
    with contextlib.redirect_stderr(io.StringIO()):
        tensors = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)["tensors"]
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    return {name: tensor.to(getattr(torch, dtype)).contiguous() for name, tensor in tensors.items()}


def _add_rope(config: dict[str, Any], source: Path) -> None:
    """GGUF says rope scaling in keys and a tensor that transformers passes over; wrong positions would follow."""
    from gguf import GGUFReader

    reader = GGUFReader(source)
    rope = config.setdefault("rope_parameters", {})
    name = reader.get_field("general.architecture")
    prefix = f"{name.contents() if name else 'llama'}.rope.scaling."
    said = {
        key: field.contents()
        for key in ("type", "factor", "original_context_length")
        if (field := reader.get_field(prefix + key))
    }
    if said.get("type") in ("linear", "yarn"):
        rope.update(rope_type=said["type"], factor=float(said.get("factor", 1.0)))
        if "original_context_length" in said:
            rope["original_max_position_embeddings"] = int(said["original_context_length"])
    for tensor in reader.tensors:
        if tensor.name == _ROPE_FACTORS:
            factors = [float(number) for number in tensor.data]
            rope.update(
                rope_type="longrope", short_factor=factors, long_factor=factors, factor=1.0, attention_factor=1.0
            )


def link_with_tokenizer(source: Path, folder: Path, progress: Progress) -> None:
    """Fills ``folder`` with links to a model whose tokenizer is not in the one format that the gateway reads.

    Raises ConfigError where transformers finds no tokenizer in ``source`` either.
    """
    progress("converting the tokenizer")
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(source), trust_remote_code=False)
        tokenizer.save_pretrained(folder)
    except Exception as error:  # noqa: BLE001  (as above)
        raise ConfigError(f"{source} has no tokenizer that can be read: {_first_line(error)}") from None
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"{source} has no tokenizer that can be written as tokenizer.json")
    others = ("config.json", "generation_config.json", "chat_template.jinja")
    for path in (*weight_files(source), *(source / name for name in (*others, SINGLE_NAME + ".index.json"))):
        link = folder / path.name
        if path.is_file() and not link.exists():
            link.symlink_to(path.resolve())


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
