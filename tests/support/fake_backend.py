"""A model without arithmetic, whose answers depend on what it reads back from the pool.

The KV of a token is one int64 that mixes its id and position. The digest of a sequence is folded over the values found
through its block table, so a wrong slot, a lost block or a stale position changes the token.
"""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lab.testbed.conditions import WITHIN_S
from pillion.config import WorkerFlags
from pillion.engine.adapters.adapter_forms import Bytes, PlainForm, plain_bits
from pillion.engine.adapters.adapter_weights import AdapterWeights
from pillion.engine.adapters.plain_adapters import PlainAdapters
from pillion.engine.backends.backend import KVLayout, PackedAdapter, PoolPlace
from pillion.engine.backends.host_backend import HostBackend
from pillion.engine.backends.loaded_model import LoadedModel
from pillion.engine.checkpoints.prepare import PreparedModel
from pillion.kernels.step import States, StepBatch
from tests.support.fake_adapter_reader import FakeAdapterReader, packer_of

VOCAB_SIZE = 97
# EOS, if the model has a tokenizer.
EOS = 96
_MIX = np.uint64(0x9E3779B97F4A7C15)
Int64 = npt.NDArray[np.int64]


def kv_of(token_ids: npt.ArrayLike, positions: npt.ArrayLike) -> Int64:
    """Return int64 [T]: never zero, so that an unwritten row is detected."""
    ids = np.asarray(token_ids, dtype=np.uint64)
    mixed = (ids + np.uint64(1)) * _MIX + np.asarray(positions, dtype=np.uint64) * np.uint64(0xBF58476D1CE4E5B9)
    return (mixed | np.uint64(1)).view(np.int64)


def logits_of(values: Int64) -> npt.NDArray[np.float32]:
    """Return float32 [VOCAB_SIZE] from the KV of a whole context, in order."""
    weights = np.arange(1, len(values) + 1, dtype=np.uint64) * _MIX | np.uint64(1)
    digest = np.bitwise_xor.reduce(values.view(np.uint64) * weights)
    row: npt.NDArray[np.uint64] = (digest ^ (np.arange(1, VOCAB_SIZE + 1, dtype=np.uint64) * _MIX)) * np.uint64(
        0x94D049BB133111EB
    )
    return (row >> np.uint64(40)).astype(np.float32) / np.float32(2**20)


def greedy(prompt: Sequence[int], count: int, adapter: str = "") -> list[int]:
    """Return the expected tokens after ``prompt``, computed without a pool; an adapter shifts every token by its
    number."""
    tokens = list(prompt)
    for _ in range(count):
        token = int(np.argmax(logits_of(kv_of(tokens, np.arange(len(tokens))))))
        tokens.append((token + shift_of(adapter)) % VOCAB_SIZE)
    return tokens[len(prompt) :]


def shift_of(adapter: str) -> int:
    """Return the shift of an adapter, by its digest."""
    return 1 + int(adapter[:8], 16) % (VOCAB_SIZE - 1) if adapter else 0


@dataclass(frozen=True)
class ShiftAdapter:
    """A packed adapter."""

    shift: int
    nbytes: int = 8


def run(pool: Int64, batch: StepBatch) -> npt.NDArray[np.float32]:
    """Return float32 [R, VOCAB_SIZE]; ``pool`` is int64 [slots, block_size], written like a backend's."""
    block_size = pool.shape[1]
    owners = np.repeat(np.arange(batch.num_seqs), np.diff(batch.query_starts))
    slots = batch.block_tables[owners, batch.positions // block_size]
    pool[slots, batch.positions % block_size] = kv_of(batch.token_ids, batch.positions)
    rows = []
    for row in batch.sample_rows:
        context = np.arange(batch.positions[row] + 1)
        assert context[-1] + 1 <= batch.context_lens[owners[row]]
        rows.append(logits_of(pool[batch.block_tables[owners[row], context // block_size], context % block_size]))
    return np.stack(rows) if rows else np.zeros((0, VOCAB_SIZE), dtype=np.float32)


def copy_blocks(pool: Int64, sources: Sequence[int], targets: Sequence[int]) -> None:
    """Copy whole slots, as a backend does."""
    pool[list(targets)] = pool[list(sources)]


class FakeAdapters(PlainAdapters):
    """Adapters that consist of their digests."""

    def __init__(self, backend: FakeBackend, max_adapters: int, max_rank: int) -> None:
        super().__init__(max_adapters, max_rank, {})
        self._backend = backend

    def build(self, digest: str, about: list[Any], data: Bytes) -> PackedAdapter:
        self._backend.packers.append(packer_of(plain_bits(about, data)))
        return super().build(digest, about, data)

    def pack(self, weights: AdapterWeights) -> PackedAdapter:
        assert self._backend.packing.wait(WITHIN_S), "nobody has let the packing go on"
        self._backend.packed.append(weights.digest)
        return ShiftAdapter(shift_of(weights.digest))


class FakeBackend(HostBackend):
    """A HostBackend over the KV of :func:`kv_of`.

    ``before_step`` may be replaced to fail or to inspect a batch. ``gate`` blocks steps while it is cleared, and
    ``waiting`` is set while a step waits there; it is cleared before the step with ``hold_after`` steps before it.
    ``bound`` counts the pools. After the token ``broken`` all logits are NaN. ``packing`` blocks the loading of
    adapters while it is cleared; ``packed`` are their digests, and ``packers`` the pid and niceness that packed each.
    """

    adapters: FakeAdapters | None = None

    def __init__(self, block_size: int, version: str = "fake") -> None:
        super().__init__(KVLayout(version, 1, 1, 1, block_size, "float32"), VOCAB_SIZE)
        self.before_step: Callable[[StepBatch], None] = lambda batch: None
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Event()
        self.hold_after: int | None = None
        self.steps: list[int] = []
        self.bound = 0
        self.broken = -1
        self.packing = threading.Event()
        self.packing.set()
        self.packed: list[str] = []
        self.packers: list[tuple[int, int]] = []
        self._last_kv = np.empty(0, np.int64)

    def bind_adapters(self, max_adapters: int, max_rank: int, targets: Sequence[str] = ()) -> None:
        self.adapters = FakeAdapters(self, max_adapters, max_rank)

    def bind_pool(self, memory: PoolPlace, num_slots: int) -> None:
        self.bound += 1
        super().bind_pool(memory, num_slots)

    def _run(self, pool: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        if len(self.steps) == self.hold_after:
            self.gate.clear()
        if not self.gate.wait(0):
            self.waiting.set()
            assert self.gate.wait(WITHIN_S), "nobody has opened the gate of the steps"
            self.waiting.clear()
        self.before_step(batch)
        self.steps.append(batch.num_tokens)
        logits = run(pool.numpy().view(np.int64), batch)
        self._last_kv = kv_of(batch.token_ids, batch.positions)
        if batch.adapters is not None:
            owners = np.repeat(batch.adapters, np.diff(batch.query_starts))
            for row, place in enumerate(owners[batch.sample_rows].tolist()):
                adapter = self.adapters.placed[place] if self.adapters is not None and place >= 0 else None
                logits[row] = np.roll(logits[row], adapter.shift if isinstance(adapter, ShiftAdapter) else 0)
        logits[batch.token_ids[batch.sample_rows] == self.broken] = np.nan
        return torch.from_numpy(logits)

    def _read_states(self, num_tokens: int) -> States:
        return self._last_kv[:num_tokens, None]

    def warm_up(self, max_tokens: int) -> None:
        pass


def prepared_model(max_model_len: int = 4096, folder: str = "nowhere") -> PreparedModel:
    """A model without files, except a tokenizer if ``folder`` has one."""
    return PreparedModel(
        folder=pathlib.Path(folder),
        name="fake",
        fingerprint="00" * 32,
        dtype="float32",
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=() if folder == "nowhere" else (EOS,),
        bos_token_id=None,
    )


def factory(backend: FakeBackend, folder: str = "nowhere") -> Callable[[WorkerFlags, int], LoadedModel]:
    """Return a backend_factory that always returns ``backend``, with the tokenizer in ``folder``."""
    return lambda flags, threads: FakeModel(prepared_model(folder=folder), backend)


class FakeModel(LoadedModel):
    """A model whose adapters consist of their digests."""

    def adapter_reader(self, max_rank: int, targets: tuple[str, ...] = ()) -> FakeAdapterReader:
        return FakeAdapterReader("nowhere", "float32", max_rank, None, PlainForm())
