"""``--speculative-config``: vLLM's values are accepted, and invalid ones are rejected by their key's name."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from pillion.cli.flags import read_config
from pillion.errors import ConfigError
from pillion.offline.llm import read_options
from pillion.settings.speculative_config import (
    MAX_SPECULATIVE_TOKENS,
    NO_SPECULATION,
    SpeculativeConfig,
    parse_speculative_config,
)

NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 5}


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (NGRAM, SpeculativeConfig(method="ngram", num_speculative_tokens=5)),
        (
            {**NGRAM, "prompt_lookup_min": 3, "prompt_lookup_max": 3, "disable_by_batch_size": 8},
            SpeculativeConfig(
                method="ngram",
                num_speculative_tokens=5,
                prompt_lookup_min=3,
                prompt_lookup_max=3,
                disable_by_batch_size=8,
            ),
        ),
        # vLLM takes the depth of the trees where no number is given.
        ({"method": "suffix"}, SpeculativeConfig(method="suffix", num_speculative_tokens=MAX_SPECULATIVE_TOKENS)),
        (
            {"method": "suffix", "suffix_decoding_max_tree_depth": 8, "suffix_decoding_max_spec_factor": 2},
            SpeculativeConfig(
                method="suffix",
                num_speculative_tokens=8,
                suffix_decoding_max_tree_depth=8,
                suffix_decoding_max_spec_factor=2.0,
            ),
        ),
        (
            {"model": "org/small", "num_speculative_tokens": 3, "prompt_lookup_max": None},
            SpeculativeConfig(method="draft_model", model="org/small", num_speculative_tokens=3),
        ),
        (
            {"model": "org/Model-speculator.eagle3", "num_speculative_tokens": 3},
            SpeculativeConfig(method="eagle3", model="org/Model-speculator.eagle3", num_speculative_tokens=3),
        ),
    ],
)
def test_valid_configs(said: dict[str, Any], meant: SpeculativeConfig) -> None:
    found = parse_speculative_config(json.dumps(said))
    assert found == meant
    assert parse_speculative_config(str(found)) == found, "a component gets it as a text"


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ('{"speculators_model_type": "eagle3"}', "eagle3"),
        ('{"architectures": ["LlamaForCausalLMEagle3"]}', "eagle3"),
        ('{"speculators_model_type": "dflash"}', "eagle3"),
        ('{"architectures": ["LlamaForCausalLM"]}', "draft_model"),
        ('{"architectures": null}', "draft_model"),
        ("[]", "draft_model"),
        ("no JSON", "draft_model"),
        (None, "draft_model"),
    ],
)
def test_the_method_follows_from_the_draft_folder(config: str | None, method: str, tmp_path: pathlib.Path) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    said = {"model": str(tmp_path), "num_speculative_tokens": 3}
    assert parse_speculative_config(json.dumps(said)).method == method
    assert parse_speculative_config(json.dumps({**said, "method": "eagle3"})).method == "eagle3"


def test_nothing_is_drafted_by_default() -> None:
    assert parse_speculative_config("") == NO_SPECULATION
    assert str(NO_SPECULATION) == ""


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ("ngram", "is not JSON"),
        ("[1]", "is not a JSON object"),
        ('{"method": "ngram", "method": "suffix"}', "a key occurs twice: method, method"),
        ({"num_speculative_tokens": 3}, "method None is not one of ngram, suffix, draft_model, eagle3"),
        ({**NGRAM, "method": "oracle"}, "method 'oracle' is not one of ngram, suffix, draft_model"),
        ({**NGRAM, "method": ["ngram"]}, "method ['ngram'] is not one of"),
        ({"method": "eagle", "model": "m", "num_speculative_tokens": 3}, "method 'eagle' is not supported"),
        ({"method": "eagle3", "num_speculative_tokens": 3}, "method 'eagle3' needs a model"),
        ({"method": "eagle3", "model": "m", "quantization": "int4"}, "quantization belongs to method draft_model, not"),
        ({**NGRAM, "promt_lookup_max": 3}, "has no key 'promt_lookup_max'; with method 'ngram' it has method, num_"),
        ({**NGRAM, "suffix_decoding_max_tree_depth": 8}, "suffix_decoding_max_tree_depth belongs to method suffix"),
        ({**NGRAM, "model": "m"}, "model belongs to method draft_model and eagle3, not to ngram"),
        ({**NGRAM, "num_speculative_tokens": "5"}, "num_speculative_tokens '5' is no int"),
        ({**NGRAM, "num_speculative_tokens": True}, "num_speculative_tokens True is no int"),
        ({**NGRAM, "num_speculative_tokens": 0}, "num_speculative_tokens 0 is not from 1 to 16"),
        ({**NGRAM, "num_speculative_tokens": 17}, "num_speculative_tokens 17 is not from 1 to 16"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": "deep"}, "'deep' is no int"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, "suffix_decoding_min_token_prob 1.5 is not from"),
        ('{"method": "suffix", "suffix_decoding_min_token_prob": NaN}', "suffix_decoding_min_token_prob nan is not"),
        ({"method": "ngram"}, "num_speculative_tokens is missing"),
        ({"method": "draft_model", "num_speculative_tokens": 3}, "needs a model"),
        ({**NGRAM, "prompt_lookup_min": 9}, "prompt_lookup_min 9 is above prompt_lookup_max 8"),
    ],
)
def test_invalid_combinations_are_rejected_by_name(said: Any, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_speculative_config(said if isinstance(said, str) else json.dumps(said))
    assert complaint in caught.value.message
    assert caught.value.message.startswith("--speculative-config")
    assert "\n" not in caught.value.message


def test_a_config_may_be_a_toml_table_or_a_dict(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "pillion.toml"
    file.write_text('speculative-config = {method = "ngram", num_speculative_tokens = 5}\n')
    text = read_config(str(file))["speculative_config"]
    assert parse_speculative_config(text) == parse_speculative_config(json.dumps(NGRAM))
    assert read_options("m", {"speculative_config": NGRAM}).speculative_config == parse_speculative_config(text)
    with pytest.raises(ConfigError, match="no key 'typo'"):
        read_options("m", {"speculative_config": {**NGRAM, "typo": 1}})
