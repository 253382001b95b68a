"""Converts GGUF files and folders without tokenizer.json into plain Hugging Face folders, by means of transformers.

Only the functions import transformers, so that a start with a converted model stays quick.
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

from pillion.engine.checkpoints.model_files import SINGLE_NAME, Progress, weight_files
from pillion.engine.models.config_json import token_ids
from pillion.engine.models.model_config import parse_config
from pillion.errors import ConfigError

# Architectures of GGUF files that are read and tested; those of Llama, SmolLM2 and Mistral are all "llama".
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "phi3", "gemma2", "gemma3")
# Metadata of GGUF files that transformers ignores, by architecture: the key, and its name in config.json.
_IGNORED_METADATA = {
    "gemma2": {
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    "phi3": {"attention.sliding_window": "sliding_window"},
    "qwen3": {"attention.key_length": "head_dim"},
    "qwen3moe": {"expert_feed_forward_length": "moe_intermediate_size"},
}
# Layers of the Gemma models that divide scores by the root of hidden / heads; others divide by the root of 256, which
# transformers assumes. GGUF files have no key for it: llama.cpp goes by the number of layers, too.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
# Tensors of divisors of the rotary embedding's frequencies: for any length, and for short and long texts.
_ROPE_FACTORS = "rope_freqs.weight"
_ROPE_SHORT, _ROPE_LONG = "rope_factors_short.weight", "rope_factors_long.weight"
# Tokens that end a turn in the chat formats of models whose GGUF files name only the token that ends a text.
_END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
_PRIVATE_KEYS = ("quantization_config", "_name_or_path", "_model_name_or_path")


def convert_gguf(source: Path, folder: Path, dtype: str, progress: Progress) -> None:
    """Fills ``folder`` with config, tokenizer and de-quantized weights in ``dtype`` ("bfloat16" or "float32").

    In float32 the weights are exactly the de-quantized ones. Raises ConfigError for a file that is damaged or holds
    an architecture that is not known.
    """
    progress(f"reading {source.name}")
    try:
        from gguf import GGUFReader
        from safetensors.torch import save_file
        from transformers import AutoConfig, AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise ConfigError(f"reading GGUF needs the package {error.name}, which is not installed") from None
    logging.disable_progress_bar()
    try:
        reader = GGUFReader(source)
        refuse_unread(reader)
        read = AutoConfig.from_pretrained(str(source.parent), gguf_file=source.name)
        config = {k: v for k, v in json.loads(read.to_json_string(use_diff=False)).items() if k not in _PRIVATE_KEYS}
        add_ignored_metadata(config, reader)
        add_rope(config, reader)
        parse_config(config)
        progress("reading the tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
        config["eos_token_id"] = turn_ends(config, reader, tokenizer)
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
    """Hugging Face name -> tensor. The model on the meta device only gives transformers the names."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    # The reader draws a progress bar of its own, whatever transformers' logging is set to.
    with contextlib.redirect_stderr(io.StringIO()):
        tensors = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)["tensors"]
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    return {name: tensor.to(getattr(torch, dtype)).contiguous() for name, tensor in tensors.items()}


def _metadata(reader: Any, key: str) -> Any:
    """Returns the value of a key in a GGUF file, or None; ``{}`` in the key stands for the architecture."""
    field = reader.get_field("general.architecture")
    name = field.contents() if field else "llama"
    field = reader.get_field(key.format(name))
    return field.contents() if field else None


def add_ignored_metadata(config: dict[str, Any], reader: Any) -> None:
    name = _metadata(reader, "general.architecture")
    for key, ours in _IGNORED_METADATA.get(name, {}).items():
        value = _metadata(reader, "{}." + key)
        if value is not None:
            config[ours] = value
    if _GEMMA_27B_LAYERS.get(name) == config.get("num_hidden_layers"):
        config["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"]


def refuse_unread(reader: Any) -> None:
    """Raises ConfigError for files that transformers cannot read, or reads wrongly.

    Mixtral's GGUF files have the architecture of Llama, as which transformers would read them without their experts.
    """
    name = _metadata(reader, "general.architecture")
    if name not in GGUF_ARCHITECTURES:
        known = ", ".join(GGUF_ARCHITECTURES)
        raise ConfigError(f"GGUF files of the architecture {name!r} are not read ({known} are): use the model's folder")
    if name != "qwen3moe" and _metadata(reader, "{}.expert_count"):
        raise ConfigError("mixture of experts is read from Hugging Face folders, and from GGUF files of qwen3moe alone")


def add_rope(config: dict[str, Any], reader: Any) -> None:
    """Adds rope scaling from metadata and tensors that transformers ignores: without it positions would be wrong."""
    rope = config.setdefault("rope_parameters", {})
    rope = rope.get("full_attention", rope)  # Gemma 3 scales only its layers with full attention.
    kind, factor = _metadata(reader, "{}.rope.scaling.type"), _metadata(reader, "{}.rope.scaling.factor")
    original = _metadata(reader, "{}.rope.scaling.original_context_length")
    if kind in ("linear", "yarn"):
        rope.update(rope_type=kind, factor=float(factor or 1.0))
        if original is not None:
            rope["original_max_position_embeddings"] = int(original)
    factors = {
        tensor.name: [float(number) for number in tensor.data] for tensor in reader.tensors if "rope_f" in tensor.name
    }
    if _ROPE_FACTORS in factors:
        one = factors[_ROPE_FACTORS]
        rope.update(rope_type="longrope", short_factor=one, long_factor=one, factor=1.0, attention_factor=1.0)
    if _ROPE_SHORT in factors and _ROPE_LONG in factors:
        rope.update(rope_type="longrope", short_factor=factors[_ROPE_SHORT], long_factor=factors[_ROPE_LONG])
        config["original_max_position_embeddings"] = int(original or config["max_position_embeddings"])
    rotary_dim = _metadata(reader, "phi3.rope.dimension_count")
    if rotary_dim is not None:
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        rope["partial_rotary_factor"] = rotary_dim / head_dim


def turn_ends(config: dict[str, Any], reader: Any, tokenizer: Any) -> list[int]:
    """Tokens that end a text and tokens that end a chat turn, from the file's metadata and from its chat template."""
    ends = {*token_ids(config.get("eos_token_id")), *token_ids(_metadata(reader, "tokenizer.ggml.eot_token_id"))}
    vocabulary, template = tokenizer.get_vocab(), str(tokenizer.chat_template or "")
    ends.update(vocabulary[token] for token in _END_OF_TURN if token in vocabulary and token in template)
    return sorted(ends)


def link_with_tokenizer(source: Path, folder: Path, progress: Progress) -> None:
    """Fills ``folder`` with links to the files of a model without tokenizer.json, and with a converted tokenizer.
    Raises ConfigError for a ``source`` in which transformers finds no tokenizer either."""
    progress("converting the tokenizer")
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(source), trust_remote_code=False)
        tokenizer.save_pretrained(folder)
    except Exception as error:  # noqa: BLE001  (transformers raises many kinds of errors over foreign files)
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
