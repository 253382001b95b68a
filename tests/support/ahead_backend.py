"""The fake model on a device that runs ahead: launches return at once, a thread runs them in order, with delays.

It also records what a real device would not tolerate: the number of steps in flight, the slots that they use, and, at
the node, whether one of those was free for another owner meanwhile.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np

from lab.testbed.conditions import WITHIN_S
from pillion.engine.sampling.sampler import sample
from pillion.kernels.step import Sampled, SamplingRows, StepBatch
from pillion.kvstore.ledger.ledger import Ledger
from tests.support.fake_backend import FakeBackend

MAX_DELAY_S = 0.002
LANDING_TIMEOUT_S = WITHIN_S


class Launched:
    """A step of :class:`AheadBackend`."""

    def __init__(
        self, backend: AheadBackend, batch: StepBatch, copies: Sequence[tuple[int, int]], rows: SamplingRows | None
    ) -> None:
        self.batch, self.copies, self.rows = batch, copies, rows
        self.chosen = threading.Event()
        if rows is not None:
            self.chosen.set()
        self.over = threading.Event()
        self.sampled = Sampled()
        self.error: Exception | None = None
        used = zip(batch.block_tables.tolist(), batch.context_lens.tolist(), strict=True)
        size = backend.layout.block_size
        self.slots = {slot for table, length in used for slot in table[: -(-length // size)]}.union(*copies)
        self._backend = backend

    def choose(self, rows: SamplingRows) -> None:
        assert self.rows is None
        assert self._backend.under_way == [self], "the step before has not landed"
        self.rows = rows
        self._backend.late_choices += 1
        self.chosen.set()

    def wait(self) -> Sampled:
        # A step that is awaited without its choices is abandoned.
        self.chosen.set()
        assert self.over.wait(LANDING_TIMEOUT_S)
        self._backend.landed(self)
        if self.error is not None:
            raise self.error
        return self.sampled


class AheadBackend(FakeBackend):
    """``resolved``: tokens that only the device had. ``most_under_way``: max concurrent steps. ``late_choices``: steps
    whose choices were begun after their launch."""

    max_steps_in_flight = 2

    def __init__(self, block_size: int, seed: int = 0) -> None:
        super().__init__(block_size)
        self.resolved = 0
        self.most_under_way = 0
        self.late_choices = 0
        self.under_way: list[Launched] = []
        self._random = Random(seed)
        self._lock = threading.Lock()
        self._line: queue.SimpleQueue[Launched | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="fake-device", daemon=True)
        self._thread.start()

    def launch(self, batch: StepBatch, copies: Sequence[tuple[int, int]], rows: SamplingRows | None) -> Launched:  # type: ignore[override]
        assert all(step.chosen.is_set() for step in self.under_way), "a launch before the choice of the last one"
        flight = Launched(self, batch, copies, rows)
        with self._lock:
            self.under_way.append(flight)
            self.most_under_way = max(self.most_under_way, len(self.under_way))
        self._line.put(flight)
        return flight

    def landed(self, flight: Launched) -> None:
        """Record a landing; each step lands once, in launch order."""
        with self._lock:
            assert self.under_way[0] is flight
            del self.under_way[0]

    def slots(self) -> set[int]:
        """Return the slots that in-flight steps may read or write."""
        with self._lock:
            return set().union(*(flight.slots for flight in self.under_way))

    def close(self) -> None:
        assert not self.under_way, "closed with a step under way"
        self._line.put(None)
        self._thread.join(LANDING_TIMEOUT_S)

    def _take_time(self) -> None:
        time.sleep(self._random.random() * MAX_DELAY_S)

    def _serve(self) -> None:
        before = Sampled()
        while (flight := self._line.get()) is not None:
            self._take_time()
            try:
                ids = flight.batch.token_ids.copy()
                unknown = np.flatnonzero(ids < 0)
                ids[unknown] = [max(before.token_ids[-1 - token], 0) for token in ids[unknown]]
                self.resolved += len(unknown)
                batch = replace(flight.batch, token_ids=ids)
                if flight.copies:
                    self.copy_blocks(*zip(*flight.copies, strict=True))
                logits = self.forward(batch)
                assert flight.chosen.wait(LANDING_TIMEOUT_S)
                before = flight.sampled = Sampled() if flight.rows is None else sample(logits, flight.rows)
            except Exception as error:
                # The choices of an abandoned step may be anything, but must exist.
                before = Sampled((0,) * len(flight.batch.sample_rows))
                flight.error = error
            self._take_time()
            flight.over.set()


def watch(ledger: Ledger, *backends: AheadBackend) -> list[str]:
    """Record freed slots that a step in flight used. Called on the node's thread."""
    found: list[str] = []

    def watched(name: str, change: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            before = set().union(*(backend.slots() for backend in backends))
            result = change(*args, **kwargs)
            # Steps that landed meanwhile no longer use them.
            used = before & set().union(*(backend.slots() for backend in backends))
            safe = {slot for holder in ledger.holders.values() for slot in holder.leased}
            safe |= {block.slot for block in ledger.tree.by_hash.values() if block.ref_count}
            if used - safe:
                found.append(f"{name} took {sorted(used - safe)} from under a step")
            return result

        return call

    for name in ("release", "return_slots", "end_epoch"):
        setattr(ledger, name, watched(name, getattr(ledger, name)))
    return found
