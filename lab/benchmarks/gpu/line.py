"""The saturated engine: the real scheduler over the GPU backend, one step ahead, without gRPC, Redis or a KV node.

    request --add--> scheduler --plan--> launch, land --commit--> tokens
       ^                 |                                          |
       '-- a slot is free '-- KV slots: a list in place of a node <-'

:mod:`lab.benchmarks.gpu.e2e` measures the whole cluster if its packages are installed.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from lab.benchmarks.gpu.bench import Bench, Row
from lab.benchmarks.gpu.model import BLOCK_SIZE, RandomModel
from pillion.engine.backends.batching import build_sampling, build_step_batch
from pillion.engine.backends.gpu.gpu_backend import GpuBackend
from pillion.engine.scheduling.block_chain import AdoptedTicket
from pillion.engine.scheduling.block_manager import BlockManager
from pillion.engine.scheduling.scheduler import Scheduler
from pillion.engine.scheduling.sequence import Sequence
from pillion.engine.scheduling.step_plan import Outcome
from pillion.types import SamplingParams


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A closed loop of ``streams`` streams with ``rounds`` requests each."""

    streams: int
    rounds: int
    prompt_tokens: int
    answer_tokens: int
    step_tokens: int


LOADS = (EngineLoad(64, 2, 1024, 256, 2048), EngineLoad(64, 2, 1024, 256, 512), EngineLoad(256, 2, 1024, 256, 2048))
SMOKE_LOADS = (EngineLoad(2, 1, 20, 3, 24),)
WARM_UP = EngineLoad(4, 1, 256, 8, 512)
# Spare blocks per stream, against preemption.
SPARE_BLOCKS = 16
# Rounds without work after which the loop is stuck.
MAX_IDLE_ROUNDS = 1000


def run(bench: Bench) -> None:
    """Measure each load."""
    loads = SMOKE_LOADS if bench.smoke else LOADS
    longest = max(load.prompt_tokens + load.answer_tokens for load in loads)
    streams = max(load.streams for load in loads)
    budget = max(load.step_tokens for load in loads)
    model = RandomModel(bench, max_tokens=budget, max_seqs=streams, max_model_len=longest + BLOCK_SIZE)
    room = streams * (longest + SPARE_BLOCKS * BLOCK_SIZE)
    running = model.backend(room)
    if not bench.smoke:
        EngineLoop(running.backend, room // BLOCK_SIZE, WARM_UP).run()
    for load in loads:
        name = (
            f"engine, {load.prompt_tokens} in / {load.answer_tokens} out x {load.streams}, steps of {load.step_tokens}"
        )

        def measure(load: EngineLoad = load, name: str = name) -> None:
            report_loop(bench, name, EngineLoop(running.backend, room // BLOCK_SIZE, load).run())

        bench.attempt(name, measure)
    running.close()


@dataclass(slots=True)
class RequestTimes:
    """The times of one request, in seconds: its arrival, and each token's."""

    added_s: float
    tokens_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LoopFigures:
    """Results of a closed loop: tokens, their seconds, and sorted seconds of its ``requests`` to their first tokens,
    and between two tokens."""

    tokens: int
    took_s: float
    first_s: list[float]
    gaps_s: list[float]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.took_s

    @property
    def p99_s(self) -> float:
        return rank(self.gaps_s, 99)


class EngineLoop:
    """A scheduler over a backend, with a list of KV slots in place of a KV node."""

    def __init__(self, backend: GpuBackend, num_slots: int, load: EngineLoad) -> None:
        self._backend, self._load = backend, load
        self.scheduler = Scheduler(
            blocks=BlockManager(BLOCK_SIZE), max_num_batched_tokens=load.step_tokens, max_num_seqs=load.streams
        )
        self.free_slots = list(range(num_slots))
        self._held: dict[int, list[int]] = {}
        self._left = load.streams * load.rounds
        self._live = 0
        self._next = 1
        self._draw = np.random.default_rng(0)
        self.seen: dict[int, RequestTimes] = {}

    def run(self) -> LoopFigures:
        out: deque[tuple[Any, Any]] = deque()
        idle = 0
        began_s = time.perf_counter()
        while self._left or self._live:
            while self._left and self._live < self._load.streams:
                self._add()
            now_s = time.perf_counter()
            plan = self.scheduler.schedule(now_s)
            self._take(self.scheduler.flush(now_s))
            if plan.scheduled:
                rows = build_sampling(plan, None)
                out.append((plan, self._backend.launch(build_step_batch(plan, BLOCK_SIZE), plan.copies, rows)))
                self.scheduler.launched(plan)
            idle = 0 if plan.scheduled or out else idle + 1
            assert idle < MAX_IDLE_ROUNDS, "the line stands still"
            stays = 1 if plan.scheduled else 0
            while len(out) > stays:
                landed, in_flight = out.popleft()
                sampled = in_flight.wait()
                self._take(self.scheduler.commit(landed, sampled, time.perf_counter()))
        while out:
            # Rows launched for streams whose last token was still in flight.
            landed, in_flight = out.popleft()
            self._take(self.scheduler.commit(landed, in_flight.wait(), time.perf_counter()))
        took_s = time.perf_counter() - began_s
        # Handle the answers to the last commits.
        self._take(self.scheduler.flush(time.perf_counter()))
        seen = list(self.seen.values())
        gaps = sorted(b - a for one in seen for a, b in pairwise(one.tokens_s))
        first = sorted(one.tokens_s[0] - one.added_s for one in seen)
        return LoopFigures(sum(len(one.tokens_s) for one in seen), took_s, first, gaps)

    def _add(self) -> None:
        load, number = self._load, self._next
        self._next, self._left, self._live = number + 1, self._left - 1, self._live + 1
        now_s = time.perf_counter()
        self.seen[number] = RequestTimes(now_s)
        holding = AdoptedTicket(number, (), self._slots(load.prompt_tokens // BLOCK_SIZE + 1))
        sequence = Sequence(
            holding,
            BLOCK_SIZE,
            now_s,
            seq_id=number,
            token_ids=self._draw.integers(2, 250, load.prompt_tokens).astype(np.int32),
            parent_hash=bytes(32),
            prompt_tokens=load.prompt_tokens,
            sampling=SamplingParams(temperature=0.0, top_p=1.0, top_k=0, seed=1, max_tokens=load.answer_tokens),
            max_model_len=1_000_000,
        )
        self.scheduler.add(sequence, now_s)

    def _slots(self, count: int) -> tuple[int, ...]:
        assert count <= len(self.free_slots), "the pool is too small for this load"
        taken = [self.free_slots.pop() for _ in range(count)]
        return tuple(taken)

    def _take(self, outcome: Outcome) -> None:
        """Answer an outcome at once, as a node and clients would."""
        now_s = time.perf_counter()
        for update in outcome.updates:
            assert update.ending is None or update.ending.error is None, update.ending
            self.seen[update.seq_id].tokens_s.extend([now_s] * len(update.token_ids))
            self._live -= update.ending is not None
        for order in outcome.commits:
            self._held.setdefault(order.ticket_id, []).extend(order.slots)
            self.scheduler.committed(order.seq_id, order.slots, "", now_s)
        for ticket in outcome.releases:
            self.free_slots.extend(self._held.pop(ticket, ()))
        self.free_slots.extend(outcome.returned_slots)
        if outcome.lease_blocks:
            self.scheduler.granted(self._slots(outcome.lease_blocks), now_s)


def report_loop(bench: Bench, name: str, found: LoopFigures, about: str = "") -> None:
    """Report a loop's rate and latencies."""
    more = {
        "requests": len(found.first_s),
        "itl_p50_ms": rank(found.gaps_s, 50) * 1e3,
        "itl_p99_ms": found.p99_s * 1e3,
        "ttft_p50_ms": rank(found.first_s, 50) * 1e3,
        "ttft_p99_ms": rank(found.first_s, 99) * 1e3,
        "seconds": found.took_s,
    }
    note = "ITL p99 {itl_p99_ms:.1f} ms, TTFT p50 {ttft_p50_ms:.0f} ms".format(**more)
    note = f"{note}; {about}" if about else note
    bench.report(Row(name, found.tokens_per_s, "output tokens/s", note=note, more=more))


def rank(ordered: list[float], percent: float) -> float:
    """Return the nearest-rank percentile of sorted values."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
