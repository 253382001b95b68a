"""Messages between ranks arrive as sent, within their limits."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import fields
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pillion.engine.ranks import rank_messages
from pillion.engine.ranks.rank_messages import RankLink, RankMessage, RankTimeout, step_from_bytes, step_to_bytes
from pillion.errors import Internal
from pillion.kernels.step import StateSlots, StepBatch


@pytest.fixture
def pair() -> Iterator[tuple[RankLink, RankLink]]:
    ends = tuple(RankLink(sock) for sock in socket.socketpair())
    yield ends
    for end in ends:
        end.close()


def numbers(size: int, seed: int) -> rank_messages.np.typing.NDArray[np.int32]:
    return np.random.default_rng(seed).integers(-(2**31), 2**31, size, np.int32)


COPIES = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=3)


@given(
    st.integers(1, 40),
    st.integers(1, 9),
    st.integers(1, 7),
    st.integers(0, 9),
    st.integers(0, 9),
    st.booleans(),
    st.booleans(),
    st.integers(0, 3),
    COPIES,
)
def test_steps_round_trip(
    tokens: int,
    seqs: int,
    width: int,
    samples: int,
    pooled: int,
    shifted: bool,
    adapted: bool,
    pages: int,
    copies: list[tuple[int, int]],
) -> None:
    batch = StepBatch(
        token_ids=numbers(tokens, 1),
        positions=numbers(tokens, 2),
        query_starts=numbers(seqs + 1, 3),
        context_lens=numbers(seqs, 4),
        block_tables=numbers(seqs * width, 5).reshape(seqs, width),
        sample_rows=numbers(samples, 6),
        rope_rows=numbers(tokens, 7) if shifted else None,
        adapters=numbers(seqs, 8) if adapted else None,
        states=StateSlots(*(numbers(seqs * pages, 9 + way).reshape(seqs, pages) for way in (0, 1))) if pages else None,
        pooled=pooled,
    )
    found, slots = step_from_bytes(bytearray(step_to_bytes(batch, copies)))
    assert slots == copies
    for field in fields(StepBatch):
        sent, got = getattr(batch, field.name), getattr(found, field.name)
        assert (sent is None) == (got is None)
        if isinstance(sent, StateSlots):
            np.testing.assert_array_equal([sent.reads, sent.writes], [got.reads, got.writes])
        elif sent is not None:
            np.testing.assert_array_equal(sent, got)


@pytest.mark.parametrize("payload", [b"", b"\1" * 35, b"\1" * 36, b"\1" * 100])
def test_invalid_steps_are_refused(payload: bytes) -> None:
    with pytest.raises(Internal, match="a step of"):
        step_from_bytes(bytearray(payload))


def test_descriptors_are_passed(pair: tuple[RankLink, RankLink]) -> None:
    with open(os.devnull, "rb") as file:
        pair[0].send(RankMessage.POOL, b"about", [file.fileno(), file.fileno()])
    kind, payload, descriptors = pair[1].receive()
    assert (kind, payload) == (RankMessage.POOL, b"about")
    assert [os.fstat(descriptor).st_rdev for descriptor in descriptors] == [os.stat(os.devnull).st_rdev] * 2
    rank_messages.close_all(descriptors)


def test_a_message_larger_than_a_sockets_buffer_arrives(pair: tuple[RankLink, RankLink]) -> None:
    payload = os.urandom(3_000_000)
    sender = threading.Thread(target=pair[0].send, args=(RankMessage.STEP, payload))
    sender.start()
    assert pair[1].receive()[1] == payload
    sender.join()


def test_message_sizes_are_limited(pair: tuple[RankLink, RankLink], monkeypatch: pytest.MonkeyPatch) -> None:
    pair[0].send(RankMessage.STEP, b"12345")
    monkeypatch.setattr(rank_messages, "MAX_MESSAGE_BYTES", 4)
    with pytest.raises(Internal, match="the limit is 4"):
        pair[0].send(RankMessage.STEP, b"12345")
    with pytest.raises(Internal, match="the limit is 4"):
        pair[1].receive()


@pytest.mark.parametrize("sends", [False, True])
def test_timeouts_are_counted_in_slices(
    pair: tuple[RankLink, RankLink], monkeypatch: pytest.MonkeyPatch, sends: bool
) -> None:
    monkeypatch.setattr(rank_messages, "SLICE_MS", 1)
    polls: list[int] = []

    class CountingPoll:
        def poll(self, timeout_ms: int) -> list[int]:
            polls.append(timeout_ms)
            return []

    monkeypatch.setattr(pair[0], "_polls", dict.fromkeys(pair[0]._polls, CountingPoll()))
    send = partial(pair[0].send, RankMessage.STEP, bytes(10_000_000), limit_ms=7)
    with pytest.raises(RankTimeout):
        (send if sends else partial(pair[0].receive, 7))()
    assert polls == [1] * 7


def test_a_closed_connection_is_an_error(pair: tuple[RankLink, RankLink]) -> None:
    pair[1].close()
    with pytest.raises(ConnectionError):
        pair[0].receive()
    with pytest.raises(ConnectionError):
        pair[0].send(RankMessage.OK)


@pytest.mark.parametrize("size", [0, 1, 100_001])
def test_bytes_in_memory_arrive_as_they_are(size: int) -> None:
    sent = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    descriptor = rank_messages.memory_file(sent)
    found = rank_messages.bytes_of(descriptor)
    os.close(descriptor)
    np.testing.assert_array_equal(sent, found)
