"""A checkpoint's sentence-transformers files, in the forms of several versions, and refused ones."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from pillion.errors import ConfigError
from pillion.gateway.pooling.pooling_files import MAX_FILE_BYTES, VectorForm, read_vector_form
from pillion.gateway.pooling.pooling_rows import Pooling

OLD = "sentence_transformers.models."
MEAN = {"pooling_mode_mean_tokens": True}
LAST = {"word_embedding_dimension": 64, "pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}


def written(folder: pathlib.Path, kinds: list[str], pooling: Any = LAST, **files: Any) -> pathlib.Path:
    """Write the files of a model of these modules, the second of which pools, and further ``files``."""
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [{"idx": n, "name": str(n), "path": paths[n], "type": kind} for n, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    if pooling is not None:
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / f"{name}.json").write_text(text)
    return folder


def three(prefix: str = OLD) -> list[str]:
    return [f"{prefix}{kind}" for kind in ("Transformer", "Pooling", "Normalize")]


def test_a_checkpoint_without_pooling_files_has_normalized_vectors(tmp_path: pathlib.Path) -> None:
    assert read_vector_form(tmp_path) == VectorForm(normalized=True, prompts={}, default_prompt="")


@pytest.mark.parametrize(
    "kinds",
    [three(), three()[:2], ["sentence_transformers.base.modules.transformer.Transformer", *three("a.b.")[1:]]],
    ids=["old", "not normalized", "new"],
)
@pytest.mark.parametrize("pooling", [LAST, {"embedding_dimension": 64, "pooling_mode": "lasttoken"}], ids=str)
def test_last_token_pooling_is_read_in_every_form(tmp_path: pathlib.Path, kinds: list[str], pooling: Any) -> None:
    assert read_vector_form(written(tmp_path, kinds, pooling)) == VectorForm(normalized=len(kinds) == 3)


@pytest.mark.parametrize(
    ("pooling", "wanted"),
    [(MEAN, "mean"), ({"pooling_mode": "mean"}, "mean"), ({"pooling_mode_cls_token": True}, "cls")],
)
def test_mean_and_first_token_pooling_are_read(tmp_path: pathlib.Path, pooling: Any, wanted: str) -> None:
    assert read_vector_form(written(tmp_path, three(), pooling)) == VectorForm(pooling=Pooling(wanted))
    # Without prompts no text contains prompt rows.
    without = {**pooling, "include_prompt": False}
    assert read_vector_form(written(tmp_path, three(), without)) == VectorForm(pooling=Pooling(wanted))


def test_prompts_and_the_default_prompt_are_read(tmp_path: pathlib.Path) -> None:
    own = {"prompts": {"query": "Find: ", "document": ""}, "default_prompt_name": "query"}
    form = read_vector_form(written(tmp_path, three(), config_sentence_transformers=own))
    assert (form.prompts, form.default_prompt) == (own["prompts"], "query")


@pytest.mark.parametrize(
    ("kinds", "wanted"), [({"text": {}}, False), ({"text": {}, "message": {"format": "flat"}}, True), ({}, False)]
)
def test_message_input_is_read_from_the_modality_config(
    tmp_path: pathlib.Path, kinds: dict[str, Any], wanted: bool
) -> None:
    bounds = {"modality_config": kinds, "max_seq_length": 9}
    form = read_vector_form(written(tmp_path, three(), sentence_bert_config=bounds))
    assert (form.as_messages, form.max_tokens) == (wanted, 9)


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({"tokenizer_config": {"model_max_length": 9}}, 9),
        ({"tokenizer_config": {"model_max_length": 9}, "sentence_bert_config": {"max_seq_length": 7}}, 7),
        ({"tokenizer_config": {"model_max_length": 9}, "sentence_roberta_config": {"max_seq_length": 8}}, 8),
        ({"tokenizer_config": {"model_max_length": 10**30}}, None),
        ({"tokenizer_config": {"model_max_length": 1e30}}, None),
        ({"tokenizer_config": {}}, None),
    ],
)
def test_the_max_length_is_read_in_every_form(
    tmp_path: pathlib.Path, files: dict[str, Any], wanted: int | None
) -> None:
    """Version 6 stores the length with the tokenizer, older ones in a file named after the model."""
    assert read_vector_form(written(tmp_path, three(), **files)).max_tokens == wanted


@pytest.mark.parametrize(
    ("kinds", "pooling", "files", "message"),
    [
        ([*three()[:2], f"{OLD}Dense"], LAST, {}, "the modules Transformer, Pooling, Dense; only"),
        (three()[:1], LAST, {}, "the modules Transformer; only"),
        (
            three(),
            {"pooling_mode_max_tokens": True},
            {},
            "pooling by max; only one of cls, mean, lasttoken is supported",
        ),
        (three(), {"pooling_mode_weightedmean_tokens": True}, {}, "pooling by weightedmean; only"),
        (
            three(),
            MEAN | {"include_prompt": False},
            {"config_sentence_transformers": {"prompts": {"q": "Q: "}}},
            "without",
        ),
        (three(), {"pooling_mode_cls_token": True, "pooling_mode_lasttoken": True}, {}, "pooling by cls, lasttoken"),
        (three(), {"pooling_mode": ["mean", "lasttoken"]}, {}, "pooling by mean, lasttoken"),
        (three(), LAST, {"config": {"architectures": ["Qwen3ForSequenceClassification"]}}, "is a classifier"),
        (three(), {}, {}, "pooling by nothing"),
        (three(), None, {}, "config.json, named by modules.json, is missing"),
        (three(), [], {}, "is not a JSON object"),
        (three(), LAST, {"tokenizer_config": {"model_max_length": 0}}, "model_max_length 0 is not a number of tokens"),
        (three(), LAST, {"sentence_bert_config": {"do_lower_case": True}}, "do_lower_case is not supported"),
        (three(), LAST, {"sentence_bert_config": {"query_expansion": {"a": 1}}}, "query_expansion is not supported"),
        (three(), LAST, {"sentence_bert_config": {"modality_config": {"image": {}}}}, "modality_config names no text"),
        (three(), LAST, {"config_sentence_transformers": {"prompts": {"q": 1}}}, "prompts is not an object of texts"),
        (three(), LAST, {"config_sentence_transformers": {"default_prompt_name": "q"}}, "there is no prompt 'q'"),
        (three(), LAST, {"config_sentence_transformers": "{"}, "is not valid JSON"),
        (three(), LAST, {"config_sentence_transformers": " " * (MAX_FILE_BYTES + 1)}, "is larger than"),
        (three(), LAST, {"modules": [{"path": "../x", "type": "a.Transformer"}]}, "outside of the folder"),
        (three(), LAST, {"modules": [{"path": "/x", "type": "a.Transformer"}]}, "outside of the folder"),
        (three(), LAST, {"modules": [{"path": ""}]}, "a module without a type"),
        (three(), LAST, {"modules": {}}, "is not a JSON list"),
    ],
)
def test_unsupported_options_are_named(
    tmp_path: pathlib.Path, kinds: list[str], pooling: Any, files: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_vector_form(written(tmp_path, kinds, pooling, **files))
