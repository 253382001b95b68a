"""All forms in which transformers saves a model have the same tensors: names of published files and of its classes,
shards, without a head, as a classifier, and the text model alone or inside a larger one."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Container, Iterable, Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from pillion.engine.checkpoints.checkpoint import chooses_tokens, decoder_tensors, open_checkpoint
from pillion.engine.checkpoints.weights import load_layer
from pillion.engine.encoders.encoder_weights import read_tensors
from pillion.engine.models.config_parser import load_config
from pillion.engine.models.families import FAMILIES as ROWS
from pillion.engine.models.families import layers_of
from pillion.engine.models.model_config import ModelConfig
from pillion.engine.models.model_shard import ModelShard
from pillion.engine.quantized.quantizer import quantize_folder
from pillion.engine.ranks.rank_weights import shard_layer
from pillion.errors import ConfigError
from pillion.kernels.torch.quantized_matrix import plain
from pillion.kernels.torch.torch_linear import Linear
from tests.engine.encoders.test_encoder import KINDS, make_encoder
from tests.support.families import FAMILIES, make_model
from tests.support.hybrids import HYBRIDS
from tests.support.text_parts import WHOLE, as_published, whole_model

Read = tuple[ModelConfig, dict[str, torch.Tensor]]
OF_CLASSES = {"save_original_format": False}
HEADS = {"lm_head", "score"}
CASES = {**FAMILIES, **HYBRIDS}
# The first case of each family whose classes have different names.
NAMED = [
    next(case for case, settings in CASES.items() if settings.get("model_type", "llama") == name)
    for name, family in ROWS.items()
    if family.model_names
]
SHORT = {*NAMED, "llama-gqa-tied", "gpt2", "opt", "qwen3_vl_moe", "qianfan_ocr", "kimi_k25", "llava", "idefics3"}


def parametrized(names: Iterable[str], short: Container[str] = SHORT) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=() if name in short else pytest.mark.long) for name in names]
    )


def read(folder: pathlib.Path) -> Read:
    """Read a folder: its config without the head's keys, and its tensors by the decoder's names."""
    config = load_config(folder)
    with open_checkpoint(folder, config) as checkpoint:
        keys = [key for key in {**decoder_tensors(config), "lm_head": ()} if checkpoint.has(key)]
        found = {key: checkpoint.load(key, torch.float32).clone() for key in keys}
    return dataclasses.replace(config, headless=False, tie_word_embeddings=False, labels=0), found


def check(folder: pathlib.Path, wanted: Read, *, has_head: bool = True) -> None:
    """Assert that a folder has the config and the tensors, and a head if expected."""
    (config, tensors), (wanted_config, wanted_tensors) = read(folder), wanted
    # transformers loads a Mistral with layers of several kinds as Ministral.
    assert {config.family, wanted_config.family} in ({config.family}, {"mistral", "ministral"})
    assert dataclasses.replace(config, family=wanted_config.family) == wanted_config
    assert tensors.keys() - HEADS == wanted_tensors.keys() - HEADS
    assert not has_head or tensors.keys() == wanted_tensors.keys()
    for key in tensors.keys() & wanted_tensors.keys():
        assert torch.equal(tensors[key], wanted_tensors[key]), key
    real = load_config(folder)
    tied = real.tie_word_embeddings and not real.labels
    assert chooses_tokens(folder, real) == (has_head or tied)


def saved(model: Any, root: pathlib.Path, shards: bool = False) -> Iterator[pathlib.Path]:
    """Save a model by published names and by its class's, and with ``shards`` also in shards."""
    for number, how in enumerate(({}, OF_CLASSES, {"max_shard_size": "100KB"})[: 3 if shards else 2]):
        folder = root / str(number)
        model.save_pretrained(folder, **how)
        yield folder


# Other tests compare the logits of the first form with transformers'.
@parametrized(CASES)
def test_text_models_are_read_from_all_saved_forms(name: str, tmp_path: pathlib.Path) -> None:
    first, _ = make_model(tmp_path / "first", CASES[name])
    wanted, model = read(first), AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32)
    for form in saved(model, tmp_path / "again", shards=True):
        check(form, wanted)
    for form in saved(model.base_model, tmp_path / "within"):
        check(form, wanted, has_head=False)
    AutoModelForCausalLM.from_pretrained(tmp_path / "again" / "1").save_pretrained(tmp_path / "named")
    check(tmp_path / "named", wanted)
    if type(model.config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        classifier = AutoModelForSequenceClassification.from_pretrained(first, dtype=torch.float32, num_labels=3)
        for form in saved(classifier, tmp_path / "classifier"):
            check(form, wanted, has_head=False)
            assert torch.equal(read(form)[1]["score"], classifier.score.weight)


# The first case of each family: heads depend only on the classes.
@parametrized(
    {settings.get("model_type", "llama"): case for case, settings in reversed(CASES.items())}.values(),
    short=("llama-gqa-tied", "gpt2"),
)
def test_tied_and_untied_heads(name: str, tmp_path: pathlib.Path) -> None:
    """The variant that test_text_models_are_read_from_all_saved_forms lacks: some classes never tie, and save both."""
    tied = not CASES[name].get("tie_word_embeddings", True)
    first, _ = make_model(tmp_path / "first", {**CASES[name], "tie_word_embeddings": tied})
    model = AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32)
    for form in saved(model, tmp_path / "again"):
        _, tensors = read(form)
        assert tied or "lm_head" in tensors
        assert torch.equal(tensors.get("lm_head", tensors["embedding"]), model.get_output_embeddings().weight)


@parametrized(WHOLE)
def test_nested_text_models_are_read_from_all_saved_forms(name: str, tmp_path: pathlib.Path) -> None:
    model, first = whole_model(name), tmp_path / "first"
    model.save_pretrained(first)
    file = first / "model.safetensors"
    save_file(as_published(name, load_file(file)), file, metadata={"format": "pt"})
    wanted = read(first)
    for form in saved(model, tmp_path / "again", shards=True):
        check(form, wanted)
    for form in saved(AutoModelForImageTextToText.from_pretrained(first, dtype=torch.float32), tmp_path / "loaded"):
        check(form, wanted)
    within = getattr(model, "model", None)
    text = model.language_model if within is None else within.get_decoder()
    for form in saved(text, tmp_path / "text"):
        check(form, wanted, has_head=within is None)
    for form in saved(within, tmp_path / "within") if within is not None else ():
        check(form, wanted, has_head=False)
    if type(model.config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        alone = AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32)
        for form in saved(alone, tmp_path / "alone"):
            check(form, wanted)


@pytest.mark.parametrize("name", KINDS)
def test_an_encoder(name: str, tmp_path: pathlib.Path) -> None:
    first = make_encoder(tmp_path / "first", name)
    wanted = read_tensors(first, load_config(first), torch.float32)
    for kind in (AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification):
        model = kind.from_pretrained(first, dtype=torch.float32)
        for form in saved(model, tmp_path / kind.__name__, shards=kind is AutoModel):
            found = read_tensors(form, load_config(form), torch.float32)
            assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())


def both_ways(model: Any, root: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path, pathlib.Path]:
    """Save a Qwen3-VL model like transformers 5 and like published files; return both folders and the second one's
    file."""
    straight, turned = root / "straight", root / "turned"
    for folder in (straight, turned):
        model.save_pretrained(folder)
    file = turned / "model.safetensors"
    save_file(as_published("qwen3_vl_moe", load_file(file)), file, metadata={"format": "pt"})
    return straight, turned, file


@pytest.mark.parametrize("inner", [48, 64, 32])  # The down projection is square with 64, gate and up with 32.
def test_transposed_experts(inner: int, tmp_path: pathlib.Path) -> None:
    """Published files of Qwen3-VL have experts' inputs as rows; those saved by transformers 5 have outputs."""
    model = whole_model("qwen3_vl_moe", moe_intermediate_size=inner)
    straight, turned, file = both_ways(model, tmp_path)
    _, found = read(straight)
    experts = model.model.language_model.layers[1].mlp.experts
    for number in range(4):
        assert torch.equal(found[f"layers.1.experts.{number}.gate_up"], experts.gate_up_proj[number])
        assert torch.equal(found[f"layers.1.experts.{number}.down"], experts.down_proj[number])
    check(turned, read(straight))
    first_layer = {
        name: tensor for name, tensor in load_file(straight / "model.safetensors").items() if ".layers.0." in name
    }
    save_file(load_file(file) | first_layer, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp.* is \[experts, inputs, outputs\], and .*layers\.0\.mlp"):
        read(turned)


def test_ranks_of_transposed_experts_have_the_same_shares(tmp_path: pathlib.Path) -> None:
    straight, turned, _ = both_ways(whole_model("qwen3_vl_moe"), tmp_path)
    for rank in range(2):
        shares = []
        for folder in (straight, turned):
            config = load_config(folder)
            with open_checkpoint(folder, config) as checkpoint:
                whole = load_layer(checkpoint, config, torch.float32, 1, Linear.plain)
            share = shard_layer(whole, layers_of(config)[1], ModelShard.of(config, rank, 2))
            experts = (share[name] for name in ("experts.gate_up", "experts.down"))
            shares.append([plain(linear.weight, torch.float32) for linears in experts for linear in linears])
        assert len(shares[0]) == 8
        assert all(map(torch.equal, *shares))


@pytest.mark.parametrize("name", ["gpt2", "nemotron-h", "qwen3_vl_moe"])
def test_all_saved_forms_are_quantized_to_the_same_codes(name: str, tmp_path: pathlib.Path) -> None:
    if name in WHOLE:
        first, second, _ = both_ways(whole_model(name), tmp_path)
    else:
        first, _ = make_model(tmp_path / "first", {**CASES[name], "tie_word_embeddings": False})
        second = tmp_path / "second"
        AutoModelForCausalLM.from_pretrained(first).save_pretrained(second, **OF_CLASSES)
    few = []
    for form in (first, second):
        folder = tmp_path / f"few-{form.name}"
        folder.mkdir()
        quantize_folder(form, folder, "int4", 16, lambda _: None)
        few.append(read(folder)[1])
    assert few[0].keys() == few[1].keys()
    assert all(torch.equal(tensor, few[1][key]) for key, tensor in few[0].items())
    assert not torch.equal(few[0]["lm_head"], read(first)[1]["lm_head"])
