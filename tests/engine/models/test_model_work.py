"""A model's FLOPs per token and query-key pair, as torch counts them in transformers' model."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from pillion.engine.models.config_parser import load_config
from pillion.engine.models.model_work import model_weights, pair_operations, pair_tokens

TOKENS = 24
SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def counted(config: Any) -> tuple[float, float]:
    """Return the FLOPs of a token without the head, and of a query-key pair in all layers."""
    config._attn_implementation = "eager"
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
        ids = torch.zeros(1, TOKENS, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids)
    found = {str(operator): count for operator, count in counter.get_flop_counts()["Global"].items()}
    pairs = sum(count for operator, count in found.items() if "bmm" in operator)
    head = 2 * TOKENS * config.vocab_size * config.hidden_size
    return (sum(found.values()) - pairs - head) / TOKENS, pairs / TOKENS**2


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(architectures=["LlamaForCausalLM"], **SHAPE),
        transformers.Qwen3Config(architectures=["Qwen3ForCausalLM"], head_dim=32, **SHAPE),
        transformers.Gemma4TextConfig(
            architectures=["Gemma4ForCausalLM"],
            **{**SHAPE, "num_hidden_layers": 5},
            head_dim=16,
            global_head_dim=32,
            num_kv_shared_layers=2,
            use_double_wide_mlp=True,
            layer_types=[*(["sliding_attention", "full_attention"] * 2), "full_attention"],
            sliding_window=64,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=96,
        ),
    ],
    ids=["llama", "qwen3", "gemma4"],
)
def test_work_is_what_torch_counts(tmp_path: pathlib.Path, config: Any) -> None:
    config.save_pretrained(tmp_path)
    ours = load_config(tmp_path)
    token, pair = counted(config)
    assert 2 * model_weights(ours)[1] == pytest.approx(token, rel=0.02)
    assert pair_operations(ours, ours.kv_layers) == pytest.approx(pair, rel=0.02)
    windowed = pair_operations(ours, [layer for layer, window in enumerate(ours.sliding_windows) if window])
    assert pair_tokens(ours) == pytest.approx((pair - windowed) / token, rel=0.02)


def test_layers_with_windows_have_no_pairs_late_in_a_prompt(tmp_path: pathlib.Path) -> None:
    config = transformers.MistralConfig(architectures=["MistralForCausalLM"], sliding_window=16, **SHAPE)
    config.save_pretrained(tmp_path)
    assert pair_tokens(load_config(tmp_path)) == 0.0
