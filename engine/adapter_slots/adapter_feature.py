"""Lets a worker and its steps use adapters: gives it slots for them, and brings their files into a slot."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from pillion.engine.adapter_slots.adapter_loader import AdapterLoader
from pillion.engine.adapter_slots.adapter_slots import AdapterSlots, slot_of
from pillion.engine.adapters.adapter_process import AdapterProcess
from pillion.engine.backends.backend import PackedAdapter
from pillion.engine.scheduling.sequence import Sequence
from pillion.engine.scheduling.step_feature import StepFeature, Steps
from pillion.engine.scheduling.step_plan import FeatureOrder, Outcome, StepPlan
from pillion.engine.worker.worker_feature import Attach, RequestNeeds, WorkerFeature, WorkerPlace, WorkerSetup
from pillion.errors import PillionError

ADAPTER = "adapter"


class AdapterSteps(StepFeature):
    """Manages the adapters of one scheduler's sequences, in ``max_loras`` slots of the backend."""

    need = ADAPTER

    def __init__(self, max_loras: int) -> None:
        self._max_loras = max_loras

    def bind(self, steps: Steps) -> None:
        self._steps = steps
        self.slots = AdapterSlots(self._max_loras, steps.in_flight)

    def expected(self, what: str, now: float) -> None:
        self.slots.preload(what)

    def joined(self, sequence: Sequence, now: float) -> None:
        self.slots.join(sequence, now)

    def left(self, sequence: Sequence) -> None:
        self.slots.leave(sequence)

    def step_begins(self, now: float) -> None:
        self.slots.assign(now)

    def planned(self, plan: StepPlan) -> StepPlan:
        """Writes into a step's plan the slot of each sequence, and the adapters that the backend gets before the
        step."""
        if not plan.pieces or not self.slots.in_use:
            return plan
        slots = [slot_of(piece.sequence) for piece in plan.pieces]
        adapters = np.array(slots, dtype=np.int32) if max(slots) >= 0 else None
        return replace(plan, placements=self.slots.take_placements(), adapters=adapters)

    def step_failed(self, plan: StepPlan) -> Iterable[Sequence]:
        return self.slots.not_placed(plan.placements) if plan.placements else ()

    def flush(self, out: Outcome) -> None:
        out.feature_orders += [FeatureOrder(ADAPTER, digest) for digest in self.slots.take_orders()]
        out.evicted_adapters, self.slots.evicted = self.slots.evicted, 0

    def answered(self, what: str, answer: object, now: float) -> None:
        """Takes the result of loading an adapter: a PackedAdapter for the backend, or a PillionError, with which the
        adapter's sequences fail."""
        if not isinstance(answer, PillionError):
            packed: PackedAdapter = answer  # type: ignore[assignment]  # a protocol, which no check at run time knows
            self.slots.loaded(what, packed)
            return
        for sequence in self.slots.failed(what):
            self._steps.fail(sequence.seq_id, answer, now)

    def load(self) -> dict[str, Any]:
        return {"adapters": self.slots.ready, "adapter_waits": self.slots.waits}

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        self.slots.check_integrity(sequences)


class WorkerAdapters(WorkerFeature):
    """Manages the adapters of one worker, whose backend has slots for them."""

    serves = ADAPTER

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._loader: AdapterLoader | None = None

    def step_feature(self) -> StepFeature:
        return AdapterSteps(self._setup.flags.max_loras)

    def attached(self, worker: WorkerPlace) -> None:
        flags, model = self._setup.flags, self._setup.model
        process = AdapterProcess(model.adapter_reader(flags.max_lora_rank))
        self._worker = worker
        self._loader = AdapterLoader(process, model.backend, flags.store_limits, worker.node, worker.meters)

    async def made_ready(self, needs: RequestNeeds) -> Attach:
        """Returns when the files of the adapter are on this machine. Raises NotFound, Unavailable or Overloaded where
        another worker may have them."""
        assert self._loader is not None
        if needs.adapter not in self._worker.epoch.load.adapters:
            await self._loader.bring(needs.adapter)
        return lambda sequence: None

    async def carry_out(self, what: str) -> object:
        assert self._loader is not None
        try:
            return await self._loader.load(what)
        except PillionError as error:
            return error

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()


async def load_adapters(setup: WorkerSetup) -> WorkerFeature | None:
    """Makes the adapters of a worker with ``--enable-lora``. Raises ConfigError where its backend takes none."""
    flags = setup.flags
    if not flags.enable_lora:
        return None
    # The backend gets its slots before the KV node makes the pool, which on a GPU takes the memory that is left.
    await asyncio.to_thread(setup.model.backend.bind_adapters, flags.max_loras, flags.max_lora_rank)
    return WorkerAdapters(setup)
