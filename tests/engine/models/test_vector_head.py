"""Classification heads against transformers, models without any head, and heads that do not fit their config."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from lab.testbed.tiny_model import save_model
from pillion.config import DecodeFlags, ModelFlags
from pillion.engine.checkpoints.checkpoint import chooses_tokens
from pillion.engine.checkpoints.prepare import PreparedModel, prepare
from pillion.engine.checkpoints.weights import load_labels
from pillion.engine.load_model import load_model
from pillion.engine.models.config_parser import load_config
from pillion.engine.models.vector_head import VectorHead
from pillion.errors import ConfigError
from tests.support.cpu_model import CpuDriver, cpu_backend, needs_kernels
from tests.support.families import FAMILIES, tokens_of
from tests.support.torch_model import BackendDriver

pytestmark = pytest.mark.usefixtures("own_cache")

TOLERANCE = 1e-4
LONG = ("llama-gqa-tied", "mistral-sliding", "gemma2", "phi3", "mixtral", "gpt2", "starcoder2")
NAMES = ["qwen3-qk-norm", *(pytest.param(name, marks=pytest.mark.long) for name in LONG if name in FAMILIES)]
TEXT = tokens_of(40, 3)


def make_classifier(folder: pathlib.Path, labels: int, **shape: Any) -> pathlib.Path:
    """Write a random classifier."""
    save_model(folder, **{**shape, "tie_word_embeddings": False})
    torch.manual_seed(7)
    config = AutoConfig.from_pretrained(folder)
    config.num_labels, config.pad_token_id = labels, 2
    made = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.15)
    made.save_pretrained(folder)
    return folder


def prepared_in(folder: pathlib.Path) -> PreparedModel:
    return prepare(ModelFlags(model=str(folder), dtype="float32"))


def driver_of(prepared: PreparedModel, kernels: str) -> BackendDriver:
    if kernels == "torch":
        return BackendDriver(prepared)
    return CpuDriver(prepared, 16, 64, backend=cpu_backend(prepared, 16, threads=2))


def vector_of(driver: BackendDriver, text: list[int]) -> Any:
    batch = driver.sequences.step([(driver.sequences.add()[0], text)], [len(text) - 1])
    batch = dataclasses.replace(batch, pooled=1)
    assert len(driver.backend.forward(batch)) == 0
    return driver.backend._read_vectors(batch)[0]


@pytest.mark.parametrize("kernels", ["torch", pytest.param("cpu", marks=needs_kernels)])
@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_label_logits_match_the_oracle(tmp_path: pathlib.Path, name: str, kernels: str) -> None:
    shape = {key: value for key, value in FAMILIES[name].items() if key != "serve"}
    folder = make_classifier(tmp_path, 3, **shape)
    oracle = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    wanted = oracle(torch.tensor([TEXT])).logits[0].numpy()
    prepared = prepared_in(folder)
    config = load_config(prepared.folder)
    assert (config.labels, chooses_tokens(prepared.folder, config)) == (3, False)
    weight = load_labels(prepared.folder, config)
    assert weight is not None
    found = VectorHead(weight.numpy()).logits(vector_of(driver_of(prepared, kernels), TEXT))
    assert found == pytest.approx(wanted, abs=TOLERANCE * max(1.0, float(abs(wanted).max())))


@pytest.mark.parametrize("kernels", ["torch", pytest.param("cpu", marks=needs_kernels)])
@torch.inference_mode()
def test_a_base_model_needs_no_head(tmp_path: pathlib.Path, kernels: str) -> None:
    plain = save_model(tmp_path / "plain", model_type="qwen3", tie_word_embeddings=False)
    base = AutoModel.from_pretrained(plain, dtype=torch.float32)
    for path in plain.glob("*.safetensors"):
        path.unlink()
    base.save_pretrained(plain)
    prepared = prepared_in(plain)
    assert not chooses_tokens(prepared.folder, load_config(prepared.folder))
    wanted = base.eval()(torch.tensor([TEXT])).last_hidden_state[0, -1].numpy()
    assert vector_of(driver_of(prepared, kernels), TEXT) == pytest.approx(wanted, abs=TOLERANCE)


def test_a_worker_reports_whether_its_model_generates(tmp_path: pathlib.Path) -> None:
    folders = (save_model(tmp_path / "plain"), make_classifier(tmp_path / "labels", 2))
    found = []
    for folder in folders:
        flags = DecodeFlags(model=str(folder), dtype="float32", cpu_kernels="torch", component_id="decode-0")
        model = load_model(flags, 1)
        found.append((model.chooses_tokens, None if model.head is None else model.head.weight.shape))
        model.backend.close()
    assert found == [(True, None), (False, (2, 64))]


def changed(edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[pathlib.Path], None]:
    def change(folder: pathlib.Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return change


def labelled(folder: pathlib.Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["id2label"] = {str(n): str(n) for n in range(5)}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(lambda t: t.pop("score.weight")), r"lacks score\.weight, which a llama model needs"),
        (
            changed(lambda t: t.update({"score.weight": t["score.weight"][:, :9].contiguous()})),
            r"model\.safetensors: score\.weight is \[2, 9\], but config\.json requires \[2, 64\]",
        ),
        (labelled, r"model\.safetensors: score\.weight is \[2, 64\], but config\.json requires \[5, 64\]"),
        (
            changed(lambda t: t["score.weight"].__setitem__((0, 3), float("nan"))),
            r"model\.safetensors: score\.weight contains NaN or infinities",
        ),
        (changed(lambda t: t.update({"score.bias": torch.zeros(2)})), r"model\.safetensors holds score\.bias, which"),
    ],
    ids=["missing", "narrow", "labels", "nan", "bias"],
)
def test_a_head_that_does_not_fit_is_named_with_its_file(
    tmp_path: pathlib.Path, change: Callable[[pathlib.Path], None], message: str
) -> None:
    folder = make_classifier(tmp_path, 2)
    change(folder)
    flags = DecodeFlags(model=str(folder), dtype="float32", cpu_kernels="torch", component_id="decode-0")
    with pytest.raises(ConfigError, match=message):
        load_model(flags, 1)
