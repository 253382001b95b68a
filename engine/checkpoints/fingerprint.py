"""Fingerprint of a model: hash of everything that decides its KV and logits.

A fingerprint is part of every block's hash (I2), and a gateway only uses workers with its own fingerprint. It must stay
the same across releases as long as KV and logits do: otherwise an upgrade would invalidate all blocks on disks, in
buckets and on other nodes, and gateways would ignore the workers that are not yet upgraded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from pillion.engine.checkpoints.model_cache import CONVERSION_VERSION, digest_file
from pillion.engine.models.model_config import ModelConfig

# Fields that are written into a fingerprint even if they have their defaults, as in 0.2.0. Never extend these rows: a
# new field is written only if it differs from its default, which must therefore stand for the behavior without it.
_ALWAYS_WRITTEN = {
    "ModelConfig": "tie_word_embeddings qkv_bias o_bias mlp_bias gated activation norm norm_bias qk_norm post_norm"
    " parallel attention_softcap logit_softcap embedding_scale residual_scale logit_divisor moe bos_token_id"
    " eos_token_ids quantization",
    "RopeConfig": "kind theta interleaved factor original_max_position low_freq_factor high_freq_factor"
    " attention_factor beta_fast beta_slow mscale mscale_all_dim truncate short_factors long_factors",
    "MoeConfig": "sigmoid scale shared",
    "MatrixScheme": "kind group rows symmetric ordered activations row_codes",
    "Quantization": "schemes weights row_codes",
}
# Removed fields, with the values that older releases wrote for all models that are still supported.
_ONCE_WRITTEN = {"MatrixScheme": {"row_zeros": False}}
# Renamed fields, with their names in fingerprints: those of older releases.
_WRITTEN_NAMES = {
    "LatentConfig": {
        "kv_lora_rank": "rank",
        "qk_rope_head_dim": "rotary",
        "qk_nope_head_dim": "still",
        "v_head_dim": "values",
        "q_lora_rank": "query_rank",
    }
}


def fingerprint(
    weights: Sequence[Path], config: ModelConfig, dtype: str, count: Callable[[int], None] = lambda size: None
) -> str:
    """Return the SHA-256, in hexadecimal, of a model with ``dtype`` and these safetensors and text files (none for
    random weights). ``count`` is called with the number of bytes after each read."""
    # 0.2.0 rounded the weights of float32 norms to bfloat16.
    rounded = config.norm != "plain" and dtype == "bfloat16" and any(map(_has_wider_vectors, weights))
    digest = hashlib.sha256(f"pillion model {CONVERSION_VERSION} {dtype}{' wide-norms' * rounded}\n".encode())
    written = _written(config)
    # 0.2.0 did not norm queries and keys in this family, but wrote the default of ``qk_norm``, true. So false is
    # written as true, and true as a new value.
    if config.family == "cohere":
        written["qk_norm"] = "by head" if config.qk_norm else True
    digest.update(json.dumps(written, sort_keys=True).encode() + b"\n")
    for path in weights:
        digest.update(f"{path.name} {digest_file(path, count)}\n".encode())
    return digest.hexdigest()


def _has_wider_vectors(path: Path) -> bool:
    """Return whether a safetensors file has a vector, e.g. a norm's weight, in float16 or float32."""
    with safe_open(path, framework="numpy") as file:
        tensors = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118  (the file is no mapping)
        return any(len(tensor.get_shape()) == 1 and tensor.get_dtype() in ("F16", "F32") for tensor in tensors)


def _written(value: Any) -> Any:
    """Return a part of a config as JSON, without fields at their defaults, except those of _ALWAYS_WRITTEN."""
    if is_dataclass(value):
        kind = type(value).__name__
        always, written = _ALWAYS_WRITTEN.get(kind, "").split(), dict(_ONCE_WRITTEN.get(kind, {}))
        names = _WRITTEN_NAMES.get(kind, {})
        for field in fields(value):
            content = getattr(value, field.name)
            if field.name in always or content != _default(field):
                written[names.get(field.name, field.name)] = _written(content)
        return written
    if isinstance(value, Mapping):
        return {key: _written(content) for key, content in value.items()}
    if isinstance(value, (list, tuple)):
        return [_written(content) for content in value]
    return value


def _default(field: Any) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default
