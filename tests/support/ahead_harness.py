"""A scheduler over a device that runs ahead: steps are launched, run later, and land when the next one is launched.

A slot of a step in flight that the node reassigned, or could reassign, fails at once, not only when it corrupts a
token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from pillion.engine.backends.batching import build_step_batch
from pillion.engine.scheduling.draft_tokens import Drafter
from pillion.engine.scheduling.step_plan import CommitOrder, StepPlan
from pillion.errors import Internal
from pillion.kernels.step import Sampled, StepBatch
from pillion.v1.kvnode_pb2 import CommitRunResult
from tests.support.fake_backend import Int64, copy_blocks, run
from tests.support.scheduler_harness import BAD_ADAPTER, BLOCK, RowChoice, SchedulerHarness, choices_of, chosen, scored

BROKEN = "broken"


def slots_of(batch: StepBatch, copies: tuple[tuple[int, int], ...]) -> set[int]:
    """Return the slots that a step may read or write."""
    block_size = BLOCK
    rows = zip(batch.block_tables.tolist(), batch.context_lens.tolist(), strict=True)
    found = {slot for table, length in rows for slot in table[: -(-length // block_size)]}
    if batch.states is not None:
        found |= {*batch.states.reads.flat, *batch.states.writes.flat} - {-1}
    return found.union(*copies)


@dataclass
class _Step:
    batch: StepBatch
    copies: tuple[tuple[int, int], ...]
    slots: set[int]
    choices: list[RowChoice] | None
    scored: list[int]
    sampled: Sampled | None = None


class SimulatedDevice:
    """Runs steps in launch order, each before it lands: ``draw`` picks the earliest moment or the latest."""

    def __init__(self, pool: Int64, draw: Random) -> None:
        self._pool = pool
        self._draw = draw
        self._in_flight: deque[_Step] = deque()
        self._before = Sampled()
        # Unknown tokens passed to the last steps that ran, by launch.
        self.resolved = 0
        self.beside: Callable[[StepBatch], None] = lambda batch: None

    def launch(self, plan: StepPlan, batch: StepBatch, placed: Mapping[int, int]) -> None:
        batch = replace(batch, block_tables=batch.block_tables.copy())
        early = None if plan.awaits_tokens else choices_of(plan, placed)
        self._in_flight.append(_Step(batch, plan.copies, slots_of(batch, plan.copies), early, scored(plan)))
        if self._draw.random() < 0.5:
            self._catch_up(len(self._in_flight))

    def choose(self, plan: StepPlan, placed: Mapping[int, int]) -> None:
        """Begin the choices of the last launched step."""
        assert self._in_flight[-1].choices is None
        self._in_flight[-1].choices = choices_of(plan, placed)
        if self._draw.random() < 0.5:
            self._catch_up(len(self._in_flight))

    def land(self) -> Sampled:
        self._catch_up(1)
        sampled = self._in_flight.popleft().sampled
        assert sampled is not None
        return sampled

    def slots(self) -> set[int]:
        """Return the slots that in-flight steps use."""
        return set().union(*(step.slots for step in self._in_flight))

    def places(self) -> set[int]:
        """Return the adapter slots that in-flight steps read."""
        return {slot for step in self._in_flight if step.batch.adapters is not None for slot in step.batch.adapters}

    def _catch_up(self, steps: int) -> None:
        for step in list(self._in_flight)[:steps]:
            if step.sampled is None and step.choices is not None:
                if step.copies:
                    copy_blocks(self._pool, *zip(*step.copies, strict=True))
                ids = step.batch.token_ids
                unknown = np.flatnonzero(ids < 0)
                self.resolved += len(unknown)
                ids[unknown] = [self._before.token_ids[-1 - token] for token in ids[unknown]]
                self.beside(step.batch)
                self._before = step.sampled = chosen(run(self._pool, step.batch), step.choices, step.scored)


class AheadHarness(SchedulerHarness):
    """A scheduler harness that launches one step ahead, as the step loop does for a backend that runs ahead, or more up
    to ``max_in_flight``.

    ``refuse_commits``: number of orders to refuse. ``breaks``: the next "launch" or "landing" fails.
    """

    def __init__(
        self,
        *,
        slots: int = 64,
        budget: int = 16,
        max_num_seqs: int = 4,
        draws: int = 0,
        punctual: float = 1.0,
        max_loras: int = 0,
        drafter: Drafter | None = None,
        max_in_flight: int = 2,
        state_pages: int = 0,
    ) -> None:
        super().__init__(
            slots=slots,
            budget=budget,
            max_num_seqs=max_num_seqs,
            punctual=punctual,
            max_loras=max_loras,
            drafter=drafter,
            state_pages=state_pages,
        )
        self.device = SimulatedDevice(self.pool, Random(draws))
        self.out: deque[tuple[StepPlan, bool]] = deque()
        self.max_in_flight = max_in_flight
        self.rival = self.ledger.attach("rival", "decode")
        self.refuse_commits = 0
        self.breaks = ""
        self.void_rows = 0
        self.launches = 0
        self.late_choices = 0

    def step(self) -> StepPlan:
        """Schedule and launch; first land the steps in flight."""
        self.now += 0.01
        self.masks.catch_up()
        before = {id(s) for s in self.scheduler.queues.running if s.decoding}
        coming = self.scheduler.in_flight.holding_back
        plan = self.scheduler.schedule(self.now)
        self._check_plan(plan, before)
        outcome = self.scheduler.flush(self.now)
        assert not (coming and outcome.preemptions), "somebody gave way though memory was on its way to the node"
        if not outcome.empty:
            self.receive(outcome)
        stays = (self.max_in_flight - 1) * self._launch(plan) if plan.scheduled else len(self.out) - 1
        if plan.awaits_tokens:
            stays = min(stays, 1)
        while len(self.out) > max(stays, 0):
            self.land()
        stays = stays if plan.scheduled else 0
        if stays and plan.awaits_tokens:
            self.late_choices += 1
            self.device.choose(plan, self.placed)
        while stays and self.out and not self.scheduler.may_run_ahead:
            self.land()
        self._check_in_flight()
        self.scheduler.check_integrity()
        return plan

    def _launch(self, plan: StepPlan) -> bool:
        broken = self.breaks == "launch"
        self.scheduler.launched(plan)
        self.launches += 1
        if broken:
            self.breaks = ""
        else:
            taken = self.device.places() & {place for place, _ in plan.placements}
            assert not taken, f"places {taken} were given away under a step that reads them"
            batch = build_step_batch(plan, BLOCK)
            self.place(plan, batch)
            self.device.launch(plan, batch, self.placed)
        self.out.append((plan, broken))
        return not broken

    def land(self) -> None:
        """End the oldest step, successfully or not."""
        self.now += 0.001
        plan, broken = self.out.popleft()
        sampled = Sampled() if broken else self.device.land()
        if broken or self.breaks == "landing":
            self.breaks = self.breaks if broken else ""
            self.receive(self.scheduler.fail_step(plan, Internal(BROKEN), self.now))
            return
        reported = sum(len(record.token_ids) for record in self.records.values())
        self.receive(self.scheduler.commit(plan, sampled, self.now))
        reported = sum(len(record.token_ids) for record in self.records.values()) - reported
        self.void_rows += len(sampled.token_ids) - reported

    def answer(self) -> bool:
        """Answer as SchedulerHarness does, and check that no freed slot is used by a step in flight."""
        answered = super().answer()
        self._check_in_flight()
        return answered

    def scribble(self) -> None:
        """Let another worker allocate all free slots and write to them."""
        slots = self.ledger.lease(self.rival, len(self.pool))
        self.pool[list(slots)] = -7
        self._check_in_flight()
        self.ledger.return_slots(self.rival, slots)

    def commit_order(self, order: CommitOrder) -> CommitRunResult:
        if self.refuse_commits:
            self.refuse_commits -= 1
            return CommitRunResult(refusal="refused by the test")
        return super().commit_order(order)

    def _check_in_flight(self) -> None:
        """Check that each slot of a step in flight is leased to this worker, or committed and pinned."""
        leased = self.ledger.holders[self.worker].leased
        held = {block.slot for block in self.ledger.tree.by_hash.values() if block.ref_count}
        lost = {slot for slot in self.device.slots() if slot not in leased and slot not in held}
        assert not lost, f"slots {lost} went back to the node under a step that is under way"

    def busy(self) -> bool:
        return super().busy() or bool(self.out)

    def check_answers(self) -> None:
        """Check the prefixes of sequences that a broken step or a refused prefill range ended. Parallel samples that
        had not begun end with their leader."""
        whole = {}
        for seq_id, record in self.records.items():
            if record.end is None and record.parent and not record.token_ids:
                parent = self.records[record.parent]
                assert parent.end is not None or parent.cancelled
                continue
            error = record.end.ending.error if record.end is not None and record.end.ending is not None else None
            if error is None:
                whole[seq_id] = record
            elif record.max_tokens:
                assert error.message in (BROKEN, BAD_ADAPTER), error
                self.check_answer(record)
        everybody, self.records = self.records, whole
        super().check_answers()
        self.records = everybody
