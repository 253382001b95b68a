"""Reads an encoder's tensors from safetensors files, checked against its config: every error names file and tensor."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from pillion.engine.checkpoints.checkpoint import FileTensor, finite, names_in_words, open_files
from pillion.engine.checkpoints.weight_format import FLOATS
from pillion.engine.models.encoder_config import EncoderConfig
from pillion.engine.models.model_config import ModelConfig
from pillion.errors import ConfigError

# The names of the model within may begin like this.
_PREFIXES = {"bert": "bert.", "roberta": "roberta.", "xlm-roberta": "roberta.", "modernbert": "model."}
# These tensors are not read: positions that are counted, and heads for other tasks. Vectors of texts need no pooler.
_UNREAD = re.compile(r"(.*\.)?(position_ids|token_type_ids)|(cls|lm_head|decoder)\..*|pooler\..*")
# Old files call a norm's weight and bias so.
_OLD_NAMES = (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias"))


def read_tensors(folder: Path, config: ModelConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Returns the tensors of an encoder by the names that files have for them, without those of another task. Raises
    ConfigError for tensors that are missing, unknown, of another shape, or not finite."""
    assert config.encoder is not None
    wanted, prefix = tensor_shapes(config, config.encoder), _PREFIXES[config.family]
    found: dict[str, torch.Tensor] = {}
    unknown: list[str] = []
    with open_files(folder) as files:
        for stored, tensor in files.items():
            name = stored.removeprefix(prefix)
            for old, new in _OLD_NAMES:
                name = name.replace(old, new)
            if name in wanted:
                found[name] = _read(tensor, wanted[name], dtype)
            elif not _UNREAD.fullmatch(name) and not (name.startswith("head.") and not config.labels):
                unknown.append(f"{tensor.path.name}: {stored}")
    missing = sorted(wanted.keys() - found.keys())
    if missing:
        raise ConfigError(f"{folder} lacks {names_in_words(missing)}, which a {config.family} model needs")
    if unknown:
        raise ConfigError(
            f"{folder} holds {names_in_words(sorted(unknown))}, which a {config.family} model does not have"
        )
    return found


def _read(stored: FileTensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    header, place = stored.handle.get_slice(stored.name), f"{stored.path}: {stored.name}"
    if tuple(header.get_shape()) != shape:
        raise ConfigError(f"{place} is {list(header.get_shape())}, config.json wants {list(shape)}")
    if header.get_dtype() not in FLOATS:
        raise ConfigError(f"{place} is {header.get_dtype()}; only {', '.join(FLOATS)} are read")
    tensor: torch.Tensor = stored.handle.get_tensor(stored.name).to(dtype)
    if not finite(tensor):
        raise ConfigError(f"{place} holds NaN or infinite numbers in {str(dtype).removeprefix('torch.')}")
    return tensor


def tensor_shapes(config: ModelConfig, encoder: EncoderConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor that an encoder needs."""
    return (_rotary if encoder.rotary else _learned)(config, encoder) | _head(config, encoder)


def _linear(name: str, outputs: int, inputs: int, *, bias: bool) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), **({f"{name}.bias": (outputs,)} if bias else {})}


def _norm(name: str, width: int, *, bias: bool) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), **({f"{name}.bias": (width,)} if bias else {})}


def _learned(config: ModelConfig, encoder: EncoderConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    tables = {"word": config.vocab_size, "position": encoder.num_positions, "token_type": encoder.num_token_types}
    found: dict[str, tuple[int, ...]] = {
        f"embeddings.{name}_embeddings.weight": (rows, hidden) for name, rows in tables.items()
    }
    found |= _norm("embeddings.LayerNorm", hidden, bias=True)
    for layer in range(encoder.num_layers):
        at = f"encoder.layer.{layer}."
        for name in ("query", "key", "value"):
            found |= _linear(f"{at}attention.self.{name}", hidden, hidden, bias=True)
        found |= _linear(f"{at}attention.output.dense", hidden, hidden, bias=True)
        found |= _norm(f"{at}attention.output.LayerNorm", hidden, bias=True)
        found |= _linear(f"{at}intermediate.dense", inner, hidden, bias=True)
        found |= _linear(f"{at}output.dense", hidden, inner, bias=True)
        found |= _norm(f"{at}output.LayerNorm", hidden, bias=True)
    return found


def _rotary(config: ModelConfig, encoder: EncoderConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner, normed = config.hidden_size, config.intermediate_size, encoder.norm_bias
    found: dict[str, tuple[int, ...]] = {"embeddings.tok_embeddings.weight": (config.vocab_size, hidden)}
    found |= _norm("embeddings.norm", hidden, bias=normed)
    for layer in range(encoder.num_layers):
        at = f"layers.{layer}."
        # The first layer reads the normed embeddings as they are.
        found |= _norm(f"{at}attn_norm", hidden, bias=normed) if layer else {}
        found |= _linear(f"{at}attn.Wqkv", 3 * hidden, hidden, bias=encoder.attention_bias)
        found |= _linear(f"{at}attn.Wo", hidden, hidden, bias=encoder.attention_bias)
        found |= _norm(f"{at}mlp_norm", hidden, bias=normed)
        found |= _linear(f"{at}mlp.Wi", 2 * inner, hidden, bias=encoder.mlp_bias)
        found |= _linear(f"{at}mlp.Wo", hidden, inner, bias=encoder.mlp_bias)
    return found | _norm("final_norm", hidden, bias=normed)


def _head(config: ModelConfig, encoder: EncoderConfig) -> dict[str, tuple[int, ...]]:
    hidden, labels = config.hidden_size, config.labels
    match encoder.head:
        case "pooler":
            return _linear("pooler.dense", hidden, hidden, bias=True) | _linear("classifier", labels, hidden, bias=True)
        case "dense":
            dense = _linear("classifier.dense", hidden, hidden, bias=True)
            return dense | _linear("classifier.out_proj", labels, hidden, bias=True)
        case "normed":
            dense = _linear("head.dense", hidden, hidden, bias=encoder.head_bias)
            normed = _norm("head.norm", hidden, bias=encoder.norm_bias)
            return dense | normed | _linear("classifier", labels, hidden, bias=True)
    return {}
