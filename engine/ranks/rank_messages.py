"""Defines the messages between the processes of a worker: a kind, some bytes, and sometimes descriptors of open files.

    rank 0                                          rank r
      | -- LOAD, JSON + the ranks' memory --------> |  loads its share of the model
      | -- POOL, the node's answer + its memory --> |  maps the pool; the connection to the node comes along
      | -- ADAPTERS, WARM_UP, JSON ---------------> |
      | -- STEP, arrays --------------------------> |  copies slots, on GPUs, and runs its share of the forward pass
      | -- PLACE, JSON ---------------------------> |
      | <-- OK, REFUSED or FAILED, text ----------- |  answers each of them, in order
      | ================= the end ================> |  ends

PACK has a socket of its own, so that an adapter is packed beside steps. Nothing is pickled: rare messages are JSON, a
step is a header and the raw arrays of its batch, and an adapter's matrices lie in a file in memory.
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
from pillion.kernels.step import StateSlots, StepBatch
from pillion.kvstore.memory.head_shares import MAX_SHARDS

# A step of thousands of long sequences stays far below this size.
MAX_MESSAGE_BYTES = 256 * 2**20
# One message may bring a descriptor of each shard of a pool, and the connection to its node.
MAX_DESCRIPTORS = MAX_SHARDS + 1
MAX_ERROR_BYTES = 4096
# A wait is counted in slices, so that a process that was stopped meanwhile loses one slice of it and not the whole.
SLICE_MS = 100
_HEADER = struct.Struct("<II")
# The header of a step's message has the numbers of tokens, sequences, columns of the block tables, rows that are
# computed to the end, and those of them whose vectors are wanted; whether there are rotary rows, and adapters; copies;
# slots of each sequence's state.
_STEP = struct.Struct("<9I")

T = TypeVar("T")


class RankMessage(IntEnum):
    """Names the kinds of messages: rank 0's calls, then the answers to them."""

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


class RankSilent(Exception):  # noqa: N818  (a state, not a mistake)
    """Says that the other side took or sent nothing in time."""


class RankLink:
    """Represents one end of a connection between rank 0 and another rank. One thread at a time uses it.

    ``limit_ms`` is how long the other side may be silent while this one waits; None sets no limit. After that time
    RankSilent is raised, and ConnectionError when the other side is gone.
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
        """Send a message; the receiver gets descriptors of its own. Raises Internal for a message that is too long."""
        if len(payload) > MAX_MESSAGE_BYTES:
            raise Internal(f"a message of {len(payload)} bytes to a rank; {MAX_MESSAGE_BYTES} are the most")
        rest = memoryview(_HEADER.pack(kind, len(payload)) + payload)
        if descriptors:
            rest = rest[self._try(select.POLLOUT, limit_ms, socket.send_fds, self._sock, [rest], descriptors) :]
        while rest:
            rest = rest[self._try(select.POLLOUT, limit_ms, self._sock.send, rest) :]

    def receive(self, limit_ms: int | None = None) -> tuple[RankMessage, bytearray, list[int]]:
        """Return the next message: its kind, its bytes, and its descriptors, which are the caller's to close."""
        header, descriptors = b"", []
        while len(header) < _HEADER.size:
            missing = _HEADER.size - len(header)
            data, came, _, _ = self._try(select.POLLIN, limit_ms, socket.recv_fds, self._sock, missing, MAX_DESCRIPTORS)
            header += _some(data)
            descriptors += came
        kind, size = _HEADER.unpack(header)
        if size > MAX_MESSAGE_BYTES:
            raise Internal(f"a message of {size} bytes from a rank; {MAX_MESSAGE_BYTES} are the most")
        payload = bytearray(size)
        view = memoryview(payload)
        while view:
            view = view[_some(self._try(select.POLLIN, limit_ms, self._sock.recv_into, view)) :]
        return RankMessage(kind), payload, descriptors

    def close(self) -> None:
        """End the connection, which wakes the other side and any thread that waits here. Idempotent."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _try(self, event: int, limit_ms: int | None, call: Callable[..., T], *arguments: Any) -> T:
        """Call ``call`` once it would not block, and returns its result."""
        left = -1 if limit_ms is None else max(1, limit_ms // SLICE_MS)
        while True:
            try:
                return call(*arguments)
            except BlockingIOError:
                pass
            while not self._polls[event].poll(None if left < 0 else SLICE_MS):
                left -= 1
                if not left:
                    raise RankSilent


def _some(received: T) -> T:
    """Return ``received``. Raises ConnectionError where it shows the connection's end."""
    if not received:
        raise ConnectionResetError("the connection has ended")
    return received


def step_to_bytes(batch: StepBatch, copies: Sequence[tuple[int, int]] = ()) -> bytes:
    """Encode a batch, and the slots that are copied before it: the header, then arrays of int32 one after the
    other. What rank 0 alone needs is left out: which logits texts want."""
    states = () if batch.states is None else (batch.states.reads, batch.states.writes)
    optional = [array for array in (batch.rope_rows, batch.adapters, *states) if array is not None]
    arrays = (batch.token_ids, batch.positions, batch.query_starts, batch.context_lens, batch.block_tables)
    counts = batch.num_tokens, batch.num_seqs, batch.block_tables.shape[1], len(batch.sample_rows), batch.pooled
    pages = states[0].shape[1] if states else 0
    header = _STEP.pack(*counts, batch.rope_rows is not None, batch.adapters is not None, len(copies), pages)
    every = (*arrays, batch.sample_rows, *optional, *([np.array(copies)] if copies else ()))
    return header + b"".join(np.ascontiguousarray(array, np.int32).tobytes() for array in every)


def step_from_bytes(payload: bytearray) -> tuple[StepBatch, list[tuple[int, int]]]:
    """Read the batch and the copies of :func:`step_to_bytes`; the batch's arrays lie in ``payload``. Raises Internal
    for bytes that are no such message."""
    if len(payload) < _STEP.size:
        raise Internal(f"a step of {len(payload)} bytes")
    tokens, seqs, width, samples, pooled, has_rope, has_adapters, copies, pages = _STEP.unpack_from(payload)
    sizes = [tokens, tokens, seqs + 1, seqs, seqs * width, samples, tokens * has_rope, seqs * has_adapters]
    sizes += [seqs * pages, seqs * pages, 2 * copies]
    if len(payload) != _STEP.size + 4 * sum(sizes):
        raise Internal(f"a step of {len(payload)} bytes, {_STEP.size + 4 * sum(sizes)} were promised")
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
    """Encode the values of a message as JSON."""
    return json.dumps(values).encode()


def error_to_bytes(error: BaseException) -> bytes:
    """Encode an error's words, cut where they are long."""
    return (str(error) or repr(error)).encode()[:MAX_ERROR_BYTES]


def error_text(payload: bytearray) -> str:
    """Return the text that :func:`error_to_bytes` encoded."""
    return payload.decode(errors="replace")


def memory_file(data: Bytes) -> int:
    """Make a file in memory that holds ``data``; the descriptor is the caller's."""
    descriptor = os.memfd_create("pillion-adapter", os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data.data)
    return descriptor


def bytes_of(descriptor: int) -> Bytes:
    """Map a file of :func:`memory_file` and returns its bytes; the mapping lives as long as the array."""
    if not os.fstat(descriptor).st_size:
        return np.zeros(0, np.uint8)
    return np.frombuffer(mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE), np.uint8)


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors that came with a message."""
    for descriptor in descriptors:
        os.close(descriptor)
