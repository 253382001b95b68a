"""A step's program: the table of kernels that the thread pool runs, and the step's record, checked before every run.

    Program(operations) --bind--> run, run, ... --a step with more rows than any before--> bind to larger buffers

Kernels trust addresses. The memory that they access follows from the batch's arrays, which :func:`check_batch` checks
once per step, and from the shapes of weights and buffers, which do not change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pillion.errors import Internal
from pillion.host.core_lending_table import LINE_BYTES
from pillion.kernels.cpu.language.module import KernelSpec
from pillion.kernels.cpu.language.records import STEP, RecordLayout, Words
from pillion.kernels.cpu.runtime.compiler import CompiledKernels
from pillion.kernels.cpu.runtime.thread_pool_code import ENTRY_WORDS
from pillion.kernels.step import Int32, StateSlots, StepBatch

_INT32 = np.dtype(np.int32)


@dataclass(frozen=True, slots=True)
class Buffer:
    """Named buffer of a program: ``each`` rows of ``width`` values of ``dtype`` per ``unit``, e.g. per token.

    ``dense`` rows are padded to whole cache lines only. ``row_bytes``: stride of a buffer in memory shared with other
    processes; 0 for the program's own memory.
    """

    name: str
    width: int
    dtype: str
    unit: str = "tokens"
    each: int = 1
    dense: bool = False
    row_bytes: int = 0

    @property
    def stride(self) -> int:
        """Bytes from row to row: whole cache lines, an odd number of them unless rows are dense. A tile of products
        reads one column of many rows, which would map to few sets of the L1 cache if rows were a power of two apart."""
        if self.row_bytes:
            return self.row_bytes
        lines = -(-self.width * np.dtype(self.dtype).itemsize // LINE_BYTES)
        return (lines if self.dense else lines | 1) * LINE_BYTES


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a buffer from byte ``offset`` of each row on."""

    buffer: Buffer
    offset: int

    @property
    def stride(self) -> int:
        """Bytes from row to row."""
        return self.buffer.stride


@dataclass(frozen=True, slots=True)
class HeadStride:
    """An argument that grows with the workspace: ``row_bytes`` times the rows reserved for ``unit``."""

    row_bytes: int
    unit: str = "tokens"


@dataclass(frozen=True, slots=True)
class Operation:
    """A kernel and its arguments: arrays, buffers, columns of buffers, or numbers. ``when`` names a number of the
    step's record that must be above 0 for the kernel to run. A number such as ``x_stride`` that ``values`` omits is the
    stride of the buffer ``x``, and 0 if that is None."""

    spec: KernelSpec
    values: Mapping[str, Any]
    when: str = ""

    def arguments(self) -> dict[str, Any]:
        """Return all values, including derived strides."""
        values = dict(self.values)
        for name in self.spec.layout.numbers:
            rows = name.removesuffix("_stride")
            if rows != name and name not in values and rows in values:
                values[name] = 0 if values[rows] is None else values[rows].stride
        return values


class Workspace:
    """The buffers of a program, zeroed when allocated: the padding after a row's values stays zero.

    ``shared``: memory shared with other processes, by buffer name; it never grows.
    """

    def __init__(self, shared: Mapping[str, npt.NDArray[np.uint8]] | None = None) -> None:
        self.rows: dict[str, int] = {}
        self._shared = dict(shared or {})
        self._arrays: dict[str, npt.NDArray[np.uint8]] = {}
        self._canary = np.uint8(0xA5)

    def reserve(self, unit: str, rows: int) -> bool:
        """Reserve ``rows`` rows of a unit. Return True if buffers must grow: they are allocated anew, and programs must
        bind again."""
        if rows <= self.rows.get(unit, 0):
            return False
        # A multiple of 64, so that buffers seldom grow.
        self.rows[unit] = rows if rows == 1 else -(-rows // 64) * 64
        self._arrays.clear()
        return True

    def array(self, buffer: Buffer) -> npt.NDArray[np.uint8]:
        """Return the bytes of a buffer, aligned to a cache line and followed by a line of canaries. Raises Internal if
        a buffer of this name exists with another size."""
        if buffer.name in self._shared:
            return self._shared[buffer.name]
        size, array = self.rows.get(buffer.unit, 0) * buffer.each * buffer.stride, self._arrays.get(buffer.name)
        if array is None:
            whole = aligned_bytes(size + LINE_BYTES)
            whole[size:] = self._canary
            array = self._arrays[buffer.name] = whole[:size]
        if len(array) != size:
            raise Internal(f"buffer {buffer.name} has {len(array)} bytes, not {size}")
        return array

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers except shared ones."""
        return sum(array.nbytes for array in self._arrays.values())

    def check_integrity(self) -> None:
        """Raise Internal if a kernel wrote after the end of a buffer."""
        for name, array in self._arrays.items():
            whole = array.base
            assert isinstance(whole, np.ndarray)
            first = array.ctypes.data - whole.ctypes.data + array.nbytes
            if (whole[first : first + LINE_BYTES] != self._canary).any():
                raise Internal(f"a CPU kernel wrote after the end of {name}")


class Program:
    """Operations bound to addresses: ``entries`` [n, ENTRY_WORDS] is the table that a thread pool runs."""

    def __init__(self, operations: Sequence[Operation], kernels: CompiledKernels, workspace: Workspace) -> None:
        self._operations = tuple(operations)
        self._kernels = kernels
        self._workspace = workspace
        self._args = np.zeros(sum(operation.spec.layout.num_words for operation in operations), np.int64)
        self.entries = np.zeros((len(operations), ENTRY_WORDS), np.int64)
        self.bind()

    def bind(self) -> None:
        """Write all argument records and entries of the program. Call again when the workspace has grown."""
        begin = 0
        for number, (entry, operation) in enumerate(zip(self.entries, self._operations, strict=True)):
            layout = operation.spec.layout
            words = self._args[begin : begin + layout.num_words]
            layout.fill(words, {key: self._resolved(value) for key, value in operation.arguments().items()})
            condition = STEP.place[operation.when] if operation.when else -1
            entry[:] = (self._kernels.address(operation.spec.name), words.ctypes.data, condition, number)
            begin += layout.num_words

    def _resolved(self, value: Any) -> Any:
        if isinstance(value, Buffer):
            return self._workspace.array(value)
        if isinstance(value, Columns):
            return self._workspace.array(value.buffer)[value.offset :]
        if isinstance(value, HeadStride):
            return self._workspace.rows.get(value.unit, 0) * value.row_bytes
        return value


class CpuStepRecord:
    """A record that kernels of a step share (by default STEP, which all of them read), and the arrays it points to."""

    def __init__(self, layout: RecordLayout = STEP) -> None:
        self._places = layout.place
        self.words: Words = np.zeros(layout.num_words, np.int64)
        self._alive: dict[str, Any] = {}

    def point(self, field: str, array: npt.NDArray[Any]) -> None:
        """Set a field of the record to the address of an int32 array, and keep the array alive."""
        place = self._places[field]
        self.words[place] = array.__array_interface__["data"][0]
        self.words[place + 1] = array.nbytes
        self._alive[field] = array

    def point_pool(self, address: int, size: int) -> None:
        """Set the field ``pool`` of the step's record to memory that the caller keeps alive."""
        self.words[STEP.place["pool"]] = address
        self.words[STEP.place["pool"] + 1] = size

    def count(self, field: str, value: int) -> None:
        """Set a number of the record."""
        self.words[self._places[field]] = value


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a batch's values: ids, slots, positions and rotary rows; and the slots of a sequence's state."""

    vocab_size: int
    num_slots: int
    max_tokens: int
    block_size: int
    rope_rows: int
    state_pages: int = 0


def check_batch(batch: StepBatch, bounds: Bounds) -> None:
    """Raise Internal if a kernel could leave its memory with this batch."""
    ids, positions, lengths = batch.token_ids, batch.positions, batch.context_lens
    starts, tables, samples = batch.query_starts, batch.block_tables, batch.sample_rows
    angles = positions if batch.rope_rows is None else batch.rope_rows
    for array in (ids, positions, starts, lengths, tables, samples, angles):
        if array.dtype != _INT32 or not array.flags.c_contiguous:
            raise Internal("a batch's arrays must be contiguous int32")
    tokens, seqs = len(ids), len(lengths)
    if not tokens or len(positions) != tokens or len(starts) != seqs + 1 or len(tables) != seqs:
        raise Internal(f"a batch of {tokens} tokens and {seqs} sequences has arrays of mismatched lengths")
    counts = starts[1:] - starts[:-1]
    if starts[0] != 0 or starts[-1] != tokens or int(counts.min()) < 1:
        raise Internal("a batch's sequences do not divide its rows")
    # Positions must follow from lengths, so that kernels may use either. Most steps run one token of each sequence.
    first = expected = lengths - counts
    if tokens != seqs:
        expected = np.arange(tokens, dtype=np.int32) + np.repeat(first - starts[:-1], counts)
    if int(first.min()) < 0 or positions.tobytes() != expected.tobytes():
        raise Internal("a batch's positions are not the last ones of its contexts")
    longest = _largest(lengths)
    if longest > bounds.max_tokens or longest > tables.shape[1] * bounds.block_size:
        raise Internal(f"a context of {longest} tokens is longer than its table or the model allows")
    if _largest(tables) >= bounds.num_slots:
        raise Internal(f"a block table leaves the pool of {bounds.num_slots} slots")
    if angles is not positions and (len(angles) != tokens or _largest(angles) >= bounds.rope_rows):
        raise Internal("a batch leaves the rotary tables")
    if _largest(ids) >= bounds.vocab_size:
        raise Internal("a token id is not of the vocabulary")
    if len(samples) and _largest(samples) >= tokens:
        raise Internal("a sampled row is not of the batch")
    if bounds.state_pages:
        _check_states(batch.states, (seqs, bounds.state_pages), bounds.num_slots)


def _check_states(states: StateSlots | None, shape: tuple[int, int], num_slots: int) -> None:
    """Raise Internal if a kernel could leave the pool with these slots of states."""
    if states is None:
        raise Internal("a batch has no slots for its sequences' states")
    reads, writes = states.reads, states.writes
    for array in (reads, writes):
        if array.dtype != _INT32 or not array.flags.c_contiguous or array.shape != shape:
            raise Internal(f"slots of states must be contiguous int32 {list(shape)}")
    begun = reads[:, 0] >= 0
    if _largest(writes) >= num_slots or (begun.any() and _largest(reads[begun]) >= num_slots):
        raise Internal(f"a state leaves the pool of {num_slots} slots")


def _largest(array: Int32) -> int:
    """Return the largest value, compared as unsigned: negative values exceed all bounds."""
    return int(np.maximum.reduce(array.view(np.uint32), axis=None))


def aligned_bytes(size: int, alignment: int = LINE_BYTES) -> npt.NDArray[np.uint8]:
    """Return ``size`` bytes of zeroed memory at a multiple of ``alignment``."""
    raw = np.zeros(size + alignment, np.uint8)
    first = -raw.ctypes.data % alignment
    return raw[first : first + size]
