"""Per-layer values of a ``config.json``, in families whose layers differ in KV heads. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pillion.engine.models.config_json import above_zero, size
from pillion.engine.models.model_config import LayerHeads, TokenInputs
from pillion.errors import ConfigError

_BY_LAYER = "per_layer_config"


def read_layers(
    name: str, raw: Mapping[str, Any], options: Mapping[str, Any], heads: int, slides: Sequence[bool]
) -> Mapping[str, Any]:
    """Return the per-layer fields of ``ModelConfig``; {} in families whose layers do not differ, by their ``options``.
    ``slides``: for each layer, whether it has a window. Raises ConfigError on inconsistency."""
    if "attention_value_scale" in options:
        return _narrow_values(name, raw, heads, slides)
    if "global_head_dim" not in options:
        return {}
    sources = _kv_sources(name, raw, slides)
    return {
        "layer_heads": _layer_heads(name, raw, heads, slides),
        "kv_sources": sources,
        "values_are_keys": bool(raw["attention_k_eq_v"]),
        "layer_widths": _layer_widths(raw, sources),
        "token_inputs": _token_inputs(name, raw),
    }


def _narrow_values(name: str, raw: Mapping[str, Any], heads: int, slides: Sequence[bool]) -> Mapping[str, Any]:
    """Return the fields for value heads, which may be narrower than key heads, and for KV heads, of which layers with a
    window have twice as many. Raises ConfigError for wider value heads."""
    count, width, values = size(raw, "num_key_value_heads", heads), size(raw, "head_dim"), size(raw, "v_head_dim")
    if values > width or heads % (2 * count):
        raise ConfigError(
            f"{name}: {heads} heads over {count} KV heads with head_dim = {width} and v_head_dim = {values} are"
            " inconsistent"
        )
    return {
        "layer_heads": tuple(LayerHeads(2 * count if slide else count, width) for slide in slides),
        "value_width": values if values < width else 0,
        "value_scale": above_zero(raw, "attention_value_scale", 1.0),
    }


def _layer_heads(name: str, raw: Mapping[str, Any], heads: int, slides: Sequence[bool]) -> tuple[LayerHeads, ...]:
    """Return each layer's KV heads. Raises ConfigError if two layers with a window differ, or two without."""
    local = LayerHeads(size(raw, "num_key_value_heads", heads), size(raw, "head_dim"))
    if raw[_BY_LAYER] is None:
        count = size(raw, "num_global_key_value_heads", local.kv_heads) if raw["attention_k_eq_v"] else local.kv_heads
        full = LayerHeads(count, size(raw, "global_head_dim", 512))
        layer_heads = [local if slide else full for slide in slides]
    else:
        layer_heads = [_layer_heads_from_config(name, raw[_BY_LAYER], layer, local) for layer in range(len(slides))]
    for slide in (True, False):
        kinds = {layer for layer, own in zip(layer_heads, slides, strict=True) if own is slide}
        if len(kinds) > 1:
            raise ConfigError(f"{name}: config.json has {_BY_LAYER} with several sizes of heads for layers of one kind")
        if any(heads % kind.kv_heads or kind.head_dim % 2 for kind in kinds):
            raise ConfigError(f"{name}: {heads} heads and {kinds} are inconsistent")
    return tuple(layer_heads)


def _layer_heads_from_config(name: str, by_layer: Any, layer: int, local: LayerHeads) -> LayerHeads:
    """Return the KV heads of a layer: ``local``, with the values that per_layer_config overrides."""
    if not isinstance(by_layer, Mapping) or not all(str(key).isdigit() for key in by_layer):
        raise ConfigError(f"{name}: config.json: {_BY_LAYER} must be an object with numbers of layers")
    overrides: Any = next((overrides for key, overrides in by_layer.items() if int(key) == layer), {})
    if not isinstance(overrides, Mapping) or not overrides.keys() <= {"head_dim", "num_key_value_heads"}:
        raise ConfigError(
            f"{name}: config.json has {_BY_LAYER} = {overrides!r} for layer {layer}, which is not supported"
        )
    return LayerHeads(
        size(overrides, "num_key_value_heads", local.kv_heads), size(overrides, "head_dim", local.head_dim)
    )


def _kv_sources(name: str, raw: Mapping[str, Any], slides: Sequence[bool]) -> tuple[int, ...]:
    """Return the layer whose KV each layer reads; () if each has its own KV. A layer without KV reads that of the last
    layer of its kind (with or without a window) with KV. Raises ConfigError if no layer of its kind has KV."""
    if not raw["num_kv_shared_layers"]:
        return ()
    shared = size(raw, "num_kv_shared_layers")
    first = max(len(slides) - shared, 0)
    last = {slides[layer]: layer for layer in range(first)}
    if not set(slides) <= last.keys():
        raise ConfigError(
            f"{name}: config.json has num_kv_shared_layers = {shared}, which leaves no layer with keys and values of"
            " its own for each kind of layers"
        )
    return tuple(layer if layer < first else last[slides[layer]] for layer in range(len(slides)))


def _layer_widths(raw: Mapping[str, Any], sources: Sequence[int]) -> tuple[int, ...]:
    """Return the inner width of each layer's MLP; () if all are equal. Layers without their own KV may have twice the
    width."""
    if not raw["use_double_wide_mlp"]:
        return ()
    width = size(raw, "intermediate_size")
    return tuple(width if layer == source else 2 * width for layer, source in enumerate(sources))


def _token_inputs(name: str, raw: Mapping[str, Any]) -> TokenInputs | None:
    """Return the per-layer token inputs. Raises ConfigError if some tokens lack them."""
    if not raw.get("hidden_size_per_layer_input"):
        return None
    table_size, vocab_size = size(raw, "vocab_size_per_layer_input"), size(raw, "vocab_size")
    if table_size < vocab_size:
        raise ConfigError(
            f"{name}: config.json has vocab_size_per_layer_input = {table_size}, fewer than the {vocab_size} tokens"
        )
    return TokenInputs(width=size(raw, "hidden_size_per_layer_input"), vocab_size=table_size)
