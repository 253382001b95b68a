"""The backend of rank 0, where a worker is several processes: every call goes to all ranks, and to its own share."""

from __future__ import annotations

import itertools
import os
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pillion.engine.adapters.adapter_forms import AdapterForm, Bytes, PlainForm
from pillion.engine.backends.backend import InFlightStep, PackedAdapter, PoolPlace, ShareBackend, check_place
from pillion.engine.backends.batch import StepBatch
from pillion.engine.backends.host_backend import HostBackend
from pillion.engine.ranks.rank_messages import RankMessage, json_to_bytes, memory_file, step_to_bytes
from pillion.engine.ranks.rank_processes import LOAD_SILENCE_MS, RankProcesses
from pillion.engine.sampling.sampling_rows import Sampled, SamplingRows, States

if TYPE_CHECKING:
    # A worker on a CPU loads no kernels for GPUs.
    from pillion.engine.backends.gpu.gpu_backend import GpuBackend


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class RankedAdapter:
    """An adapter that all ranks have packed under ``number``; ``own`` is rank 0's share, ``nbytes`` counts all.

    The others drop theirs when this one is gone and the next adapter comes.
    """

    number: int
    own: PackedAdapter
    nbytes: int


class _RankedCalls:
    """The calls that go to all ranks, but for steps. ``own`` is rank 0's share."""

    def __init__(self, own: ShareBackend, ranks: RankProcesses) -> None:
        """Owns both from now on."""
        self.own, self.ranks = own, ranks
        self.layout, self.vocab_size = own.layout, own.vocab_size
        self._numbers = itertools.count(1)
        # Numbers of adapters that nobody holds any more. Whoever drops one may be anywhere, so it only leaves a note.
        self._dropped: deque[int] = deque()

    @property
    def max_adapters(self) -> int:
        return self.own.max_adapters

    def bind_adapters(self, max_adapters: int, max_rank: int) -> None:
        """Makes empty places in all ranks."""
        places = json_to_bytes(max_adapters=max_adapters, max_rank=max_rank)
        with self.ranks.together(RankMessage.ADAPTERS, places, limit_ms=LOAD_SILENCE_MS):
            self.own.bind_adapters(max_adapters, max_rank)

    def take_adapter(self, digest: str, about: list[Any], data: Bytes) -> RankedAdapter:
        """Has every rank pack its share of a plain adapter, of which each gets the whole."""
        own, number = self.own.take_adapter(digest, about, data), next(self._numbers)
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        descriptor = memory_file(data)
        try:
            message = json_to_bytes(number=number, dropped=dropped, digest=digest, about=about)
            others = self.ranks.pack(message, descriptor)
        except BaseException:
            self._dropped.extend([number, *dropped])
            raise
        finally:
            os.close(descriptor)
        adapter = RankedAdapter(number, own, own.nbytes + others)
        weakref.finalize(adapter, self._dropped.append, number)
        return adapter

    def place_adapter(self, place: int, packed: PackedAdapter) -> None:
        """Puts each rank's share of an adapter into a place."""
        check_place(place, self.max_adapters)
        assert isinstance(packed, RankedAdapter)
        with self.ranks.together(RankMessage.PLACE, json_to_bytes(place=place, number=packed.number)):
            self.own.place_adapter(place, packed.own)

    def warm_up(self, max_tokens: int) -> None:
        """All ranks warm up together: their steps wait for each other."""
        limit = json_to_bytes(max_tokens=max_tokens)
        with self.ranks.together(RankMessage.WARM_UP, limit, limit_ms=LOAD_SILENCE_MS):
            self.own.warm_up(max_tokens)

    def close(self) -> None:
        """Returns when the other ranks' processes are gone. Idempotent."""
        self.ranks.close()
        self.own.close()

    def check_integrity(self) -> None:
        self.ranks.check_integrity()


class RankedBackend(_RankedCalls, HostBackend):
    """A :class:`HostBackend` whose steps all ranks run together.

    ``own`` is rank 0's share; it gives the logits, and ends a step when every rank has. Whole slots are copied here
    alone, before the others begin. A rank that dies or hangs makes the call that waits for it raise BackendLost.
    """

    own: HostBackend

    def __init__(self, own: HostBackend, ranks: RankProcesses) -> None:
        """Owns both from now on."""
        HostBackend.__init__(self, own.layout, own.vocab_size)
        _RankedCalls.__init__(self, own, ranks)

    def keep_states(self, layers: Sequence[int]) -> None:
        """Has rank 0 alone keep them: the inputs of layers are the same at all ranks."""
        super().keep_states(layers)
        self.own.keep_states(layers)

    def _read_states(self, num_tokens: int) -> States:
        return self.own._read_states(num_tokens)

    def bind_pool(self, memory: PoolPlace, num_slots: int) -> None:
        """Uses ``memory`` as the pool here; the other ranks map it by :meth:`LoadedModel.bind_pool`."""
        self.own.bind_pool(memory, num_slots)
        HostBackend.bind_pool(self, memory, num_slots)

    def close(self) -> None:
        """Returns when the other ranks' processes are gone. Idempotent."""
        _RankedCalls.close(self)
        HostBackend.close(self)

    def _run(self, pool: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        # What no rank could run fails alone, and no rank hears of it.
        self.own.check_step(pool, batch)
        with self.ranks.together(RankMessage.STEP, step_to_bytes(batch)):
            return self.own.forward(batch)


class RankedGpuBackend(_RankedCalls):
    """A GPU's :class:`pillion.engine.backends.backend.Backend` whose steps all ranks launch together.

    Tokens of the step before, which only rank 0's device may know yet, go from there to the others. Their answers are
    taken when the step is waited for. Where each rank has a GPU, all run ahead; sums over ranks that share one wait for
    all of them, so a launch returns there when all have run their forward pass.
    """

    runs_ahead = True
    own: GpuBackend

    def __init__(self, own: GpuBackend, ranks: RankProcesses) -> None:
        """Owns both from now on."""
        super().__init__(own, ranks)

    def bind_pool(self, memory: PoolPlace, num_slots: int) -> None:
        """Uses ``memory`` as the pool here; the other ranks map it by :meth:`LoadedModel.bind_pool`."""
        self.own.bind_pool(memory, num_slots)

    def adapter_form(self) -> AdapterForm:
        """The plain form: each rank lays its share out."""
        return PlainForm()

    def launch(self, batch: StepBatch, copies: Sequence[tuple[int, int]], rows: SamplingRows | None) -> RankedStep:
        """Begins a step in all ranks, each of which copies what lies in its shard of the pool; choices are rank 0's."""
        # What no rank could run fails alone, and no rank hears of it.
        self.own.check_step(batch)
        with self.ranks.beginning(step_to_bytes(batch, copies)) as number:
            return RankedStep(self.own.launch(batch, copies, rows), self.ranks, number)


@dataclass(frozen=True, slots=True)
class RankedStep:
    """A step that all ranks have begun. ``own`` is rank 0's; ``number`` is what :meth:`RankProcesses.ended` takes for
    the others'."""

    own: InFlightStep
    ranks: RankProcesses
    number: int

    def choose(self, rows: SamplingRows) -> None:
        """Rank 0 alone chooses tokens."""
        self.own.choose(rows)

    def wait(self) -> Sampled:
        """Returns rank 0's tokens. When its step has ended no rank uses a slot any more; the answers of the others tell
        whether one of them failed. Raises BackendLost."""
        sampled = self.own.wait()
        self.ranks.ended(self.number)
        return sampled
