"""Draft tokens of decodes, verified by the step itself.

Sampling is a pure function of (logits, seed, position) (I6), so a draft token is accepted exactly if it would have been
chosen anyway: drafts change the number of steps, never the tokens, at any temperature. Draft tokens are cut where a
grammar rejects them, and not made for decodes with forced tokens. Sans-IO (I9).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Protocol

from pillion.engine.drafts.draft_chains import DraftChains
from pillion.engine.drafts.draft_control import DraftControl
from pillion.engine.scheduling.grammars import Grammars
from pillion.engine.scheduling.sequence import Sequence
from pillion.engine.scheduling.step_cost import StepCost
from pillion.engine.scheduling.step_plan import ScheduledChunk, StepPlan
from pillion.kernels.step import Int32


class Drafter(Protocol):
    """Drafts tokens, once per step, on the step thread. A drafter only reads the sequences."""

    def draft(self, wanted: Seq[tuple[Sequence, int]]) -> list[Int32]:
        """Return draft tokens, int32, for each (sequence, max tokens >= 1): likely continuations of the sequence's
        tokens, possibly empty."""

    def seconds_per_token(self, sequences: int) -> float:
        """Return the seconds to draft one more token for each of ``sequences`` sequences, without verification."""

    def sequence_finished(self, sequence: Sequence) -> None:
        """Handle the end, or preemption, of a stream: drop its data."""


class DraftTokens:
    """The draft tokens of one scheduler.

    Args:
        control: decides how many tokens are drafted per stream.
        drafter: drafts the tokens.

    ``draft_chains`` is the drafter if it is a model with its own KV, else None.
    """

    def __init__(self, control: DraftControl, drafter: Drafter) -> None:
        self._control = control
        self._drafter = drafter
        self.draft_chains = drafter if isinstance(drafter, DraftChains) else None

    def join(self, sequence: Sequence) -> None:
        """Add a sequence that has joined the queues."""
        if not sequence.is_prefill:
            self._control.begin(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence that has left the queues: it ends, or is preempted and may join again."""
        if not sequence.is_prefill:
            self._drafter.sequence_finished(sequence)

    def may_run_ahead(self, running: Iterable[Sequence]) -> bool:
        """Return whether the next step may be planned while a step is in flight: only if nothing would be drafted,
        since draft tokens can only follow known tokens."""
        if self._control.keeps_resting:
            return True
        chains = self.draft_chains
        streams = (s for s in running if s.decoding and not s.is_prefill)
        likely = [s for s in streams if s.draft_tokens.had_draft or (chains is not None and chains.catches_up(s))]
        return not self._control.may_draft(likely)

    def draft(
        self,
        scheduled: Seq[ScheduledChunk],
        spare: int,
        idle: int,
        now: float,
        *,
        cost: StepCost,
        grammars: Grammars | None,
    ) -> float:
        """Propose draft tokens (:meth:`Sequence.propose`) for these decodes, except those with forced tokens.

        Args:
            spare: max draft tokens of the step.
            idle: tokens of the step's budget that no prompt needs, for a draft model's catching up.
            cost: predicts the seconds of steps.
            grammars: cut the draft tokens; None without grammars.

        Returns the seconds that a draft model took.
        """
        chains, control, drafter = self.draft_chains, self._control, self._drafter
        if chains is not None:
            chains.begin_step(idle, now)
        if control.rests(len(scheduled)):
            return 0.0
        streams, limits = [], []
        for chunk in scheduled:
            if not chunk.sequence.num_proposed:
                streams.append(chunk.sequence)
                limits.append(min(spare, _draft_limit(chunk)))
        if not streams:
            return 0.0
        control.observe(scheduled, cost, drafter.seconds_per_token(len(streams)) / len(streams))
        self._propose(streams, control.decide(streams, limits, spare), grammars)
        drafting_s = chains.drafting_s if chains is not None else 0.0
        control.record_drafting(drafting_s)
        return drafting_s

    def _propose(self, streams: Seq[Sequence], shares: Seq[int], grammars: Grammars | None) -> None:
        """Draft each stream's share of tokens, and propose them if a step that verifies them pays. Streams with a share
        of 0 are probed when due."""
        control, drafter = self._control, self._drafter
        wanted = [(stream, share) for stream, share in zip(streams, shares, strict=True) if share]
        resting = (stream for stream, share in zip(streams, shares, strict=True) if not share)
        probes = control.due_for_probe(resting, slow=drafter.seconds_per_token(1) > 0)
        if not (wanted or probes):
            return
        control.drafts_for(len(wanted), len(probes))
        drafts = drafter.draft([*wanted, *probes])
        proposals = [(stream, tokens[:share]) for (stream, share), tokens in zip(wanted, drafts, strict=False)]
        if grammars is not None:
            proposals = [
                (stream, grammars.fit(stream, tokens) if len(tokens) else tokens) for stream, tokens in proposals
            ]
        if wanted and control.pays([(stream, len(tokens)) for stream, tokens in proposals]):
            for stream, tokens in proposals:
                stream.draft_tokens.record_proposal(tokens, stream.num_tokens)
                if len(tokens):
                    stream.propose(tokens)
        else:
            for stream, tokens in proposals:
                control.keep_as_probe(stream, tokens)
        for (stream, _), tokens in zip(probes, drafts[len(wanted) :], strict=True):
            stream.draft_tokens.probe(tokens, stream.num_tokens)

    def stepped(self, plan: StepPlan, seconds: float) -> None:
        """Record a step's end and duration; 0.0 if unknown."""
        self._control.stepped(plan, seconds)

    def judged(self, sequence: Sequence, drafted: int, right: int) -> None:
        """Record that a step verified ``drafted`` draft tokens of a sequence and accepted the first ``right``."""
        self._control.judged(sequence, drafted, right)


def _draft_limit(chunk: ScheduledChunk) -> int:
    """Return the max draft tokens of a decode's chunk: 0 if its token is unknown, or parallel samples start with the
    next one."""
    sequence = chunk.sequence
    return 0 if sequence.num_in_flight or chunk.parallel_seeds else sequence.draft_capacity
