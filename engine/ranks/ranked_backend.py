"""Backend of rank 0 in a worker of several processes: every call goes to all ranks, including rank 0's own shard."""

from __future__ import annotations

import itertools
import os
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pillion.engine.backends.backend import (
    Backend,
    BackendAdapters,
    Bytes,
    InFlightStep,
    PackedAdapter,
    PoolPlace,
    bound_adapters,
    check_slot,
)
from pillion.engine.backends.host_backend import HostBackend
from pillion.engine.ranks.rank_messages import RankMessage, json_to_bytes, memory_file, step_to_bytes
from pillion.engine.ranks.rank_processes import LOAD_SILENCE_MS, RankProcesses
from pillion.kernels.step import Float32, Sampled, SamplingRows, States, StepBatch


class ShareBackend(Backend, Protocol):
    """Backend that can be one of several ranks, and can run a forward pass alone."""

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Write the batch's KV, which is complete on return, and return float32 logits [R, vocab_size] of
        ``sample_rows`` on the host; ranks above 0 return none."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class RankedAdapter:
    """An adapter that all ranks have packed as ``number``; ``own`` is rank 0's share, ``nbytes`` the total size.

    The other ranks drop their shares after this object is garbage-collected, with the next adapter.
    """

    number: int
    own: PackedAdapter
    nbytes: int


class RankedAdapters:
    """Adapter slots of all ranks; ``own`` are rank 0's."""

    def __init__(self, own: BackendAdapters, ranks: RankProcesses) -> None:
        self._own, self._ranks = own, ranks
        self._numbers = itertools.count(1)
        # Numbers of unreferenced adapters; deferred here because any thread may drop one.
        self._dropped: deque[int] = deque()

    @property
    def max_adapters(self) -> int:
        return self._own.max_adapters

    def form(self) -> object:
        """Return the plain form: each rank cuts its own share."""
        return self._own.form()

    def build(self, digest: str, about: list[Any], data: Bytes) -> RankedAdapter:
        """Make every rank pack its share of a plain adapter; each receives the whole adapter."""
        own, number = self._own.build(digest, about, data), next(self._numbers)
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        descriptor = memory_file(data)
        try:
            message = json_to_bytes(number=number, dropped=dropped, digest=digest, about=about)
            others = self._ranks.pack(message, descriptor)
        except BaseException:
            self._dropped.extend([number, *dropped])
            raise
        finally:
            os.close(descriptor)
        adapter = RankedAdapter(number, own, own.nbytes + others)
        weakref.finalize(adapter, self._dropped.append, number)
        return adapter

    def place(self, slot: int, packed: PackedAdapter) -> None:
        """Place each rank's shard of an adapter in a slot."""
        check_slot(slot, self.max_adapters)
        assert isinstance(packed, RankedAdapter)
        with self._ranks.together(RankMessage.PLACE, json_to_bytes(slot=slot, number=packed.number)):
            self._own.place(slot, packed.own)


class AheadRank(ShareBackend, Protocol):
    """Backend of a rank whose steps run ahead of the host, such as a GPU's."""

    def check_step(self, batch: StepBatch) -> None:
        """Raise Internal for a batch that no rank could run."""


class RankedCalls:
    """Calls to all ranks, except steps. ``own``: rank 0's backend."""

    def __init__(self, own: ShareBackend, ranks: RankProcesses) -> None:
        """Own ``own`` and ``ranks`` from now on."""
        self.own, self.ranks = own, ranks
        self.layout, self.vocab_size = own.layout, own.vocab_size
        self.adapters: BackendAdapters | None = None

    def bind_pool(self, memory: PoolPlace, num_slots: int) -> None:
        """Use ``memory`` as the pool here; the other processes map it in :meth:`LoadedModel.bind_pool`."""
        self.own.bind_pool(memory, num_slots)

    def bind_adapters(self, max_adapters: int, max_rank: int, targets: Sequence[str] = ()) -> None:
        """Make empty slots in all ranks."""
        slots = json_to_bytes(max_adapters=max_adapters, max_rank=max_rank, targets=list(targets))
        with self.ranks.together(RankMessage.ADAPTERS, slots, limit_ms=LOAD_SILENCE_MS):
            self.own.bind_adapters(max_adapters, max_rank, targets)
        self.adapters = RankedAdapters(bound_adapters(self.own.adapters), self.ranks)

    def warm_up(self, max_tokens: int) -> None:
        """Warm up all ranks together, because their steps wait for each other."""
        limit = json_to_bytes(max_tokens=max_tokens)
        with self.ranks.together(RankMessage.WARM_UP, limit, limit_ms=LOAD_SILENCE_MS):
            self.own.warm_up(max_tokens)

    def close(self) -> None:
        """End the other ranks and wait for their exit. Idempotent."""
        self.ranks.close()
        self.own.close()

    def check_integrity(self) -> None:
        self.ranks.check_integrity()


class RankedBackend(RankedCalls, HostBackend):
    """:class:`HostBackend` whose steps run on all ranks.

    ``own`` is rank 0's share; it returns the logits, after every rank has finished. Whole slots are copied here only,
    before the others begin. If a rank dies or hangs, the call that waits for it raises BackendLost.
    """

    own: HostBackend
    gives_vectors = True

    def __init__(self, own: HostBackend, ranks: RankProcesses) -> None:
        """Own ``own`` and ``ranks`` from now on."""
        HostBackend.__init__(self, own.layout, own.vocab_size)
        RankedCalls.__init__(self, own, ranks)

    @property
    def here(self) -> HostBackend:
        return self.own

    def set_aux_hidden_state_layers(self, layers: Sequence[int]) -> None:
        """Keep states on rank 0 only, since inputs of layers are equal on all ranks."""
        super().set_aux_hidden_state_layers(layers)
        self.own.set_aux_hidden_state_layers(layers)

    def _read_states(self, num_tokens: int) -> States:
        return self.own._read_states(num_tokens)

    def _read_vectors(self, batch: StepBatch) -> Float32:
        return self.own._read_vectors(batch)

    def bind_pool(self, memory: PoolPlace, num_slots: int) -> None:
        """Use ``memory`` as the pool of rank 0's share, and for copies of whole slots."""
        RankedCalls.bind_pool(self, memory, num_slots)
        HostBackend.bind_pool(self, memory, num_slots)

    def close(self) -> None:
        """End the other ranks and wait for their exit. Idempotent."""
        RankedCalls.close(self)
        HostBackend.close(self)

    def _run(self, pool: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        # An invalid step fails here, before other ranks see it.
        self.own.check_step(pool, batch)
        with self.ranks.together(RankMessage.STEP, step_to_bytes(batch)):
            return self.own.forward(batch)


class RankedAheadBackend(RankedCalls):
    """:class:`pillion.engine.backends.backend.Backend` that runs ahead, with steps launched on all ranks.

    Tokens of the previous step, which may be known only to rank 0's device, are sent from there to the other ranks.
    Their answers are received by :meth:`RankedStep.wait`. With a GPU per rank, all ranks run ahead. On a shared GPU,
    sums over ranks block, so a launch returns after all forward passes.
    """

    max_steps_in_flight = 2
    gives_vectors = True
    own: AheadRank

    def launch(self, batch: StepBatch, copies: Sequence[tuple[int, int]], rows: SamplingRows | None) -> RankedStep:
        """Begin a step on all ranks, each of which copies the slots' parts in its own shard of the pool; rank 0
        samples."""
        self.own.check_step(batch)
        with self.ranks.beginning(step_to_bytes(batch, copies)) as number:
            return RankedStep(self.own.launch(batch, copies, rows), self.ranks, number)


@dataclass(frozen=True, slots=True)
class RankedStep:
    """A step begun on all ranks. ``own`` is rank 0's; ``number`` is for :meth:`RankProcesses.ended`."""

    own: InFlightStep
    ranks: RankProcesses
    number: int

    def choose(self, rows: SamplingRows) -> None:
        """Begin sampling, on rank 0 only."""
        self.own.choose(rows)

    def wait(self) -> Sampled:
        """Return rank 0's tokens. When its step has ended no rank uses a slot any more; the other ranks' answers show
        failures. Raises BackendLost."""
        sampled = self.own.wait()
        self.ranks.ended(self.number)
        return sampled
