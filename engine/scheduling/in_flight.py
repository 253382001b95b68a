"""Steps that were launched and have not landed: what they hold of each sequence, and what has to wait for them.

    schedule k+1 --> launched --> schedule k+2 ...      k+1 runs on the device meanwhile
                         '--> step k lands, is committed, and hands on what waited for it

A sequence's ``num_computed`` counts what has landed, ``flying`` what is under way behind that; its next piece starts
behind both. Of a decode under way the token is unknown: the next step may run on it all the same, and names it by its
row among what the flight chooses (StepPlan.unknown). Who may be scheduled so (:meth:`InFlightSteps.may_follow`):

* Not a stream whose unknown token will be its last one by length. A stop id cannot be foreseen: then the row that was
  launched meanwhile is void.
* Not a stream whose next choice reads its history (penalties): it runs in every other step.
* A prompt tail, and a span, behind their flying pieces: their tokens are known.

A piece counts when it lands only if its sequence is still running under the same hold. Of one that was cancelled, has
failed or stopped it is dropped; so it is of one that was preempted, whose token is chosen again, and is the same (I6).

What a flight may read or write must not return to the KV node before it has landed, or somebody else would write there:
releases and slots wait for the flights that were under way when they were ordered, and so do resumes, which go out
behind their releases. That is read-copy-update's grace period (McKenney and Slingwine 1998), with a landing for the
quiescent state. Slots in the worker's own stock need not wait: the device runs steps in order. Sans-IO (I9).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from pillion.engine.scheduling.sequence import ForkSpec, Sequence, SequenceState
from pillion.engine.scheduling.step_plan import Outcome, Sampled, SequencePiece, StepPlan


@dataclass(frozen=True, slots=True)
class _LaunchedStep:
    """``holds``, ``forks``: of each piece's sequence when it was launched. ``rows``: by seq_id, the row that chooses
    the sequence's own token."""

    plan: StepPlan
    holds: tuple[int, ...]
    forks: tuple[tuple[ForkSpec, ...], ...]
    rows: dict[int, int]

    def counts(self, piece: SequencePiece, hold: int) -> bool:
        """Whether its sequence still waits for what ``piece`` gives."""
        return piece.sequence.state is SequenceState.RUNNING and piece.sequence.holds == hold


class InFlightSteps:
    """Belongs to one scheduler. Without a launch nothing is ever out, and nothing waits."""

    def __init__(self) -> None:
        self._out: deque[_LaunchedStep] = deque()
        self._launched = 0
        # Orders with the number of the last flight that they wait for.
        self._held: deque[tuple[int, Outcome]] = deque()

    def __len__(self) -> int:
        return len(self._out)

    # Steps.

    def launched(self, plan: StepPlan) -> None:
        """It is under way, behind all others."""
        rows, row = {}, 0
        for piece in plan.pieces:
            piece.sequence.flying += piece.count
            if piece.samples:
                rows[piece.sequence.seq_id] = row
                row += piece.samples + len(piece.fork_seeds)
        forks = tuple(piece.sequence.forks if piece.fork_seeds else () for piece in plan.pieces)
        self._out.append(_LaunchedStep(plan, tuple(piece.sequence.holds for piece in plan.pieces), forks, rows))
        self._launched += 1

    def may_follow(self, sequence: Sequence) -> bool:
        """Whether a stream with a piece under way can decode the token that this chooses."""
        chooses = sequence.seq_id in self._out[-1].rows
        return chooses and not sequence.next_is_last and not sequence.reads_history

    def unknown(self, pieces: Seq[SequencePiece]) -> tuple[tuple[int, int], ...]:
        """Of the next step, (piece, row): that piece's token is what that row of the flight chooses."""
        if not self._out:
            return ()
        rows = self._out[-1].rows
        return tuple(
            (place, rows[piece.sequence.seq_id])
            for place, piece in enumerate(pieces)
            if piece.start == piece.sequence.num_tokens
        )

    def landed(self, plan: StepPlan, sampled: Sampled) -> tuple[Seq[SequencePiece], Sampled]:
        """Its pieces that count, and the tokens that these and forks still wait for. A plan that never flew counts
        whole."""
        if not (self._out and self._out[0].plan is plan):
            return plan.pieces, sampled
        flight = self._out.popleft()
        pieces: list[SequencePiece] = []
        places: list[int] = []
        row = 0
        for piece, hold, forks in zip(plan.pieces, flight.holds, flight.forks, strict=True):
            if flight.counts(piece, hold):
                piece.sequence.flying -= piece.count
                pieces.append(piece)
                places.extend(range(row, row + piece.samples))
                first = row + piece.samples
                places.extend(at for at, fork in enumerate(forks, first) if fork in piece.sequence.forks)
            row += piece.samples + len(forks)
        if len(places) == row or not sampled.token_ids:
            # Everything counts, or the step failed and chose nothing.
            return pieces, sampled
        return pieces, Sampled(
            tuple(sampled.token_ids[at] for at in places),
            tuple(sampled.logprobs[at] for at in places) if sampled.logprobs else (),
        )

    # What waits for them.

    @property
    def holding(self) -> bool:
        """Whether orders wait for a landing."""
        return bool(self._held)

    def hold_back(self, out: Outcome) -> bool:
        """Take out of ``out`` what has to wait, and add what has waited long enough. True: releases are among that."""
        if not (self._out or self._held):
            return False
        if out.releases or out.give_back or out.resumes:
            late = Outcome(releases=out.releases, give_back=out.give_back, resumes=out.resumes)
            self._held.append((self._launched, late))
            out.releases, out.give_back, out.resumes = [], [], []
        landed = self._launched - len(self._out)
        while self._held and self._held[0][0] <= landed:
            late = self._held.popleft()[1]
            out.releases += late.releases
            out.give_back += late.give_back
            out.resumes += late.resumes
        return bool(out.releases)

    def held_slots(self) -> list[int]:
        """What is still leased to this worker, though it left the stock."""
        return [slot for _, late in self._held for slot in late.give_back]

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raises AssertionError."""
        flying: dict[int, int] = {}
        for flight in self._out:
            for piece, hold in zip(flight.plan.pieces, flight.holds, strict=True):
                if flight.counts(piece, hold):
                    flying[piece.sequence.seq_id] = flying.get(piece.sequence.seq_id, 0) + piece.count
        for sequence in sequences:
            if sequence.state is not SequenceState.CLOSING and sequence.state is not SequenceState.RESUMING:
                assert sequence.flying == flying.get(sequence.seq_id, 0), "what flies does not add up"
                assert sequence.num_computed + sequence.flying <= sequence.num_tokens + bool(sequence.flying)
        assert self._out or not self._held, "orders wait for nothing"
