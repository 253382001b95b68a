"""Configs of published checkpoints: each is supported, or rejected by the unsupported key."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, Mistral4Config, Mistral4ForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from pillion.engine.models.config_parser import parse_config
from pillion.engine.models.families import layers_of
from pillion.engine.models.model_config import ModelConfig
from pillion.engine.models.rope import make_rope
from pillion.errors import ConfigError
from tests.support.published_configs import REFUSED, SERVED

# transformers registers this text model only for images.
MODEL_FOR_CAUSAL_LM_MAPPING.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)


def frequencies_of_transformers(parsed: ModelConfig, text: dict[str, Any]) -> list[torch.Tensor]:
    """Return the RoPE frequencies of each kind of layer in transformers' model; none for learned positions."""
    # transformers modifies the config objects that it gets.
    text = deepcopy({key: value for key, value in text.items() if key != "quantization_config"})
    made = AutoConfig.for_model(**{**text, "model_type": parsed.family})
    module = sys.modules[MODEL_FOR_CAUSAL_LM_MAPPING[type(made)].__module__]
    rotary = [value for name, value in vars(module).items() if name.endswith("RotaryEmbedding")]
    if not rotary:
        return []
    return [each for name, each in rotary[0](config=made).named_buffers() if "original" not in name]


@pytest.mark.parametrize("name", SERVED)
def test_a_published_config_is_served_and_each_other_key_is_refused_by_its_name(name: str) -> None:
    config = SERVED[name]
    parsed = parse_config(config)
    assert len(layers_of(parsed)) == parsed.num_layers
    text = config.get("text_config", config)
    found = []
    for rope in parsed.ropes:
        served = rope.switches_at or parsed.max_position_embeddings
        made = make_rope(rope, rope.head_dim or parsed.rotary_width, served)
        found.append(made.frequencies[: rope.rotary_dim // 2])
    for expected in frequencies_of_transformers(parsed, text):
        assert any(torch.equal(each, expected) for each in found)
    outer = {} if text is config else config
    for place in (text, outer):
        if not place:
            continue
        changed = {**place, "new_attention_scale": 3.0}
        with pytest.raises(ConfigError, match=r"new_attention_scale = 3\.0"):
            parse_config({**outer, "text_config": changed} if outer and place is text else changed)
    off = {**text, "new_attention_scale": None, "new_option": False, "new_layers": [], "new_maker": "a b"}
    assert parse_config({**outer, "text_config": off} if outer else off) == parsed


@pytest.mark.parametrize("name", REFUSED)
def test_a_published_config_is_refused_by_name(name: str) -> None:
    config, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words):
        parse_config(config)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("MiniMax-M2", {"attn_type_list": [0] * 61 + [1]}, "attn_type_list with layers that are not 1"),
        ("MiniMax-M2", {"layernorm_mlp_beta": 0.5}, r"layernorm_mlp_beta = 0\.5"),
        ("c4ai-command-r7b-12-2024", {"layer_switch": 3}, "layer_switch = 3, which is not its sliding_window_pattern"),
        ("c4ai-command-r7b-12-2024", {"use_parallel_block": False}, "use_parallel_block = False"),
        ("Hunyuan-7B-Instruct", {"rope_scaling": {"alpha": 1000.0, "type": "yarn"}}, "the rope parameter alpha"),
        ("Hunyuan-7B-Instruct", {"dense_list": [4096, 2048]}, "dense_list"),
        ("ERNIE-4.5-21B-A3B-PT", {"moe_use_aux_free": False}, "moe_use_aux_free = False"),
        ("dots.llm1.inst", {"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ("starcoder2-3b", {"norm_type": "rms_norm"}, "norm_type = 'rms_norm'"),
        ("Falcon3-7B-Instruct", {"activation": "geglu"}, "activation = 'geglu'"),
    ],
)
def test_invalid_values_of_published_configs_are_refused(name: str, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config({**SERVED[name], **change})


# Keys that may be 0 or negative, which turns them off.
_SIGNED = {"mscale", "mscale_all_dim", "llama_4_scaling_beta", "attn_scale", "router_jitter_noise", "alpha"}
# Errors use other families' names of these keys.
_SPELLED = {"rotary_pct": "partial_rotary_factor"}


def with_numbers(config: dict[str, Any], value: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the config with each fractional number, also of nested objects, replaced by ``value``, and its key."""
    for key, own in config.items():
        if isinstance(own, dict):
            yield from ((name, {**config, key: changed}) for name, changed in with_numbers(own, value))
        elif isinstance(own, float):
            yield key, {**config, key: value}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -1.0])
def test_impossible_numbers_in_configs_are_refused_or_ignored(value: float) -> None:
    """A number that is not finite or not above 0 is rejected by its key, or has no effect."""
    taken, named = set(), []
    for config in SERVED.values():
        parsed = parse_config(config)
        for key, changed in with_numbers(config, value):
            try:
                taken |= set() if parse_config(changed) == parsed else {key}
            except ConfigError as error:
                named.append((key, _SPELLED.get(key, key), error.message))
    assert [one for one in named if one[0] not in one[2] and one[1] not in one[2]] == []
    assert taken <= (_SIGNED if math.isfinite(value) else set())
