"""Messages between the processes of a worker: a kind, bytes, and sometimes file descriptors.

    rank 0                                          rank r
      | -- LOAD, JSON + the ranks' memory --------> |  loads its shard of the model
      | -- POOL, the node's answer + its memory --> |  maps the pool; also gets the connection to the node
      | -- ADAPTERS, WARM_UP, JSON ---------------> |
      | -- STEP, arrays --------------------------> |  copies slots, on GPUs, and runs its shard's forward pass
      | -- PLACE, JSON ---------------------------> |
      | <-- OK, REFUSED or FAILED, text ----------- |  answers each message, in order
      | ========== connection closed ============> |  exits

PACK has its own socket, so that an adapter is packed during steps. Nothing is pickled: rare messages are JSON, a step
is a header and the raw arrays of its batch, and an adapter's matrices are in a memfd.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import socket
import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np

from pillion.engine.backends.backend import Bytes
from pillion.errors import Internal
from pillion.kernels.step import Int32, StateSlots, StepBatch
from pillion.kvstore.memory.head_shares import MAX_SHARDS

MAX_MESSAGE_BYTES = 256 * 2**20
MAX_DESCRIPTORS = MAX_SHARDS + 1
MAX_ERROR_BYTES = 4096
# Timeouts are counted in slices, so that time in which this process was stopped counts as one slice at most.
SLICE_MS = 100
# Kind, and number of bytes of the payload.
_HEADER = struct.Struct("<II")
# Numbers of tokens, sequences, block table columns, sampled rows, and pooled rows; flags for rotary rows and adapters;
# numbers of copies, and of slots per state.
_STEP = struct.Struct("<9I")

T = TypeVar("T")


class RankMessage(IntEnum):
    """Kinds of messages: rank 0's calls, then the answers."""

    LOAD = 1
    POOL = 2
    ADAPTERS = 3
    WARM_UP = 4
    STEP = 5
    PLACE = 6
    PACK = 7
    OK = 8
    REFUSED = 9
    FAILED = 10


class RankTimeout(Exception):  # noqa: N818  (a state, not a mistake)
    """Raised when the other side neither receives nor sends in time."""


class RankLink:
    """One end of a connection between rank 0 and another rank; used by one thread at a time.

    Calls raise RankTimeout if the peer is silent for ``limit_ms`` (None for no limit), and ConnectionError if it is
    gone.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._polls = {event: select.poll() for event in (select.POLLIN, select.POLLOUT)}
        for event, poll in self._polls.items():
            poll.register(sock, event)

    def send(
        self, kind: RankMessage, payload: bytes = b"", descriptors: Sequence[int] = (), *, limit_ms: int | None = None
    ) -> None:
        """Send a message; the receiver gets duplicates of the descriptors. Raises Internal for a message too long."""
        if len(payload) > MAX_MESSAGE_BYTES:
            raise Internal(f"a message of {len(payload)} bytes to a rank; the limit is {MAX_MESSAGE_BYTES}")
        rest = memoryview(_HEADER.pack(kind, len(payload)) + payload)
        if descriptors:
            rest = rest[self._try(select.POLLOUT, limit_ms, socket.send_fds, self._sock, [rest], descriptors) :]
        while rest:
            rest = rest[self._try(select.POLLOUT, limit_ms, self._sock.send, rest) :]

    def receive(self, limit_ms: int | None = None) -> tuple[RankMessage, bytearray, list[int]]:
        """Return the next message: kind, bytes, and descriptors, which the caller must close."""
        header, descriptors = b"", []
        while len(header) < _HEADER.size:
            missing = _HEADER.size - len(header)
            data, fds, _, _ = self._try(select.POLLIN, limit_ms, socket.recv_fds, self._sock, missing, MAX_DESCRIPTORS)
            header += _not_eof(data)
            descriptors += fds
        kind, size = _HEADER.unpack(header)
        if size > MAX_MESSAGE_BYTES:
            raise Internal(f"a message of {size} bytes from a rank; the limit is {MAX_MESSAGE_BYTES}")
        payload = bytearray(size)
        view = memoryview(payload)
        while view:
            view = view[_not_eof(self._try(select.POLLIN, limit_ms, self._sock.recv_into, view)) :]
        return RankMessage(kind), payload, descriptors

    def close(self) -> None:
        """Close the connection, which ends all waits of the peer and of other threads for it. Idempotent."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _try(self, event: int, limit_ms: int | None, call: Callable[..., T], *arguments: Any) -> T:
        """Retry a non-blocking ``call`` whenever the socket has ``event``, and return its result."""
        left = -1 if limit_ms is None else max(1, limit_ms // SLICE_MS)
        while True:
            try:
                return call(*arguments)
            except BlockingIOError:
                pass
            while not self._polls[event].poll(None if left < 0 else SLICE_MS):
                left -= 1
                if not left:
                    raise RankTimeout


def _not_eof(received: T) -> T:
    """Return ``received``. Raises ConnectionResetError if it is empty or 0, the end of the connection."""
    if not received:
        raise ConnectionResetError("the connection has ended")
    return received


def step_to_bytes(batch: StepBatch, copies: Sequence[tuple[int, int]] = ()) -> bytes:
    """Encode a batch and the (source, target) slots to copy before it: a header, then int32 arrays. Omits fields that
    only rank 0 needs."""
    states = () if batch.states is None else (batch.states.reads, batch.states.writes)
    optional = [array for array in (batch.rope_rows, batch.adapters, *states) if array is not None]
    arrays: Sequence[Int32] = (
        batch.token_ids,
        batch.positions,
        batch.query_starts,
        batch.context_lens,
        batch.block_tables,
    )
    counts = batch.num_tokens, batch.num_seqs, batch.block_tables.shape[1], len(batch.sample_rows), batch.pooled
    pages = states[0].shape[1] if states else 0
    header = _STEP.pack(*counts, batch.rope_rows is not None, batch.adapters is not None, len(copies), pages)
    arrays = (*arrays, batch.sample_rows, *optional, *([np.array(copies)] if copies else ()))
    return header + b"".join(np.ascontiguousarray(array, np.int32).tobytes() for array in arrays)


def step_from_bytes(payload: bytearray) -> tuple[StepBatch, list[tuple[int, int]]]:
    """Decode :func:`step_to_bytes`; the batch's arrays are views of ``payload``. Raises Internal for malformed
    bytes."""
    if len(payload) < _STEP.size:
        raise Internal(f"a step of {len(payload)} bytes")
    tokens, seqs, width, samples, pooled, has_rope, has_adapters, copies, pages = _STEP.unpack_from(payload)
    sizes = [tokens, tokens, seqs + 1, seqs, seqs * width, samples, tokens * has_rope, seqs * has_adapters]
    sizes += [seqs * pages, seqs * pages, 2 * copies]
    if len(payload) != _STEP.size + 4 * sum(sizes):
        raise Internal(f"a step of {len(payload)} bytes; expected {_STEP.size + 4 * sum(sizes)}")
    words = np.frombuffer(payload, np.int32, offset=_STEP.size)
    ends = [*accumulate(sizes)]
    parts = [words[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    batch = StepBatch(
        token_ids=parts[0],
        positions=parts[1],
        query_starts=parts[2],
        context_lens=parts[3],
        block_tables=parts[4].reshape(seqs, width),
        sample_rows=parts[5],
        rope_rows=parts[6] if has_rope else None,
        adapters=parts[7] if has_adapters else None,
        states=StateSlots(*(part.reshape(seqs, pages) for part in parts[8:10])) if pages else None,
        pooled=pooled,
    )
    return batch, [(int(source), int(target)) for source, target in parts[10].reshape(copies, 2)]


def json_to_bytes(**values: Any) -> bytes:
    return json.dumps(values).encode()


def error_to_bytes(error: BaseException) -> bytes:
    """Encode an error's text, truncated to MAX_ERROR_BYTES."""
    return (str(error) or repr(error)).encode()[:MAX_ERROR_BYTES]


def error_text(payload: bytearray) -> str:
    """Decode :func:`error_to_bytes`."""
    return payload.decode(errors="replace")


def memory_file(data: Bytes) -> int:
    """Return the descriptor of a new memfd with ``data``; the caller must close it."""
    descriptor = os.memfd_create("pillion-adapter", os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data.data)
    return descriptor


def bytes_of(descriptor: int) -> Bytes:
    """Map a memfd of :func:`memory_file` and return its bytes; the mapping lives as long as the array."""
    if not os.fstat(descriptor).st_size:
        return np.zeros(0, np.uint8)
    return np.frombuffer(mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE), np.uint8)


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
