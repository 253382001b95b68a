"""Draft tokens of decodes, judged by the step itself.

Sampling is a pure function of (logits, seed, position) (I6), so a draft token is accepted exactly if it would have been
chosen anyway: drafts change the number of steps, never the tokens, at any temperature. Draft tokens are cut where a
grammar rejects them, and made only after decodes without forced tokens. Sans-IO (I9).
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
        """Return for each sequence up to the given number of tokens, at least 1, that may follow ``sequence.tokens(0,
        sequence.num_tokens)``; it may return none."""

    def seconds_per_token(self, sequences: int) -> float:
        """Return the seconds to draft one more token for each of ``sequences``, without the step that judges it."""

    def ended(self, sequence: Sequence) -> None:
        """Drop a stream's data: it has ended, or was preempted and may come back."""


class DraftTokens:
    """The draft tokens of one scheduler.

    Args:
        control: decides how many tokens are drafted per stream.
        drafter: drafts them; also ``draft_chains`` if it is a model with its own KV, else None.
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
            self._drafter.ended(sequence)

    def may_run_ahead(self, running: Iterable[Sequence]) -> bool:
        """Return whether the next step may be planned before the last launched one has landed, because nothing would be
        drafted: a draft token can only follow known tokens."""
        if self._control.keeps_resting:
            return True
        chains = self.draft_chains
        streams = (s for s in running if s.decoding and not s.is_prefill)
        known = [s for s in streams if s.draft_tokens.found or (chains is not None and chains.catches_up(s))]
        return not self._control.may_draft(known)

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
        """Propose draft tokens after these decodes (:meth:`Sequence.propose`), unless tokens are forced: at most
        ``spare`` altogether. ``idle`` counts tokens of the step that no prompt needs, ``cost`` predicts steps, and
        ``grammars`` cut draft tokens. Return the seconds that a draft model took."""
        chains, control, drafter = self.draft_chains, self._control, self._drafter
        if chains is not None:
            chains.begin_step(idle, now)
        if control.rests(len(scheduled)):
            return 0.0
        streams, rooms = [], []
        for chunk in scheduled:
            if not chunk.sequence.num_proposed:
                streams.append(chunk.sequence)
                rooms.append(min(spare, _room(chunk)))
        if not streams:
            return 0.0
        control.observe(scheduled, cost, drafter.seconds_per_token(len(streams)) / len(streams))
        self._propose(streams, control.decide(streams, rooms, spare), grammars)
        took_s = chains.took_s if chains is not None else 0.0
        control.drafted(took_s)
        return took_s

    def _propose(self, streams: Seq[Sequence], shares: Seq[int], grammars: Grammars | None) -> None:
        """Draft each stream's share of tokens; streams without any are probed, in turn."""
        control, drafter = self._control, self._drafter
        wanted = [(stream, most) for stream, most in zip(streams, shares, strict=True) if most]
        silent = (stream for stream, most in zip(streams, shares, strict=True) if not most)
        due = control.due_for_probe(silent, slow=drafter.seconds_per_token(1) > 0)
        if not (wanted or due):
            return
        control.drafts_for(len(wanted), len(due))
        draft_tokens = drafter.draft([*wanted, *due])
        found = [(stream, drafted[:most]) for (stream, most), drafted in zip(wanted, draft_tokens, strict=False)]
        if grammars is not None:
            found = [(stream, grammars.fit(stream, drafted) if len(drafted) else drafted) for stream, drafted in found]
        if wanted and control.pays([(stream, len(tokens)) for stream, tokens in found]):
            for stream, tokens in found:
                stream.draft_tokens.asked(tokens, stream.num_tokens)
                if len(tokens):
                    stream.propose(tokens)
        else:
            for stream, tokens in found:
                control.keep_as_probe(stream, tokens)
        for (stream, _), drafted in zip(due, draft_tokens[len(wanted) :], strict=True):
            stream.draft_tokens.probe(drafted, stream.num_tokens)

    def stepped(self, plan: StepPlan, seconds: float) -> None:
        """Record a step's end and duration; 0.0 if unknown."""
        self._control.stepped(plan, seconds)

    def judged(self, sequence: Sequence, drafted: int, right: int) -> None:
        """Record judged draft tokens, of which the first ``right`` were accepted."""
        self._control.judged(sequence, drafted, right)


def _room(chunk: ScheduledChunk) -> int:
    """Return the max draft tokens after a chunk: none after an unknown token, or after the first token of parallel
    samples."""
    sequence = chunk.sequence
    return 0 if sequence.num_in_flight or chunk.parallel_seeds else sequence.draft_capacity
