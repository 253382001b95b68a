"""Steps that are launched and have not landed: what they hold of each sequence, and what has to wait for them.

    schedule k+1 --> launched --> schedule k+2 ...      k+1 runs on the device meanwhile
                         '--> step k lands, is committed, and hands on what waited for it

A sequence's ``num_computed`` counts what has landed, ``num_in_flight`` what is in launched steps behind that; its next
piece starts behind both. The token that a launched decode chooses is unknown: the next step may run on it all the same,
and names it by its row among the tokens that the launched step chooses (StepPlan.unknown). Where the next choice reads
that token, too (penalties, a grammar), only the forward pass is launched ahead, and the choice is begun when the
launched step has landed (StepPlan.awaits_tokens). Three rules say which sequences may be scheduled behind a launched
step (:meth:`InFlightSteps.may_follow`):

* A stream may not if its unknown token will be its last one by length. A stop id cannot be foreseen: then the row that
  was launched meanwhile is void.
* A stream may not where its launched piece has drafts, or where its grammar says that the tokens behind the unknown
  one will be known, or late.
* A prompt tail and a span may, behind their launched pieces: their tokens are known.

A piece counts when it lands only if its sequence is still running under the same ticket. The piece of a sequence that
was cancelled, failed or stopped is dropped, and so is that of a preempted one: its token is chosen again, and is the
same (I6).

What a launched step may read or write must not return to the KV node before the step has landed, or another worker
would write there: releases and slots wait for the steps that were in flight when they were ordered, and so do resumes,
which follow their releases. This is the grace period of read-copy-update (McKenney and Slingwine 1998), with a landing
for the quiescent state. Slots in the worker's own stock need not wait: the device runs steps in order. Sans-IO (I9).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from pillion.engine.sampling.sampling_rows import Sampled
from pillion.engine.scheduling.sequence import ForkSpec, Sequence, SequenceState
from pillion.engine.scheduling.step_plan import Outcome, SequencePiece, StepPlan
from pillion.types import TokenLogprob


@dataclass(frozen=True, slots=True)
class _LaunchedStep:
    """A plan in flight. ``generations`` and ``forks`` are those of each piece's sequence at the launch; ``rows`` has,
    by seq_id, the row that chooses the sequence's own token."""

    plan: StepPlan
    generations: tuple[int, ...]
    forks: tuple[tuple[ForkSpec, ...], ...]
    rows: dict[int, int]

    def counts(self, piece: SequencePiece, generation: int) -> bool:
        """Whether the piece's sequence still waits for what the piece computes."""
        sequence = piece.sequence
        return sequence.state is SequenceState.RUNNING and sequence.generation == generation


class InFlightSteps:
    """The launched steps of one scheduler, oldest first. Without a launch nothing waits."""

    def __init__(self) -> None:
        self._steps: deque[_LaunchedStep] = deque()
        self._launched = 0
        # Orders with the number of the last step that they wait for.
        self._held_back: deque[tuple[int, Outcome]] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    # Steps.

    def launched(self, plan: StepPlan) -> None:
        """Add a step behind all others."""
        rows, row = {}, 0
        for piece in plan.pieces:
            piece.sequence.launch(piece.count)
            if piece.samples:
                rows[piece.sequence.seq_id] = row
                row += piece.samples + len(piece.fork_seeds)
        generations = tuple(piece.sequence.generation for piece in plan.pieces)
        forks = tuple(piece.sequence.forks if piece.fork_seeds else () for piece in plan.pieces)
        self._steps.append(_LaunchedStep(plan, generations, forks, rows))
        self._launched += 1

    def may_follow(self, sequence: Sequence) -> bool:
        """Whether a stream with a launched piece can decode the token that this piece chooses."""
        grammar = sequence.grammar
        if sequence.num_drafts or (grammar is not None and not grammar.may_run_ahead):
            return False
        return sequence.seq_id in self._steps[-1].rows and not sequence.next_is_last

    def unknown(self, pieces: Seq[SequencePiece]) -> tuple[tuple[int, int], ...]:
        """(piece, row) for each of the next step's pieces whose token is what that row of the last step chooses."""
        if not self._steps:
            return ()
        rows = self._steps[-1].rows
        return tuple(
            (place, rows[piece.sequence.seq_id])
            for place, piece in enumerate(pieces)
            if piece.start == piece.sequence.num_tokens
        )

    def landed(self, plan: StepPlan, sampled: Sampled) -> tuple[Seq[SequencePiece], Sampled]:
        """Remove the step of ``plan``, which is the oldest one. Returns its pieces that count, and the tokens that
        their sequences and forks still wait for. A plan that was never launched counts whole."""
        if not (self._steps and self._steps[0].plan is plan):
            return plan.pieces, sampled
        step = self._steps.popleft()
        pieces: list[SequencePiece] = []
        places: list[int] = []
        scores: list[TokenLogprob] = []
        row = scored = 0
        for piece, generation, forks in zip(plan.pieces, step.generations, step.forks, strict=True):
            if step.counts(piece, generation):
                piece.sequence.land(piece.count)
                pieces.append(piece)
                places.extend(range(row, row + piece.samples))
                first = row + piece.samples
                places.extend(at for at, fork in enumerate(forks, first) if fork in piece.sequence.forks)
                scores.extend(sampled.scored[scored : scored + piece.scores])
            row += piece.samples + len(forks)
            scored += piece.scores
        if len(places) == row or not sampled.token_ids:
            # Every token counts, or the step chose none.
            return pieces, sampled if len(scores) == len(sampled.scored) else replace(sampled, scored=tuple(scores))
        return pieces, Sampled(
            tuple(sampled.token_ids[at] for at in places),
            tuple(sampled.logprobs[at] for at in places) if sampled.logprobs else (),
            tuple(scores),
        )

    # What waits for them.

    @property
    def last_launched(self) -> int:
        """The number of the step that was launched last."""
        return self._launched

    def has_landed(self, number: int) -> bool:
        """Whether the step of that number, and all before it, have landed."""
        return self._launched - len(self._steps) >= number

    @property
    def holding_back(self) -> bool:
        return bool(self._held_back)

    def hold_back(self, out: Outcome) -> bool:
        """Take out of ``out`` what has to wait, and add what has waited long enough. True: releases are among that."""
        if not (self._steps or self._held_back):
            return False
        if out.releases or out.give_back or out.resumes:
            late = Outcome(releases=out.releases, give_back=out.give_back, resumes=out.resumes)
            self._held_back.append((self._launched, late))
            out.releases, out.give_back, out.resumes = [], [], []
        landed = self._launched - len(self._steps)
        while self._held_back and self._held_back[0][0] <= landed:
            out.add_orders(self._held_back.popleft()[1])
        return bool(out.releases)

    def held_back_slots(self) -> list[int]:
        """Slots that left the stock and are still leased to this worker."""
        return [slot for _, late in self._held_back for slot in late.give_back]

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raises AssertionError where the sequences' counts differ from the launched steps."""
        in_flight: dict[int, int] = {}
        for step in self._steps:
            for piece, generation in zip(step.plan.pieces, step.generations, strict=True):
                if step.counts(piece, generation):
                    in_flight[piece.sequence.seq_id] = in_flight.get(piece.sequence.seq_id, 0) + piece.count
        for sequence in sequences:
            if sequence.state is not SequenceState.CLOSING and sequence.state is not SequenceState.RESUMING:
                assert sequence.num_in_flight == in_flight.get(sequence.seq_id, 0), "tokens in flight do not add up"
                most = sequence.num_tokens + sequence.num_drafts + bool(sequence.num_in_flight)
                assert sequence.next_start <= most
        assert self._steps or not self._held_back, "orders wait for nothing"
