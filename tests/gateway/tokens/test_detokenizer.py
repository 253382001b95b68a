"""Incremental detokenization: whole characters only, and in total the full decode's text."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.testbed.toy_tokenizer import byte_tokenizer, fallback_tokenizer
from pillion.gateway.tokens.answer_text import Spellings, new_detokenizer
from tests.support.examples import examples

BYTES, FALLBACK = byte_tokenizer(), fallback_tokenizer()
TEXTS = [
    "Hello, world!",
    "Grüße aus Köln — naïve façade",
    "北京欢迎你。東京タワー",
    "Привет, мир! Γειά σου",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "👩‍👩‍👧‍👦 family, 🇩🇪 flag, e\u0301 combining",
    " leading and trailing  spaces \n\t\n",
    "a\x00b\ufffdc\ufffd",
]


def stream(codec, ids) -> list[str]:
    decoder = new_detokenizer(codec)
    return [*(decoder.push(one) for one in ids), decoder.flush()]


def full(codec, ids) -> str:
    return codec.decode(list(ids), skip_special_tokens=True)


@given(st.lists(st.integers(0, 270), max_size=40))
@settings(max_examples=examples(500))
def test_random_ids_equal_the_full_decode(ids: list[int]) -> None:
    assert "".join(stream(BYTES, ids)) == full(BYTES, ids)


@given(st.lists(st.lists(st.integers(0, 270), max_size=12), min_size=2, max_size=4))
@settings(max_examples=examples(300))
def test_answers_that_share_a_cache_are_independent(answers: list[list[int]]) -> None:
    for codec in (BYTES, FALLBACK):
        shared = Spellings(codec)
        decoders, texts = [new_detokenizer(shared) for _ in answers], [""] * len(answers)
        for place in range(max(len(ids) for ids in answers)):
            for number, ids in enumerate(answers):
                if place < len(ids):
                    texts[number] += decoders[number].push(ids[place])
        streamed = [text + decoder.flush() for text, decoder in zip(texts, decoders, strict=True)]
        assert streamed == ["".join(stream(codec, ids)) for ids in answers]
        assert len(shared.whole) <= codec.get_vocab_size()


@given(st.text(max_size=40))
@settings(max_examples=examples(300))
def test_streamed_text_never_splits_a_character(text: str) -> None:
    for codec in (BYTES, FALLBACK):
        ids = codec.encode(text, add_special_tokens=False).ids
        pieces = stream(codec, ids)
        whole = full(codec, ids)
        assert "".join(pieces) == whole
        if "\ufffd" not in whole:
            assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("codec", [BYTES, FALLBACK], ids=["bytes", "fallback"])
def test_languages(codec, text: str) -> None:
    ids = codec.encode(text, add_special_tokens=False).ids
    assert "".join(stream(codec, ids)) == full(codec, ids)


def test_a_character_is_held_until_its_last_byte() -> None:
    ids = BYTES.encode("é€😀").ids
    assert stream(BYTES, ids) == ["", "é", "", "", "€", "", "", "", "😀", ""]


def test_half_a_character_at_the_end_is_flushed_as_one_replacement() -> None:
    assert stream(BYTES, BYTES.encode("😀").ids[:3]) == ["", "", "", "\ufffd"]
    assert stream(FALLBACK, FALLBACK.encode("x😀").ids[:-1])[-1].startswith("\ufffd")


@pytest.mark.parametrize("codec", [BYTES, FALLBACK], ids=["bytes", "fallback"])
def test_special_and_unknown_tokens_have_no_text(codec) -> None:
    special = codec.token_to_id("<bos>") or codec.token_to_id("<s>")
    ids = codec.encode("Hello", add_special_tokens=False).ids
    mixed = [special, ids[0], special, 99_999, *ids[1:], special]
    assert "".join(stream(codec, mixed)) == full(codec, mixed) == "Hello"


def test_a_space_after_a_special_token_is_kept() -> None:
    ids = [FALLBACK.token_to_id(t) for t in ("▁Hello", "<s>", "▁world")]
    assert "".join(stream(FALLBACK, ids)) == full(FALLBACK, ids) == "Hello world"


def test_broken_bytes_do_not_hold_text_back_forever() -> None:
    decoder = new_detokenizer(FALLBACK)
    bad = FALLBACK.token_to_id("<0xFF>")
    assert "".join(decoder.push(bad) for _ in range(50)).count("\ufffd") >= 44


@pytest.mark.parametrize("codec", [BYTES, FALLBACK], ids=["bytes", "fallback"])
def test_each_token_is_looked_up_once(codec) -> None:
    """The library rebuilds its table of special tokens for each caller, and looks up each token again."""
    asked: Counter[str] = Counter()

    class Counted:
        def __getattr__(self, name: str) -> Any:
            asked[name] += 1
            return getattr(codec, name)

    spellings, size = Spellings(Counted()), codec.get_vocab_size()
    first = [spellings.own_bytes(one) for one in range(size)]
    assert first == [spellings.own_bytes(one) for one in range(size)]
    assert first[codec.token_to_id("<bos>") or codec.token_to_id("<s>")] in (b"<bos>", b"<s>")
    assert asked["get_added_tokens_decoder"] == 1
    assert asked["id_to_token"] == size
    # Unknown ids are unbounded, so they are not cached.
    assert [spellings.own_bytes(10**9) for _ in range(2)] == [b"", b""]
    assert asked["id_to_token"] == size + 2
