"""Launched steps that have not retired: the tokens of each sequence in them, and the orders that wait for their end.

    schedule k+1 --> launched --> schedule k+2 ...      k+1 runs on the device meanwhile
                         '--> step k retires and is committed, and the orders that waited for it are sent

A sequence's ``num_computed`` counts the tokens of retired steps, ``num_in_flight`` those of launched steps after them;
its next chunk starts after both. The token that a launched decode chooses is unknown: the next step may run on it
nonetheless, and refers to it by its row in the launched step (StepPlan.unknown). If the next choice reads that token as
well (penalties, a grammar), only the forward pass is launched ahead, and the choice starts when the launched step has
ended (StepPlan.awaits_tokens). What may be scheduled after a launched step (:meth:`InFlightSteps.may_follow`):

* A stream, unless its unknown token is its last by length. If that token turns out to be a stop id, the row launched
  after it is void.
* A stream without proposed tokens after its launched chunk, if its grammar allows it
  (:attr:`pillion.engine.grammars.grammar_state.GrammarState.may_run_ahead`).
* A prompt tail and a prefill range, after their launched chunks: their tokens are known.

A retired chunk counts only if its sequence still runs under the same ticket. The chunk of a cancelled, failed or
stopped sequence is dropped, as is that of a preempted one, whose token is chosen again (I6).

Slots that a launched step may access must not return to the KV node before that step has retired, or another worker
would write there: releases and returned slots wait until all steps launched before them have retired, and so do
resumes, which follow their releases. This is the grace period of read-copy-update (McKenney and Slingwine 1998). The
worker's own free slots need not wait: the device runs steps in order. Sans-IO (I9).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from pillion.engine.scheduling.sequence import ParallelSampleSpec, Sequence, SequenceState
from pillion.engine.scheduling.step_plan import Outcome, ScheduledChunk, StepPlan
from pillion.kernels.step import Float32, Sampled
from pillion.types import TokenLogprob


@dataclass(frozen=True, slots=True)
class _LaunchedStep:
    """A step in flight.

    Attributes:
        generations, parallel_samples: those of each chunk's sequence at the launch.
        rows: by seq_id, the row that chooses the sequence's next token, without its parallel samples' rows.
    """

    plan: StepPlan
    generations: tuple[int, ...]
    parallel_samples: tuple[tuple[ParallelSampleSpec, ...], ...]
    rows: dict[int, int]

    def counts(self, chunk: ScheduledChunk, generation: int) -> bool:
        """Return whether the chunk's results count for its sequence, which had ``generation`` at the launch."""
        sequence = chunk.sequence
        return sequence.state is SequenceState.RUNNING and sequence.generation == generation


class InFlightSteps:
    """The launched steps of one scheduler, oldest first."""

    def __init__(self) -> None:
        self._steps: deque[_LaunchedStep] = deque()
        self._launched = 0
        # Orders held back, with the number of the last step that they wait for.
        self._held_back: deque[tuple[int, Outcome]] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def launched(self, plan: StepPlan) -> None:
        """Add a launched step."""
        rows, row = {}, 0
        for chunk in plan.scheduled:
            chunk.sequence.launch(chunk.count)
            if chunk.samples:
                rows[chunk.sequence.seq_id] = row
                row += chunk.samples + len(chunk.parallel_seeds)
        generations = tuple(chunk.sequence.generation for chunk in plan.scheduled)
        parallel_samples = tuple(
            chunk.sequence.parallel_samples if chunk.parallel_seeds else () for chunk in plan.scheduled
        )
        self._steps.append(_LaunchedStep(plan, generations, parallel_samples, rows))
        self._launched += 1

    def may_follow(self, sequence: Sequence) -> bool:
        """Return whether a stream can decode the token chosen by its launched chunk."""
        if sequence.num_proposed:
            return False
        return sequence.seq_id in self._steps[-1].rows and not sequence.next_is_last

    def unknown(self, scheduled: Seq[ScheduledChunk]) -> tuple[tuple[int, int], ...]:
        """Return (index in ``scheduled``, row) of each chunk whose token is not known yet, but chosen by that row of
        the last launched step."""
        if not self._steps:
            return ()
        rows = self._steps[-1].rows
        return tuple(
            (index, rows[chunk.sequence.seq_id])
            for index, chunk in enumerate(scheduled)
            if chunk.start == chunk.sequence.num_tokens
        )

    def retire(self, plan: StepPlan, sampled: Sampled) -> tuple[Seq[ScheduledChunk], Sampled]:
        """Remove the oldest step, which is that of ``plan``. Return its chunks that count, and ``sampled`` without the
        results of other chunks and of dropped parallel samples. All chunks of a plan that was not launched count."""
        if not (self._steps and self._steps[0].plan is plan):
            return plan.scheduled, sampled
        step = self._steps.popleft()
        scheduled: list[ScheduledChunk] = []
        kept_rows: list[int] = []
        scores: list[TokenLogprob] = []
        vectors: list[Float32] = []
        row = scored = pooled = 0
        for chunk, generation, parallel_samples in zip(
            plan.scheduled, step.generations, step.parallel_samples, strict=True
        ):
            if step.counts(chunk, generation):
                chunk.sequence.retire(chunk.count)
                scheduled.append(chunk)
                first = row + chunk.samples
                kept_rows.extend(range(row, first))
                current = chunk.sequence.parallel_samples
                kept_rows.extend(index for index, sample in enumerate(parallel_samples, first) if sample in current)
                scores.extend(sampled.scored[scored : scored + chunk.scores])
                vectors.extend(sampled.pooled[pooled : pooled + chunk.pools])
            row += chunk.samples + len(parallel_samples)
            scored += chunk.scores
            pooled += chunk.pools
        if len(vectors) < len(sampled.pooled):
            sampled = replace(sampled, pooled=tuple(vectors))
        if len(kept_rows) == row or not sampled.token_ids:
            return scheduled, sampled if len(scores) == len(sampled.scored) else replace(sampled, scored=tuple(scores))
        return scheduled, Sampled(
            tuple(sampled.token_ids[kept] for kept in kept_rows),
            tuple(sampled.logprobs[kept] for kept in kept_rows) if sampled.logprobs else (),
            tuple(scores),
            pooled=sampled.pooled,
        )

    @property
    def last_launched(self) -> int:
        """Number of the last launched step."""
        return self._launched

    def has_retired(self, number: int) -> bool:
        """Return whether step number ``number``, counted from 1, and all before it have retired."""
        return self._launched - len(self._steps) >= number

    @property
    def holding_back(self) -> bool:
        """True if releases or slots for the node wait for a step in flight."""
        return bool(self._held_back)

    def hold_back(self, out: Outcome) -> bool:
        """Move releases, returned slots and resumes out of ``out`` until the steps now in flight have retired, and
        those whose wait is over into it. Return whether ``out`` has releases now."""
        if not (self._steps or self._held_back):
            return False
        if out.releases or out.returned_slots or out.resumes:
            late = Outcome(releases=out.releases, returned_slots=out.returned_slots, resumes=out.resumes)
            self._held_back.append((self._launched, late))
            out.releases, out.returned_slots, out.resumes = [], [], []
        retired = self._launched - len(self._steps)
        while self._held_back and self._held_back[0][0] <= retired:
            out.add_orders(self._held_back.popleft()[1])
        return bool(out.releases)

    def held_back_slots(self) -> list[int]:
        """Return the slots that leave this worker, but whose return is held back."""
        return [slot for _, late in self._held_back for slot in late.returned_slots]

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError if the sequences' counts differ from the launched steps."""
        in_flight: dict[int, int] = {}
        for step in self._steps:
            for chunk, generation in zip(step.plan.scheduled, step.generations, strict=True):
                if step.counts(chunk, generation):
                    in_flight[chunk.sequence.seq_id] = in_flight.get(chunk.sequence.seq_id, 0) + chunk.count
        for sequence in sequences:
            if sequence.state is not SequenceState.CLOSING and sequence.state is not SequenceState.RESUMING:
                assert sequence.num_in_flight == in_flight.get(sequence.seq_id, 0), "tokens in flight do not add up"
                limit = sequence.num_tokens + sequence.num_proposed + bool(sequence.num_in_flight)
                assert sequence.next_start <= limit
        assert self._steps or not self._held_back, "orders wait for nothing"
