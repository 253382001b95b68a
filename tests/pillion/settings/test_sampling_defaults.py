"""A model's own sampling values, from its files and from --override-generation-config."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
from transformers import GenerationConfig

from pillion.config import AnswerFlags
from pillion.engine.checkpoints.generation_config import default_sampling
from pillion.engine.checkpoints.prepare import PreparedModel
from pillion.errors import ConfigError
from pillion.settings.sampling_defaults import SAMPLING_KEYS, override_of
from pillion.types import SamplingParams

GIVEN: dict[str, Any] = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}


def model_in(folder: pathlib.Path, sampling: dict[str, float] | None = None) -> PreparedModel:
    return PreparedModel(
        folder=folder,
        name="m",
        fingerprint="",
        dtype="float32",
        max_model_len=64,
        vocab_size=300,
        eos_token_ids=(),
        bos_token_id=None,
        sampling=sampling or {},
    )


def chosen(folder: pathlib.Path, sampling: dict[str, float] | None = None, **flags: Any) -> dict[str, Any]:
    found = default_sampling(model_in(folder, sampling), AnswerFlags(**flags))
    return {name: value for name in SAMPLING_KEYS if (value := getattr(found, name)) is not None}


def test_output_of_transformers_is_read(tmp_path: pathlib.Path) -> None:
    GenerationConfig(do_sample=True, eos_token_id=[1, 2], **GIVEN).save_pretrained(tmp_path)
    assert chosen(tmp_path) == GIVEN
    # As in vLLM, a bound of new tokens is one of every answer.
    GenerationConfig(max_new_tokens=7).save_pretrained(tmp_path)
    assert chosen(tmp_path)["max_tokens"] == 7


def test_flags_select_the_source_of_sampling_defaults(tmp_path: pathlib.Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    for folder, temperature in ((own, 0.6), (other, 0.3)):
        folder.mkdir()
        (folder / "generation_config.json").write_text(json.dumps({"temperature": temperature, "top_p": None}))
    assert chosen(own) == {"temperature": 0.6}
    assert chosen(own, generation_config=str(other)) == {"temperature": 0.3}
    for name in ("vllm", "none"):
        assert chosen(own, {"top_k": 5}, generation_config=name) == {}
    # What is known of a model holds where its files say nothing; the override goes before all.
    assert chosen(own, {"temperature": 0.2, "top_p": 0.9}) == {"temperature": 0.6, "top_p": 0.9}
    override = '{"temperature": 0, "top_k": 40}'
    assert chosen(own, {"top_p": 0.9}, override_generation_config=override) == {
        "temperature": 0.0,
        "top_p": 0.9,
        "top_k": 40,
    }
    assert chosen(own, generation_config="vllm", override_generation_config=override) == {
        "temperature": 0.0,
        "top_k": 40,
    }
    assert chosen(tmp_path) == {}
    with pytest.raises(ConfigError, match="it is auto, vllm, none, or a folder with a "):
        chosen(own, generation_config=str(tmp_path))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"temperature": -1}, r"temperature: -1.0 is not in \[0, 100\]"),
        ({"temperature": True}, "temperature must be a number"),
        ({"top_p": 0}, r"top_p: 0.0 is not in \(0, 1\]"),
        ({"top_k": 2.5}, "top_k must be a whole number"),
        ({"top_k": -3}, "top_k: -3 is below -1"),
        ({"repetition_penalty": 1e400}, "repetition_penalty must be a number in its range"),
        ({"max_new_tokens": 0}, "max_new_tokens must be 1 or more"),
    ],
)
def test_defaults_outside_their_range_are_rejected_by_name(
    tmp_path: pathlib.Path, said: dict[str, Any], words: str
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    with pytest.raises(ConfigError, match=f"generation_config.json: {words}.*; --generation-config none ignores it"):
        chosen(tmp_path)
    with pytest.raises(ConfigError, match=f"--override-generation-config: {words}"):
        override_of(json.dumps(said))
    assert chosen(tmp_path, generation_config="none") == {}


def test_an_invalid_sampling_override_is_rejected() -> None:
    assert override_of("") == SamplingParams()
    for text, words in (
        ("{", "is not JSON"),
        ("[1]", "is not a JSON object"),
        ('{"temprature": 1}', "unknown key 'temprature'; did you mean temperature"),
        ('{"seed": 1}', "unknown key 'seed'; it takes temperature, top_p"),
    ):
        with pytest.raises(ConfigError, match=words):
            override_of(text)
