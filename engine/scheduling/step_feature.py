"""Defines what a feature adds to the steps of one scheduler, and when it is asked: the seam between the core and such
rooms.

    add       joined, share, added                   schedule  may_choose, may_follow (each decode)
    resumed   joined, share                                    -> proposes, propose -> planned -> masks (of the batch)
    commit    stepped -> judged, accepted -> landed  between   may_run_ahead; flush
    closed    ends, preempted, left                  memory    lacking_blocks, yield_slots, chain_opened, ...

A feature overrides what it needs. The scheduler keeps, for each method, those of the features that have one of their
own (:func:`overrides`): a method that nobody overrides costs a step nothing. A feature keeps what it knows of a
sequence in ``sequence.kept``, under a name of its own. Where no feature keeps anything for a sequence, ``added``,
``may_choose``, ``may_follow`` and ``accepted`` are not called for it, nor ``proposes`` and ``masks`` for a step of such
sequences: a plain stream costs no call. Sans-IO (I9).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from pillion.engine.backends.backend import Int32
from pillion.engine.sampling.sampling_rows import Sampled
from pillion.engine.scheduling.block_chain import BlockChain, Holding
from pillion.engine.scheduling.block_manager import BlockManager
from pillion.engine.scheduling.in_flight import InFlightSteps
from pillion.engine.scheduling.queues import SchedulerQueues
from pillion.engine.scheduling.sequence import Sequence
from pillion.engine.scheduling.step_cost import TokenBudget
from pillion.engine.scheduling.step_plan import SequencePiece, StepPlan

P = ParamSpec("P")
R = TypeVar("R")


class Steps(Protocol):
    """Describes what a feature may use of the scheduler that it belongs to."""

    budget: TokenBudget
    queues: SchedulerQueues
    blocks: BlockManager
    in_flight: InFlightSteps

    def fitting(self, sequence: Sequence, guess: Int32) -> Int32:
        """Returns as much of a guess of the sequence's next tokens as the other features allow."""


class StepFeature:
    """Represents a feature of one scheduler, such as grammars or adapters; each method does nothing where a feature
    does not override it.

    Attributes:
        use: the use as which its proposed tokens are counted (:mod:`pillion.engine.worker.step_meter`).
        certain: whether each token that it proposes is right, so that no step has to judge it.
    """

    use = ""
    certain = False

    def bind(self, steps: Steps) -> None:
        """Notes that the feature belongs to a scheduler from now on. It is called once, before everything else."""

    def joined(self, sequence: Sequence, now: float) -> None:
        """Notes that a sequence has joined the queues, for the first time or after it was preempted."""

    def left(self, sequence: Sequence) -> None:
        """Notes that a sequence has left the queues: it ends, or is preempted and may join again
        (``sequence.resume_after``)."""

    def propose(self, pieces: Seq[SequencePiece], spare: int, idle: int, now: float) -> tuple[int, float]:
        """Puts tokens that may follow these decodes after their sequences' own (:meth:`Sequence.propose`).

        These are at most ``spare`` tokens altogether, and none where other features have proposed some. ``idle`` counts
        tokens of the step that no prompt needs, either. Returns how many tokens were proposed, and the seconds that it
        took to find them.
        """
        return 0, 0.0

    def may_run_ahead(self) -> bool:
        """Returns whether the next step may be planned before the one just launched has landed."""
        return True

    def stepped(self, plan: StepPlan, seconds: float) -> None:
        """Notes that a step has ended, and how long it took; 0.0 where that is unknown."""

    def judged(self, sequence: Sequence, proposed: int, right: int) -> None:
        """Notes that a step has judged the tokens that the feature proposed: the first ``right`` of them are the
        sequence's now."""

    def landed(self, plan: StepPlan, sampled: Sampled) -> None:
        """Notes that all results of a step are applied."""

    def lacking_blocks(self) -> int:
        """Returns how many slots the feature would like to have, which it gets only where decodes need none."""
        return 0

    def yield_slots(self, blocks: int, now: float) -> bool:
        """Gives so many slots or more back to the stock, because memory is short. Returns False if the feature gave
        none."""
        return False

    def chain_opened(self, chain_id: int, holding: Holding | None, now: float) -> None:
        """Takes the node's answer to a ChainOrder; the answer is None where the node gave no ticket."""

    def chain_committed(self, chain_id: int, slots: Seq[int], refusal: str) -> None:
        """Takes the node's answer to a CommitOrder for one of the feature's chains."""

    def owns_chain(self, chain_id: int) -> bool:
        """Returns whether a chain of this id, below 0, is one of the feature's :meth:`chains`."""
        return False

    def chains(self) -> Iterable[BlockChain]:
        """Returns the feature's chains of blocks, which are beside those of sequences."""
        return ()

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raises AssertionError where what the feature knows contradicts the sequences that are not gone."""


MakeStepFeature = Callable[[], StepFeature]


def overrides(
    features: Iterable[StepFeature], method: Callable[Concatenate[StepFeature, P], R]
) -> tuple[Callable[P, R], ...]:
    """Returns the features' own versions of a method of StepFeature, in their order, as far as they have one."""
    name = method.__name__
    return tuple(getattr(one, name) for one in features if getattr(type(one), name) is not method)
