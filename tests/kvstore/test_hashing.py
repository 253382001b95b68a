"""Block hashes cover everything that determines KV, and nothing else."""

from __future__ import annotations

import hashlib
import struct
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pillion.errors import InvalidRequest
from pillion.kvstore.hashing import HASH_BYTES, chain_hashes, namespace_base, request_root, split_hashes

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=70)
block_sizes = st.sampled_from([1, 2, 4, 16])
texts = st.text(max_size=12)
BASE = namespace_base(fingerprint="f", dtype="float32", layout="v1", block_size=16)
ROOT = request_root(BASE)


@given(tokens, block_sizes)
def test_chain_hashes_match_the_definition(token_ids: list[int], block_size: int) -> None:
    parent, expected = ROOT, []
    for start in range(0, len(token_ids) // block_size * block_size, block_size):
        block = token_ids[start : start + block_size]
        parent = hashlib.sha256(parent + struct.pack(f"<{block_size}I", *block)).digest()
        expected.append(parent)
    assert split_hashes(chain_hashes(ROOT, token_ids, block_size)) == expected


@given(tokens, block_sizes, st.data())
def test_a_chain_can_be_cut_anywhere(token_ids: list[int], block_size: int, data: st.DataObject) -> None:
    whole = chain_hashes(ROOT, token_ids, block_size)
    cut = data.draw(st.integers(0, len(token_ids) // block_size))
    head = chain_hashes(ROOT, token_ids[: cut * block_size], block_size)
    parent = head[-HASH_BYTES:] if cut else ROOT
    assert head + chain_hashes(parent, token_ids[cut * block_size :], block_size) == whole


@given(tokens, tokens, block_sizes)
def test_hashes_agree_exactly_as_far_as_the_tokens(a: list[int], b: list[int], block_size: int) -> None:
    hashes = [split_hashes(chain_hashes(ROOT, ids, block_size)) for ids in (a, b)]
    for index, (left, right) in enumerate(zip(*hashes, strict=False)):
        end = (index + 1) * block_size
        assert (left == right) == (a[:end] == b[:end])


@given(st.tuples(texts, texts, texts, st.integers(1, 64)), st.data())
def test_every_field_of_the_namespace_counts(fields: tuple[str, str, str, int], data: st.DataObject) -> None:
    names = ("fingerprint", "dtype", "layout", "block_size")
    values = dict(zip(names, fields, strict=True))
    name = data.draw(st.sampled_from(names))
    kind = texts if isinstance(values[name], str) else st.integers(1, 64)
    other = values | {name: data.draw(kind)}
    assert (namespace_base(**values) == namespace_base(**other)) == (values == other)  # type: ignore[arg-type]


@given(texts, texts, texts, texts)
def test_adapters_and_salts_never_mix(adapter: str, salt: str, other_adapter: str, other_salt: str) -> None:
    same = (adapter, salt) == (other_adapter, other_salt)
    assert (request_root(BASE, adapter, salt) == request_root(BASE, other_adapter, other_salt)) == same


def test_namespace_fields_are_delimited() -> None:
    assert request_root(BASE, "ab", "c") != request_root(BASE, "a", "bc")
    assert request_root(BASE, short_text=True) not in (ROOT, request_root(BASE, "", "short text"))
    assert request_root(BASE, "a", "") != request_root(BASE, "", "a")


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_ids_outside_32_bits_are_rejected(bad: int) -> None:
    with pytest.raises(OverflowError):
        chain_hashes(ROOT, [0, bad], 1)


def test_odd_lengths_are_rejected() -> None:
    with pytest.raises(InvalidRequest, match="33 bytes"):
        split_hashes(bytes(33))


def test_hashes_are_the_same_in_every_process() -> None:
    """Python's own hash is seeded per process; ours must not depend on it."""
    code = "from pillion.kvstore.hashing import *; print(request_root(namespace_base(fingerprint='f', dtype='float32', "
    code += "layout='v1', block_size=16)).hex())"
    answers = {
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=env).stdout
        for env in ({"PYTHONHASHSEED": "1", "PYTHONPATH": "."}, {"PYTHONHASHSEED": "2", "PYTHONPATH": "."})
    }
    assert answers == {ROOT.hex() + "\n"}
