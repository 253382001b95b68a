"""LLM.embed beside transformers' last hidden states: prompts, truncation, cached prefixes, bitwise repeatability."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import AutoModel

from lab.testbed.tiny_model import save_model
from pillion import LLM, InvalidRequest, SamplingParams

pytestmark = pytest.mark.usefixtures("prepared_here")
TEXTS = ["The sea and the land, " * 8, "x", "The sea and the land, " * 8 + "and the sky"]
PROMPTS = {"query": "Find a passage that answers this: ", "document": ""}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Write an embedding model's checkpoint: the model without its head, plus sentence-transformers files."""
    plain = save_model(tmp_path_factory.mktemp("plain"))
    found = tmp_path_factory.mktemp("embedding")
    AutoModel.from_pretrained(plain).save_pretrained(found)
    for path in plain.iterdir():
        if path.name.startswith("tokenizer"):
            (found / path.name).write_bytes(path.read_bytes())
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    (found / "modules.json").write_text(json.dumps(modules))
    (found / "1_Pooling").mkdir()
    (found / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    own = {"prompts": PROMPTS, "default_prompt_name": "query"}
    (found / "config_sentence_transformers.json").write_text(json.dumps(own))
    return found


@pytest.fixture(scope="module")
def llm(folder: pathlib.Path) -> Iterator[LLM]:
    options = {"max_model_len": "512", "kv_pool_bytes": "32MiB", "cpu_threads": 1, "max_num_batched_tokens": 64}
    with LLM(str(folder), dtype="float32", runner="pooling", max_num_seqs=16, **options) as made:
        yield made


@torch.inference_mode()
def expected(folder: pathlib.Path, token_ids: list[int], dimensions: int | None = None) -> np.ndarray:
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    row = model(torch.tensor([token_ids])).last_hidden_state[0, -1, :dimensions]
    found: np.ndarray = torch.nn.functional.normalize(row, dim=0).numpy()
    return found


def test_vectors_equal_the_oracles_and_are_bitwise_repeatable(llm: LLM, folder: pathlib.Path) -> None:
    found = llm.embed(TEXTS, prompt_name="document")
    codec = llm.get_tokenizer()
    for text, one in zip(TEXTS, found, strict=True):
        assert one.prompt_token_ids == codec.encode(text)
        assert np.abs(expected(folder, one.prompt_token_ids) - np.array(one.outputs.embedding)).max() < 1e-5
    # The prompts exceed a step, and now the first one's blocks are in the pool: these steps differ.
    again = [llm.embed(text, prompt_name="")[0] for text in TEXTS]
    beside = llm.embed([*reversed(TEXTS), *TEXTS], prompt_name="")
    vectors = [one.outputs.embedding for one in found]
    assert [one.outputs.embedding for one in again] == vectors
    assert [one.outputs.embedding for one in beside] == [*reversed(vectors), *vectors]


def test_the_checkpoints_prompt_precedes_texts_but_not_ids(llm: LLM) -> None:
    codec = llm.get_tokenizer()
    for name in (None, "query"):
        (found,) = llm.embed("The sea", prompt_name=name)
        assert found.prompt_token_ids == codec.encode(PROMPTS["query"] + "The sea")
    assert [one.prompt_token_ids for one in llm.embed([[5, 6], [7]])] == [[5, 6], [7]]
    with pytest.raises(InvalidRequest, match="prompt_name: 'passage' is not a prompt of the model: query, document"):
        llm.embed("x", prompt_name="passage")


def test_a_truncated_vector_is_normalized(llm: LLM, folder: pathlib.Path) -> None:
    (found,) = llm.embed({"prompt_token_ids": [5, 6, 7]}, dimensions=9)
    assert np.abs(expected(folder, [5, 6, 7], 9) - np.array(found.outputs.embedding)).max() < 1e-5
    with pytest.raises(InvalidRequest, match=r"dimensions: 65 is not in \[1, 64\]"):
        llm.embed("x", dimensions=65)


def test_a_too_long_text_is_named_by_its_index(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match=r"inputs\[1\]: .* 512 tokens, however you requested 601 tokens"):
        llm.embed(["x", [5] * 600])


def test_embedding_does_not_change_generated_tokens(llm: LLM) -> None:
    asked = SamplingParams(temperature=0, max_tokens=8)
    before = llm.generate("The sea", asked, use_tqdm=False)[0].outputs[0].token_ids
    llm.embed(TEXTS)
    assert llm.generate("The sea", asked, use_tqdm=False)[0].outputs[0].token_ids == before


def pooled_by(folder: pathlib.Path, own: pathlib.Path, mode: str) -> str:
    """Copy the checkpoint to ``own`` with this pooling and no other sentence-transformers files."""
    for path in folder.iterdir():
        if path.is_file() and path.name != "config_sentence_transformers.json":
            (own / path.name).write_bytes(path.read_bytes())
    (own / "1_Pooling").mkdir()
    (own / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))
    return str(own)


@torch.inference_mode()
def test_mean_pooling_equals_the_oracle(tmp_path: pathlib.Path, folder: pathlib.Path) -> None:
    own = pooled_by(folder, tmp_path, "mean_tokens")
    options = {"max_model_len": "512", "kv_pool_bytes": "32MiB", "cpu_threads": 1}
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with LLM(own, dtype="float32", runner="pooling", max_num_seqs=16, max_num_batched_tokens=64, **options) as llm:
        # Answers first fill the pool with the blocks of two texts, without pooled rows.
        llm.generate(TEXTS, SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
        found = llm.embed(TEXTS)
        for one in found:
            rows = model(torch.tensor([one.prompt_token_ids])).last_hidden_state[0]
            wanted = torch.nn.functional.normalize(rows.mean(0), dim=0).numpy()
            assert np.abs(wanted - np.array(one.outputs.embedding)).max() < 1e-5
        vectors = [one.outputs.embedding for one in found]
        assert [llm.embed(text)[0].outputs.embedding for text in TEXTS] == vectors
        beside = llm.embed([*reversed(TEXTS), *TEXTS])
        assert [one.outputs.embedding for one in beside] == [*reversed(vectors), *vectors]
    with LLM(own, dtype="float32", runner="pooling", max_num_seqs=16, max_num_batched_tokens=512, **options) as whole:
        assert [one.outputs.embedding for one in whole.embed(TEXTS)] == vectors


@torch.inference_mode()
def test_cls_pooling_equals_the_oracle(tmp_path: pathlib.Path, folder: pathlib.Path) -> None:
    options = {"max_model_len": "512", "kv_pool_bytes": "32MiB", "cpu_threads": 1, "max_num_batched_tokens": 64}
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with LLM(pooled_by(folder, tmp_path, "cls_token"), dtype="float32", max_num_seqs=16, **options) as llm:
        for one in llm.embed([TEXTS[0], TEXTS[0], "x"]):
            row = model(torch.tensor([one.prompt_token_ids])).last_hidden_state[0, 0]
            wanted = torch.nn.functional.normalize(row, dim=0).numpy()
            assert np.abs(wanted - np.array(one.outputs.embedding)).max() < 1e-5


def test_pooling_that_is_not_supported_is_refused_by_name(tmp_path: pathlib.Path, folder: pathlib.Path) -> None:
    with (
        LLM(
            pooled_by(folder, tmp_path, "max_tokens"),
            dtype="float32",
            max_model_len="512",
            kv_pool_bytes="32MiB",
            cpu_threads=1,
        ) as llm,
        pytest.raises(InvalidRequest, match=r"has no vectors of texts: .* pooling by max; only one of cls, mean, last"),
    ):
        llm.embed("x")
