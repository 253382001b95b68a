"""An encoder's tensors from safetensors files, checked against its config; errors name file and tensor."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from pillion.engine.checkpoints.checkpoint import format_names, open_files
from pillion.engine.models.encoder_config import EncoderConfig
from pillion.engine.models.model_config import ModelConfig
from pillion.errors import ConfigError

_PREFIXES = {"bert": "bert.", "roberta": "roberta.", "xlm-roberta": "roberta.", "modernbert": "model."}
# Skipped: position counters, and heads for other tasks. Text vectors need no pooler.
_UNREAD = re.compile(r"(.*\.)?(position_ids|token_type_ids)|(cls|lm_head|decoder)\..*|pooler\..*")


def read_tensors(folder: Path, config: ModelConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors of an encoder by file name, without those of other tasks. Raises ConfigError for tensors that
    are missing, unknown, of a wrong shape, or not finite."""
    encoder, prefix = config.encoder, _PREFIXES[config.family]
    assert encoder is not None
    wanted = (_rotary if encoder.rotary else _learned)(config, encoder) | _head(config, encoder)
    found: dict[str, torch.Tensor] = {}
    unknown: list[str] = []
    with open_files(folder) as files:
        for stored, tensor in files.items():
            name = stored.removeprefix(prefix)
            for old, new in (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")):
                name = name.replace(old, new)
            if name in wanted:
                tensor.check(wanted[name])
                found[name] = tensor.numbers(dtype)
            elif not _UNREAD.fullmatch(name) and not (name.startswith("head.") and not config.labels):
                unknown.append(f"{tensor.path.name}: {stored}")
    missing = sorted(wanted.keys() - found.keys())
    if missing:
        raise ConfigError(f"{folder} lacks {format_names(missing)}, which a {config.family} model needs")
    if unknown:
        raise ConfigError(
            f"{folder} holds {format_names(sorted(unknown))}, which a {config.family} model does not have"
        )
    return found


def _weights(name: str, *shape: int, bias: bool = True) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a linear layer or norm, and of its bias if any."""
    return {f"{name}.weight": shape, **({f"{name}.bias": shape[:1]} if bias else {})}


def _learned(config: ModelConfig, encoder: EncoderConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    tables = {"word": config.vocab_size, "position": encoder.num_positions, "token_type": encoder.num_token_types}
    found: dict[str, tuple[int, ...]] = {
        f"embeddings.{name}_embeddings.weight": (rows, hidden) for name, rows in tables.items()
    }
    found |= _weights("embeddings.LayerNorm", hidden)
    for layer in range(encoder.num_layers):
        at = f"encoder.layer.{layer}."
        for name in ("query", "key", "value"):
            found |= _weights(f"{at}attention.self.{name}", hidden, hidden)
        found |= _weights(f"{at}attention.output.dense", hidden, hidden)
        found |= _weights(f"{at}attention.output.LayerNorm", hidden)
        found |= _weights(f"{at}intermediate.dense", inner, hidden)
        found |= _weights(f"{at}output.dense", hidden, inner)
        found |= _weights(f"{at}output.LayerNorm", hidden)
    return found


def _rotary(config: ModelConfig, encoder: EncoderConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner, normed = config.hidden_size, config.intermediate_size, encoder.norm_bias
    found: dict[str, tuple[int, ...]] = {"embeddings.tok_embeddings.weight": (config.vocab_size, hidden)}
    found |= _weights("embeddings.norm", hidden, bias=normed)
    for layer in range(encoder.num_layers):
        at = f"layers.{layer}."
        found |= _weights(f"{at}attn_norm", hidden, bias=normed) if layer else {}
        found |= _weights(f"{at}attn.Wqkv", 3 * hidden, hidden, bias=encoder.attention_bias)
        found |= _weights(f"{at}attn.Wo", hidden, hidden, bias=encoder.attention_bias)
        found |= _weights(f"{at}mlp_norm", hidden, bias=normed)
        found |= _weights(f"{at}mlp.Wi", 2 * inner, hidden, bias=encoder.mlp_bias)
        found |= _weights(f"{at}mlp.Wo", hidden, inner, bias=encoder.mlp_bias)
    return found | _weights("final_norm", hidden, bias=normed)


def _head(config: ModelConfig, encoder: EncoderConfig) -> dict[str, tuple[int, ...]]:
    hidden, labels = config.hidden_size, config.labels
    match encoder.head:
        case "pooler":
            return _weights("pooler.dense", hidden, hidden) | _weights("classifier", labels, hidden)
        case "dense":
            dense = _weights("classifier.dense", hidden, hidden)
            return dense | _weights("classifier.out_proj", labels, hidden)
        case "normed":
            dense = _weights("head.dense", hidden, hidden, bias=encoder.head_bias)
            normed = _weights("head.norm", hidden, bias=encoder.norm_bias)
            return dense | normed | _weights("classifier", labels, hidden)
    return {}
