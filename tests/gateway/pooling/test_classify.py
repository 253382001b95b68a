"""/classify over real sockets with scripted peers, parsing of config.json, and LLM.classify beside transformers."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from lab.testbed.tiny_model import save_model
from lab.testbed.toy_tokenizer import byte_tokenizer
from pillion import LLM, InvalidRequest
from pillion.errors import ConfigError
from pillion.gateway.pooling.label_forms import Activation, read_label_form
from tests.engine.models.test_vector_head import make_classifier
from tests.support.fake_components import running_fake_cluster, vector_of
from tests.support.http import call

pytestmark = pytest.mark.usefixtures("prepared_here")
NAMES = ["joy", "anger", "fear", "none"]
TEXTS = ["The sea", "x", "A grey cat sat"]


def write_config(folder: pathlib.Path, **more: Any) -> pathlib.Path:
    """Return a classifier's config.json with as many labels as a scripted worker's row has numbers."""
    named = {str(n): name for n, name in enumerate(NAMES)}
    config = {"architectures": ["LlamaForSequenceClassification"], "model_type": "llama", "id2label": named, **more}
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def logits(text: str) -> np.ndarray:
    return vector_of(byte_tokenizer().encode(text).ids).astype(np.float64)


def softmax(row: np.ndarray) -> np.ndarray:
    grown = np.exp(row - row.max())
    shares: np.ndarray = grown / grown.sum()
    return shares


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
async def test_each_text_gets_its_labels_in_order(tmp_path: pathlib.Path, path: str) -> None:
    async with running_fake_cluster(config=write_config(tmp_path)) as fakes:
        address = fakes.gateway.http_address
        reply = await call(address, path, {"input": [*TEXTS[:2], TEXTS[2]], "user": "u"})
        assert (reply.status, reply.json.get("object"), reply.json.get("model")) == (200, "list", "toy"), reply.json
        tokens = sum(len(byte_tokenizer().encode(text).ids) for text in TEXTS)
        assert (reply.json["usage"]["prompt_tokens"], reply.json["usage"]["total_tokens"]) == (tokens, tokens)
        for n, (text, one) in enumerate(zip(TEXTS, reply.json["data"], strict=True)):
            wanted = softmax(logits(text))
            assert one["probs"] == pytest.approx(wanted.tolist(), abs=1e-6)
            assert {**one, "probs": ()} == {
                "index": n, "label": NAMES[int(wanted.argmax())], "num_classes": 4, "probs": ()
            }  # fmt: skip
        ids = byte_tokenizer().encode("The sea").ids
        for sent in ("The sea", ids):
            raw = await call(address, path, {"input": sent, "use_activation": False})
            assert [one["probs"] for one in raw.json["data"]] == [logits("The sea").tolist()]
        await fakes.settled()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ["x", ""]}, "input[1]"),
        ({"input": ["x", "y" * 100_000]}, "input[1]"),
        ({"input": "x", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ],
    ids=lambda one: str(one)[:60],
)
async def test_a_wrong_field_is_named(tmp_path: pathlib.Path, body: dict[str, Any], param: str) -> None:
    async with running_fake_cluster(config=write_config(tmp_path)) as fakes:
        reply = await call(fakes.gateway.http_address, "/v1/classify", body)
        assert (reply.status, reply.error["param"]) == (400, param)
        assert not fakes.decode.submits
        await fakes.settled()


async def test_a_model_that_is_not_a_classifier_is_an_error(tmp_path: pathlib.Path) -> None:
    config = write_config(tmp_path, architectures=["LlamaForCausalLM"])
    async with running_fake_cluster(config=config) as fakes:
        reply = await call(fakes.gateway.http_address, "/v1/classify", {"input": "x"})
        assert reply.status == 400
        assert "has no labels of texts" in reply.error["message"]
        assert not fakes.decode.submits


def test_activations_are_those_of_problem_type(tmp_path: pathlib.Path) -> None:
    row = np.array([-90.0, 0.5, 100.0, 2.0], np.float32)
    for kind in Activation:
        write_config(tmp_path, problem_type=kind.value)
        values = read_label_form(tmp_path).values(row, activated=True)
        exact = torch.tensor(row).double()
        wanted = {
            Activation.SOFTMAX: exact.softmax(0),
            Activation.SIGMOID: exact.sigmoid(),
            Activation.NONE: exact,
        }[kind]
        assert values.tolist() == pytest.approx(wanted.tolist(), rel=1e-6, abs=1e-30)
        assert read_label_form(tmp_path).values(row, activated=False).tolist() == row.tolist()
    write_config(tmp_path, id2label={"0": "yes"}, num_labels=1)
    one = read_label_form(tmp_path)
    assert one.values(row[1:2], activated=True).tolist() == pytest.approx([1 / (1 + np.exp(-0.5))])
    write_config(tmp_path, id2label={"1": "known"}, num_labels=3)
    assert read_label_form(tmp_path).labels == ("LABEL_0", "known", "LABEL_2")
    for wrong, message in (({"problem_type": "odd"}, "problem_type 'odd'"), ({"id2label": {"0": 3}}, "id2label has")):
        write_config(tmp_path, **wrong)
        with pytest.raises(ConfigError, match=message):
            read_label_form(tmp_path)


@torch.inference_mode()
def test_llm_classify_gives_the_oracles_probabilities(tmp_path: pathlib.Path) -> None:
    folder = make_classifier(tmp_path / "model", 3)
    oracle = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    options = {"max_model_len": "256", "kv_pool_bytes": "16MiB", "cpu_threads": 1, "dtype": "float32"}
    with LLM(str(folder), max_num_batched_tokens=32, max_num_seqs=16, **options) as llm:
        codec = llm.get_tokenizer()
        texts = ["The sea is blue.", "x", "Land lies beside it. " * 5]
        found = llm.classify(texts)
        for text, one in zip(texts, found, strict=True):
            ids = torch.tensor([codec.encode(text)])
            wanted = oracle(ids).logits[0].double().softmax(0)
            assert one.outputs.probs == pytest.approx(wanted.tolist(), abs=1e-5)
            assert (one.outputs.num_classes, one.labels) == (3, ("LABEL_0", "LABEL_1", "LABEL_2"))
        raw = llm.classify(texts, use_activation=False)
        for one, other in zip(found, raw, strict=True):
            assert torch.tensor(other.outputs.probs).softmax(0).tolist() == pytest.approx(one.outputs.probs, abs=1e-6)
        assert [one.outputs.probs for one in llm.classify(texts[::-1])] == [one.outputs.probs for one in found[::-1]]


def test_llm_classify_refuses_a_model_of_another_kind(tmp_path: pathlib.Path) -> None:
    options = {"kv_pool_bytes": "16MiB", "cpu_threads": 1, "dtype": "float32"}
    with (
        LLM(str(save_model(tmp_path / "model")), **options) as llm,
        pytest.raises(InvalidRequest, match=r"has no labels of texts: .* has no classification head"),
    ):
        llm.classify("x")
