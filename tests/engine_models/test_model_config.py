"""Reading config.json: old and new spellings, options, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.model_config import known_architectures, load_config, parse_config
from engine.rope import make_rope
from pillion.errors import ConfigError

BASE = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


def test_old_and_new_spelling_of_rope_are_the_same():
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = parse_config({**BASE, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}})
    new = parse_config({**BASE, "rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **scaling}})
    assert old == new
    assert old.rope.theta == 5e5
    assert parse_config({**BASE, "rope_theta": 77.0}).rope.theta == 77.0
    assert parse_config(BASE).rope.theta == 10_000.0


def test_an_unknown_architecture_is_refused_by_name_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'mamba'.*llama, mistral, qwen2, qwen3"):
        parse_config({**BASE, "model_type": "mamba"})
    with pytest.raises(ConfigError, match="None"):
        parse_config({})
    assert known_architectures() == ("llama", "mistral", "qwen2", "qwen3")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": 0}, "vocab_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "do not fit"),
        ({"head_dim": 15}, "do not fit"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "dynamic"),
        ({"partial_rotary_factor": 0.5}, "partial"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}}, "longrope"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "8 factors"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
    ],
)
def test_what_cannot_be_served_is_refused(change, words):
    with pytest.raises(ConfigError, match=words):
        parse_config({**BASE, **change})


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_what_a_config_leaves_out_is_what_transformers_assumes(name):
    given = {key: BASE[key] for key in BASE if key != "max_position_embeddings"} | {"model_type": name}
    if name != "llama":
        given["num_key_value_heads"] = 4
    theirs = AutoConfig.for_model(**given)
    ours = parse_config(given)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 16)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.sliding_windows == (getattr(theirs, "sliding_window", None) or 0,) * 2


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "factor": 4.0, "truncate": False, "beta_fast": 16, "beta_slow": 2},
        {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 0.9},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5},
        {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0, 2.0] * 4, "long_factor": [1.0, 2.0] * 4},
    ],
)
def test_rope_frequencies_are_those_of_transformers(rope):
    said = {**BASE, "rope_parameters": {"rope_theta": 1000.0, **rope}}
    theirs, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](LlamaConfig(**said), torch.device("cpu"))
    ours = make_rope(parse_config(said).rope, 16)
    torch.testing.assert_close(ours.frequencies, theirs, atol=0, rtol=1e-6)
    assert ours.scale == pytest.approx(scale)


def test_files_that_are_no_config_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no model folder"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a JSON object"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "eos_token_id": [4, 5], "bos_token_id": 1}))
    assert load_config(tmp_path).eos_token_ids == (4, 5)
