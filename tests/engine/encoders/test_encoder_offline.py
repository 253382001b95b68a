"""Encoders in pillion.LLM against transformers: vectors, scores of pairs, texts longer than a step."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from pillion import LLM, InvalidRequest, SamplingParams
from pillion.gateway.pooling.pair_forms import TextPair
from pillion.types import GenerateRequest
from tests.engine.encoders.test_encoder import make_encoder

pytestmark = pytest.mark.usefixtures("prepared_here")
WORDS = ["the", "sea", "is", "blue", "land", "lies", "beside", "it", "and", "sky", "over", "both"]
TEXTS = ["the sea is blue", "land", " ".join(WORDS * 7), "the sea is blue and the sky over it"]


def save_words(folder: pathlib.Path) -> PreTrainedTokenizerFast:
    """Write a word tokenizer that joins and marks pairs like BERT's."""
    vocab = {word: n for n, word in enumerate(["[PAD]", "[CLS]", "[SEP]", "[UNK]", *WORDS])}
    codec = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    codec.pre_tokenizer = pre_tokenizers.Whitespace()
    codec.add_special_tokens(["[PAD]", "[CLS]", "[SEP]", "[UNK]"])
    pair = "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1"
    marks = [(mark, vocab[mark]) for mark in ("[CLS]", "[SEP]")]
    codec.post_processor = TemplateProcessing(single="[CLS]:0 $A:0 [SEP]:0", pair=pair, special_tokens=marks)
    codec.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))


def offline(folder: pathlib.Path, **more: Any) -> LLM:
    options = {"kv_pool_bytes": "16MiB", "cpu_threads": 1, "max_num_seqs": 8, **more}
    return LLM(str(folder), dtype="float32", runner="pooling", **options)


def pooled_by(folder: pathlib.Path, mode: str) -> None:
    modules = [{"path": path, "type": f"a.{kind}"} for path, kind in (("", "Transformer"), ("1_Pooling", "Pooling"))]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))


@pytest.mark.parametrize(
    ("name", "mode"),
    [("bert", "mean_tokens"), pytest.param("modernbert", "cls_token", marks=pytest.mark.long)],
)
@torch.inference_mode()
def test_vectors_match_the_oracle_alone_and_in_batches(tmp_path: pathlib.Path, name: str, mode: str) -> None:
    folder = make_encoder(tmp_path, name)
    codec = save_words(folder)
    pooled_by(folder, mode)
    oracle = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    # The third text alone exceeds a step of 16 tokens.
    with offline(folder, max_num_batched_tokens=16) as llm:
        found = llm.embed(TEXTS)
        for text, one in zip(TEXTS, found, strict=True):
            ids = codec(text).input_ids
            assert one.prompt_token_ids == ids
            rows = oracle(torch.tensor([ids])).last_hidden_state[0]
            wanted = (rows.mean(0) if mode == "mean_tokens" else rows[0]).numpy()
            assert np.abs(wanted - np.array(one.outputs.embedding)).max() < 1e-5 * max(1.0, np.abs(wanted).max())
        vectors = [one.outputs.embedding for one in found]
        assert [llm.embed(text)[0].outputs.embedding for text in reversed(TEXTS)] == vectors[::-1]
        assert [one.outputs.embedding for one in llm.embed(TEXTS * 5)] == vectors * 5
        # A text may use all positions.
        longest = [5] * 100
        assert len(llm.embed({"prompt_token_ids": longest})[0].outputs.embedding) == 48
        with pytest.raises(InvalidRequest, match=r"inputs\[1\]: .* 101 tokens, however you requested 102 tokens"):
            llm.embed(["the sea", [5] * 101])
        with pytest.raises(InvalidRequest, match="generates nothing: it has no head that chooses tokens"):
            llm.generate("the sea", SamplingParams(max_tokens=1), use_tqdm=False)


@pytest.mark.long
def test_the_last_tokens_row_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    folder = make_encoder(tmp_path, "bert")
    save_words(folder)
    pooled_by(folder, "lasttoken")
    with (
        offline(folder) as llm,
        pytest.raises(InvalidRequest, match="pooling by lasttoken is not supported for encoders"),
    ):
        llm.embed("the sea")


@pytest.mark.parametrize("name", ["bert", *(pytest.param(one, marks=pytest.mark.long) for one in ("modernbert-mean",))])
@torch.inference_mode()
def test_pair_scores_match_the_oracle(tmp_path: pathlib.Path, name: str) -> None:
    folder = make_encoder(tmp_path, name, labels=1)
    codec = save_words(folder)
    oracle = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    pairs = [("the sea", "the sea is blue"), ("the sea", "land lies beside it"), ("sky " * 20, "both")]
    with offline(folder) as llm:
        vectors = llm._thread.cluster.vectors
        shared = GenerateRequest()
        asked = [TextPair(query, document) for query, document in pairs]
        found = llm._thread.submit(vectors.score(asked, shared)).result()
        for (query, document), score in zip(pairs, found.scores, strict=True):
            given = codec(query, document, return_tensors="pt", return_token_type_ids=name == "bert")
            logit = oracle(**{key: value for key, value in given.items() if key != "attention_mask"}).logits[0, 0]
            assert score == pytest.approx(float(logit.sigmoid()), abs=1e-5)
        assert [llm._thread.submit(vectors.score([one], shared)).result().scores[0] for one in asked] == found.scores
        (cut,) = (
            llm._thread.submit(vectors.score([TextPair("the", "sea is blue")], shared, cut_tokens=5)).result().scores
        )
        (short,) = llm._thread.submit(vectors.score([TextPair("the", "sea")], shared)).result().scores
        assert cut == short
        with pytest.raises(InvalidRequest, match="is a classifier"):
            llm.embed("the sea")
