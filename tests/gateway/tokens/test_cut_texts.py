"""Truncation to a number of tokens, compared with transformers; prefixes of texts by tokens."""

from __future__ import annotations

import json
import pathlib

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from pillion.gateway.tokens.tokenizer import CUT_TOKENS, ModelTokenizer

TEXTS = ["", "a", "The sea and the land", "naïve 海, and more of it", "x" * 40]


def saved(folder: pathlib.Path, single: str) -> pathlib.Path:
    """Return a byte-level tokenizer that puts the tokens of ``single`` around a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0, "</s>": 1, "<end>": 2, **{letter: n + 3 for n, letter in enumerate(alphabet)}}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "n"), ("an", "d"), ("Ġ", "and"), ("x", "x"), ("xx", "xx")]
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    codec = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    codec.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    codec.decoder = decoders.ByteLevel()
    codec.add_special_tokens([AddedToken(mark, special=True) for mark in ("<s>", "</s>", "<end>")])
    marks = [(mark, vocab[mark]) for mark in ("<s>", "</s>", "<end>")]
    codec.post_processor = processors.TemplateProcessing(single=single, special_tokens=marks)
    codec.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder


@pytest.mark.parametrize("single", ["$A", "<s> $A", "$A </s>", "<s> $A </s> <end>"])
def test_truncation_equals_that_of_transformers(tmp_path: pathlib.Path, single: str) -> None:
    tokenizer = ModelTokenizer.load(saved(tmp_path, single))
    oracle = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), truncation_side="right")
    for text in TEXTS:
        for most in range(len(single.split()), 30):
            wanted = oracle(text, truncation=True, max_length=most).input_ids
            assert list(tokenizer.encode_cut(text, most)) == wanted, (text, most)
        assert tokenizer.encode_cut(text, 1000) == tokenizer.encode_text(text, 1000)


def test_only_the_beginning_of_a_very_long_text_is_tokenized(tmp_path: pathlib.Path) -> None:
    tokenizer = ModelTokenizer.load(saved(tmp_path, "<s> $A </s>"))
    text = "a b" * 100 * CUT_TOKENS
    found = tokenizer.encode_cut(text, 10)
    assert found == (0, *tokenizer.encode_bare("a b" * 4, 100)[:8], 1)
    assert tokenizer.truncate(text, 7) == text[:7]


def test_the_beginning_of_a_text_has_no_more_tokens_than_wanted(tmp_path: pathlib.Path) -> None:
    tokenizer = ModelTokenizer.load(saved(tmp_path, "$A"))
    for text in TEXTS:
        count = len(tokenizer.encode_bare(text, 1000))
        for most in range(1, 30):
            begins = tokenizer.truncate(text, most)
            assert text.startswith(begins)
            assert len(tokenizer.encode_bare(begins, 1000)) <= most
            assert (begins == text) is (count <= most), (text, most)
