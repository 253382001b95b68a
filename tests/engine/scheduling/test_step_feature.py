"""Features of steps: when each is asked, and that a stream without anything of theirs costs no call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq

import numpy as np

from pillion.engine.scheduling.block_manager import BlockManager
from pillion.engine.scheduling.scheduler import Scheduler
from pillion.engine.scheduling.sequence import Sequence
from pillion.engine.scheduling.step_feature import StepFeature, overrides
from pillion.engine.scheduling.step_plan import SequencePiece
from pillion.types import FinishReason
from tests.support.scheduler_harness import SchedulerHarness, answer, prompt


class Asked(StepFeature):
    """Counts what it is asked for each stream, and knows the next tokens of some."""

    use = "forced"
    certain = True

    def __init__(self, knows: dict[int, list[int]]) -> None:
        self.knows = knows
        self.calls: Counter[tuple[str, int]] = Counter()

    def joined(self, sequence: Sequence, now: float) -> None:
        if sequence.seq_id in self.knows:
            sequence.kept["asked"] = True

    def may_choose(self, sequence: Sequence, now: float) -> bool:
        self.calls["may_choose", sequence.seq_id] += 1
        return True

    def proposes(self, pieces: Seq[SequencePiece]) -> bool:
        return True

    def propose(self, pieces: Seq[SequencePiece], spare: int, idle: int, now: float) -> tuple[int, float]:
        used = 0
        for piece in pieces:
            sequence = piece.sequence
            known = self.knows.get(sequence.seq_id, [])[sequence.num_tokens - sequence.prompt_tokens :]
            tokens = known[: min(spare - used, sequence.room_for_proposals)]
            if tokens:
                sequence.propose(np.array(tokens, np.int32), self)
                used += len(tokens)
        return used, 0.0

    def judged(self, sequence: Sequence, proposed: int, right: int) -> None:
        self.calls["judged", sequence.seq_id] += right

    def accepted(self, sequence: Sequence, tokens: Seq[int], reason: FinishReason | None) -> FinishReason | None:
        self.calls["accepted", sequence.seq_id] += len(tokens)
        return reason

    def left(self, sequence: Sequence) -> None:
        self.calls["left", sequence.seq_id] += 1


def with_feature(feature: StepFeature) -> SchedulerHarness:
    harness = SchedulerHarness(slots=200, budget=32)
    harness.scheduler = Scheduler(
        blocks=BlockManager(4), max_num_batched_tokens=32, max_num_seqs=4, features=[lambda: feature]
    )
    return harness


def test_a_stream_about_which_nobody_keeps_anything_is_not_asked_about() -> None:
    feature = Asked({2: []})
    harness = with_feature(feature)
    harness.submit(prompt(1, 9), 12)
    harness.submit(prompt(2, 9), 12)
    harness.run_all()
    assert feature.calls["may_choose", 1] == feature.calls["accepted", 1] == 0
    # The prompt's last token chooses the first one, and each decode another one.
    assert feature.calls["may_choose", 2] == feature.calls["accepted", 2] == 12
    assert feature.calls["left", 1] == feature.calls["left", 2] == 1


def test_tokens_that_are_certain_save_steps_and_are_judged_by_none() -> None:
    feature = Asked({1: answer(prompt(1, 9), 0, 33)})
    harness = with_feature(feature)
    harness.submit(prompt(1, 9), 33)
    # A block of four at a time: what is proposed does not grow the table.
    assert harness.run_all() <= 12
    assert feature.calls["judged", 1] >= 20


def test_what_nobody_overrides_is_not_called() -> None:
    assert overrides([StepFeature(), Asked({})], StepFeature.landed) == ()
    feature = Asked({})
    assert overrides([StepFeature(), feature], StepFeature.may_choose) == (feature.may_choose,)
