"""Encoders against transformers: rows, pairs, padding, classifiers, bits independent of other texts, bad files."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from lab.testbed.tiny_model import save_tokenizer
from pillion.config import DecodeFlags, ModelFlags
from pillion.engine.backends.loaded_model import LoadedModel
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.load_model import load_model
from pillion.engine.models.config_parser import parse_config
from pillion.errors import ConfigError, Internal
from pillion.kernels.step import StepBatch

pytestmark = pytest.mark.usefixtures("own_cache")

SHAPE = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 100,
    "pad_token_id": 1,
}
KINDS: dict[str, dict[str, Any]] = {
    "bert": {"pad_token_id": 0, "hidden_act": "gelu_new"},
    "roberta": {"type_vocab_size": 1},
    "xlm-roberta": {"type_vocab_size": 1, "hidden_act": "gelu"},
    "modernbert": {"local_attention": 12, "global_attn_every_n_layers": 2, "norm_bias": True, "mlp_bias": True},
    "modernbert-mean": {"local_attention": 12, "classifier_pooling": "mean", "classifier_bias": True},
}
TOLERANCE = 2e-5


def make_encoder(folder: pathlib.Path, name: str, labels: int = 0) -> pathlib.Path:
    """Write a random encoder, or a classifier of ``labels`` labels."""
    folder.mkdir(parents=True, exist_ok=True)
    kind = "modernbert" if name.startswith("modernbert") else name
    shape = {**SHAPE, "vocab_size": save_tokenizer(folder), **KINDS[name]}
    config = AutoConfig.for_model(kind, **shape, **({"num_labels": labels} if labels else {}))
    torch.manual_seed(3)
    made = (AutoModelForSequenceClassification if labels else AutoModel).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    made.save_pretrained(folder)
    return folder


def loaded(folder: pathlib.Path) -> LoadedModel:
    return load_model(DecodeFlags(model=str(folder), dtype="float32", component_id="decode-0"), 1)


def batch_of(texts: list[list[int]], seconds: list[int] | None = None) -> StepBatch:
    """Return a step of whole texts with all rows selected."""
    counts = [len(text) for text in texts]
    starts = np.cumsum([0, *counts]).astype(np.int32)
    return StepBatch(
        token_ids=np.concatenate([np.array(text, np.int32) for text in texts]),
        positions=np.concatenate([np.arange(count, dtype=np.int32) for count in counts]),
        query_starts=starts,
        context_lens=np.array(counts, np.int32),
        block_tables=np.zeros((len(texts), 8), np.int32),
        sample_rows=np.arange(starts[-1], dtype=np.int32),
        pooled=int(starts[-1]),
        second_starts=None if seconds is None else np.array(seconds, np.int32),
    )


def rows_of(model: LoadedModel, *texts: list[int], seconds: list[int] | None = None) -> np.ndarray:
    backend: Any = model.backend
    batch = batch_of(list(texts), seconds)
    backend._run(torch.empty(0), batch)
    found: np.ndarray = backend._read_vectors(batch)
    return found


def some(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 250, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("name", list(KINDS)[:4])
@torch.inference_mode()
def test_hidden_states_match_the_oracle_and_are_batch_invariant(tmp_path: pathlib.Path, name: str) -> None:
    model = loaded(make_encoder(tmp_path, name))
    oracle = AutoModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    longest = model.prepared.max_model_len - 1
    assert longest == (98 if "roberta" in name else 100)
    texts = [some(1), some(7, 1), some(33, 2), some(longest, 3)]
    together = rows_of(model, *texts)
    first = 0
    for text in texts:
        wanted = oracle(torch.tensor([text])).last_hidden_state[0].numpy()
        alone = rows_of(model, text)
        assert np.abs(alone - wanted).max() < TOLERANCE * max(1.0, float(np.abs(wanted).max()))
        assert together[first : first + len(text)].tobytes() == alone.tobytes()
        first += len(text)


@torch.inference_mode()
def test_token_types_mark_the_second_text_if_the_model_has_them(tmp_path: pathlib.Path) -> None:
    for name in ("bert", "xlm-roberta"):
        folder = make_encoder(tmp_path / name, name)
        model, oracle = loaded(folder), AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
        text, kinds = some(20), torch.tensor([[0] * 8 + [1] * 12])
        given = {"token_type_ids": kinds} if name == "bert" else {}
        wanted = oracle(torch.tensor([text]), **given).last_hidden_state[0].numpy()
        found = rows_of(model, some(3), text, seconds=[0, 8])[3:]
        assert np.abs(found - wanted).max() < TOLERANCE * max(1.0, float(np.abs(wanted).max()))
        if name == "bert":
            assert np.abs(found - rows_of(model, text)).max() > 0.01


@torch.inference_mode()
def test_a_padding_token_within_a_text_is_not_counted(tmp_path: pathlib.Path) -> None:
    model = loaded(make_encoder(tmp_path, "roberta"))
    oracle = AutoModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    text = [5, 1, 7, 1, 1, 9]
    wanted = oracle(torch.tensor([text]), attention_mask=torch.ones(1, 6)).last_hidden_state[0].numpy()
    assert np.abs(rows_of(model, text) - wanted).max() < TOLERANCE * max(1.0, float(np.abs(wanted).max()))


@pytest.mark.parametrize("name", list(KINDS))
@pytest.mark.parametrize("labels", [1, 3])
@torch.inference_mode()
def test_label_logits_match_the_oracle(tmp_path: pathlib.Path, name: str, labels: int) -> None:
    model = loaded(make_encoder(tmp_path, name, labels))
    oracle = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32).eval()
    text = some(30)
    wanted = oracle(torch.tensor([text])).logits[0].numpy()
    rows = rows_of(model, text)
    assert model.head is not None
    found = model.head.logits(rows.mean(0) if name == "modernbert-mean" else rows[0])
    assert found == pytest.approx(wanted, abs=TOLERANCE * max(1.0, float(np.abs(wanted).max())))


def test_a_text_split_over_two_steps_is_an_internal_error(tmp_path: pathlib.Path) -> None:
    backend: Any = loaded(make_encoder(tmp_path, "bert")).backend
    batch = batch_of([some(5)])
    batch.context_lens[0] = 9
    with pytest.raises(Internal, match="split into steps"):
        backend._run(torch.empty(0), batch)


def changed(edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[pathlib.Path], None]:
    def change(folder: pathlib.Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return change


POOLER = "bert.pooler.dense.weight"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(POOLER), r"lacks pooler\.dense\.weight, which a bert model needs"),
        (
            lambda t: t.update({POOLER: t[POOLER][:9].contiguous()}),
            r"model\.safetensors: bert\.pooler\.dense\.weight is \[9,",
        ),
        (lambda t: t[POOLER].fill_(float("inf")), r"model\.safetensors: bert\.pooler\.dense\.weight contains NaN or"),
        (lambda t: t.update({POOLER: t[POOLER].int()}), r"model\.safetensors: bert\.pooler\.dense\.weight is I32"),
        (
            lambda t: t.update({"bert.more": torch.zeros(2)}),
            r"holds model\.safetensors: bert\.more, which a bert model does",
        ),
    ],
    ids=["missing", "narrow", "inf", "whole numbers", "unknown"],
)
def test_tensors_that_do_not_fit_are_named_with_their_file(
    tmp_path: pathlib.Path, edit: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    folder = make_encoder(tmp_path, "bert", 2)
    changed(edit)(folder)
    with pytest.raises(ConfigError, match=message):
        loaded(folder)


def test_old_names_and_tensors_of_other_tasks_are_accepted(tmp_path: pathlib.Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "LayerNorm" in name]:
            old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            tensors[f"bert.{old}"] = tensors.pop(name)
        for name in [name for name in tensors if not name.startswith("bert.")]:
            tensors[f"bert.{name}"] = tensors.pop(name)
        tensors["cls.predictions.bias"] = torch.zeros(5)
        tensors["bert.embeddings.position_ids"] = torch.arange(100)[None]

    folder = make_encoder(tmp_path, "bert")
    before = rows_of(loaded(folder), some(9))
    changed(edit)(folder)
    assert rows_of(loaded(folder), some(9)).tobytes() == before.tobytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder = True"),
        ({"hidden_act": "swiglu"}, "hidden_act 'swiglu' is not supported"),
        ({"num_attention_heads": 5}, "5 heads do not divide 48"),
        ({"embedding_scale": 2.0}, "embedding_scale"),
        ({"model_type": "modernbert", "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rotary embedding other"),
        ({"model_type": "modernbert", "layer_types": ["chunked_attention"] * 3}, "layer_types"),
    ],
    ids=str,
)
def test_unsupported_encoder_options_are_named(change: dict[str, Any], message: str) -> None:
    plain = {"model_type": "bert", **SHAPE, "vocab_size": 260}
    parse_config(plain)
    with pytest.raises(ConfigError, match=message):
        parse_config({**plain, **change})


def test_an_encoder_is_not_quantized(tmp_path: pathlib.Path) -> None:
    folder = make_encoder(tmp_path, "bert")
    with pytest.raises(ConfigError, match=r"has an encoder \(bert\), and a decoder is needed here"):
        prepare(ModelFlags(model=str(folder), dtype="float32", quantization="int8"))


def test_flags_unsupported_by_encoders_are_refused(tmp_path: pathlib.Path) -> None:
    folder = make_encoder(tmp_path, "bert")
    assert prepare(ModelFlags(model=str(folder), dtype="float32")).max_model_len == 101
    for more in ({"enable_lora": True}, {"tensor_parallel_size": 2}):
        flags = DecodeFlags(model=str(folder), dtype="float32", component_id="decode-0", **more)
        with pytest.raises(ConfigError, match="is an encoder, which runs on the CPU in one process"):
            load_model(flags, 1)
