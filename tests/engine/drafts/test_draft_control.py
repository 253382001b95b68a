"""The number of draft tokens follows their cost and acceptance: on a machine of known costs, drafting is never much
slower than none, and as fast as possible with right drafts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pillion.engine.drafts.acceptance import STREAM_FADING, Acceptance
from pillion.engine.drafts.draft_control import MAX_PROBING_CREDIT_S, MAX_PROBING_SHARE, DraftControl, RowCosts
from pillion.engine.scheduling.draft_tokens import Drafter
from pillion.engine.scheduling.sequence import Sequence
from pillion.engine.scheduling.step_cost import StepCost
from pillion.engine.scheduling.step_plan import ScheduledChunk, StepPlan
from pillion.kernels.step import Int32, Sampled
from pillion.settings.speculative_config import SpeculativeConfig
from tests.engine.drafts.test_drafts import OracleDrafter, sequence_of
from tests.support.drafts import speculate
from tests.support.scheduler_harness import SchedulerHarness, answer, prompt

STEP_S, ROW_S = 0.008, 0.0015


class TimedHarness(SchedulerHarness):
    """A machine whose steps take a constant and a time per token."""

    def __init__(self, drafter: Drafter | None, row_s: float = ROW_S, **more: Any) -> None:
        super().__init__(slots=1000, budget=256, max_num_seqs=16, drafter=drafter, **more)
        self.row_s = row_s
        self.tokens = self.drafted = 0

    def run_plan(self, plan: StepPlan) -> Sampled:
        self.now += STEP_S + self.row_s * plan.num_tokens
        self.tokens += plan.num_tokens
        self.drafted += sum(chunk.samples - 1 for chunk in plan.scheduled if chunk.samples)
        return super().run_plan(plan)


class CountingDrafter(OracleDrafter):
    """Counts the texts that it is asked to draft for."""

    asked = 0

    def draft(self, wanted: list[tuple[Sequence, int]]) -> list[Int32]:
        self.asked += len(wanted)
        return super().draft(wanted)


def seconds(harness: TimedHarness, streams: int, length: int = 60) -> float:
    for seed in range(streams):
        harness.submit(prompt(seed % 4, 6), length, seed=seed)
    began = harness.now
    steps = harness.run_all()
    return harness.now - began - 0.01 * steps


@pytest.mark.parametrize("streams", [1, 4, pytest.param(16, marks=pytest.mark.long)])
@pytest.mark.parametrize("wrong", [0, 1, 2, 5])
def test_draft_tokens_are_never_much_slower_than_none(streams: int, wrong: int) -> None:
    plain, drafting = TimedHarness(None), TimedHarness(OracleDrafter(wrong))
    assert seconds(drafting, streams) < seconds(plain, streams) * 1.03


def test_right_draft_tokens_speed_up_small_and_large_batches() -> None:
    for streams, least in ((1, 2.3), (16, 1.1)):
        plain, drafting = TimedHarness(None), TimedHarness(OracleDrafter())
        assert seconds(plain, streams) / seconds(drafting, streams) > least


def test_a_full_batch_of_wrong_draft_tokens_hardly_pays_for_any() -> None:
    harness = TimedHarness(OracleDrafter(1))
    seconds(harness, 16)
    assert harness.drafted < 0.05 * harness.tokens


def test_drafts_use_cheap_rows_and_avoid_expensive_ones() -> None:
    free, dear = (TimedHarness(OracleDrafter(2), row_s) for row_s in (0.00001, 0.1))
    seconds(free, 8)
    seconds(dear, 8)
    assert free.drafted > 200
    assert dear.drafted < 40


def test_stale_row_costs_are_remeasured() -> None:
    costs = RowCosts()
    costs.expect(1, 0.010, 0.001)
    for _ in range(20):
        costs.observe(16, 0.500)
        costs.observe(1, 0.010)
    assert costs.seconds(16) > 0.4
    assert costs.seconds(1) == pytest.approx(0.010, rel=0.01)
    for _ in range(2000):
        costs.expect(1, 0.010, 0.001)
        costs.observe(1, 0.010)
    assert costs.seconds(16) < 0.04
    assert costs.curve(np.array([1, 12, 16, 5000])).tolist() == [costs.seconds(rows) for rows in (1, 12, 16, 5000)]


def test_steps_of_more_decodes_than_configured_draft_nothing() -> None:
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=4, disable_by_batch_size=3)
    control = DraftControl.of(config)
    streams = [sequence_of([1, 2, 3]) for _ in range(4)]
    scheduled = [ScheduledChunk(stream, 2, 1, 1) for stream in streams]
    control.observe(scheduled[:3], StepCost(), 0.0)
    assert control.shares(streams[:3], [9, 2, 0], 100) == [4, 2, 0]
    control.observe(scheduled, StepCost(), 0.0)
    assert control.shares(streams, [9] * 4, 100) == [0] * 4
    # A look-up is cheap; a draft model's passes are not, and their draft tokens would not be used.
    assert [stream for stream, _ in control.due_for_probe(streams, slow=False)] == streams
    assert control.due_for_probe(streams, slow=True) == []
    control.observe(scheduled[:3], StepCost(), 0.0)
    assert len(control.due_for_probe(streams[:3], slow=True)) == 1


def test_probes_of_a_slow_drafter_take_a_bounded_share_of_the_time() -> None:
    control = DraftControl(4)
    streams = [sequence_of([1, 2, 3]) for _ in range(16)]
    scheduled = [ScheduledChunk(stream, 2, 1, 1) for stream in streams]
    probes = 0
    for _ in range(3000):
        control.observe(scheduled, StepCost(), 0.001)
        due = control.due_for_probe(streams, slow=True)
        if due:
            # A probe may have to read a long prompt first.
            control.drafts_for(0, len(due))
            control.record_drafting(0.5)
            probes += len(due)
        control.stepped(StepPlan(), 0.040)
    assert probes > 1
    assert 0.5 * (probes - 1) <= MAX_PROBING_SHARE * 3000 * 0.040 + MAX_PROBING_CREDIT_S


def test_drafts_that_do_not_pay_count_as_probes_as_long_as_the_batch_is_as_full() -> None:
    control, streams = DraftControl(3), [sequence_of([1, 2, 3]) for _ in range(16)]
    for stream in streams:
        control.judged(stream, 3, 3)
    control.costs.expect(16, STEP_S + 16 * 0.0012, 0.0012)
    scheduled = [ScheduledChunk(stream, 2, 1, 1) for stream in streams]
    control.observe(scheduled, StepCost(), 0.0001)
    assert any(control.decide(streams, [3] * 16, 100))
    assert not control.pays([(streams[0], 1)])
    control.record_drafting(0.5)
    assert not any(control.decide(streams, [3] * 16, 100))
    control.observe(scheduled[:4], StepCost(), 0.0001)
    assert any(control.decide(streams[:4], [3] * 4, 100))


def count_decisions(monkeypatch: pytest.MonkeyPatch, harness: TimedHarness) -> list[int]:
    """Return a list that gets the decodes of each step for which drafts are decided."""
    seen: list[int] = []
    shares = harness.control.shares

    def counted(streams: list[Sequence], room: list[int], left: int) -> list[int]:
        seen.append(len(streams))
        return shares(streams, room, left)

    monkeypatch.setattr(harness.control, "shares", counted)
    return seen


def test_drafting_is_seldom_considered_for_a_full_batch_without_gain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter, length = CountingDrafter(1), 100
    harness = TimedHarness(drafter)
    decisions = count_decisions(monkeypatch, harness)
    for seed in range(16):
        harness.submit(prompt(seed % 4, 6), length, seed=seed)
    steps = harness.run_all()
    assert not harness.drafted
    # Each decision computes the shares twice: possible in this step, and possible at best.
    assert len(decisions) < 2 * steps / 3
    assert drafter.asked < 16 * length / 16 / 2


@pytest.mark.parametrize(("found", "tokens"), [(1, 1), (16, 4)])
def test_matches_are_drafted_if_enough_of_them_pay(found: int, tokens: int) -> None:
    """Streams look alike until the drafter counts those with a match."""

    class KnowsSome(OracleDrafter):
        def draft(self, wanted: list[tuple[Sequence, int]]) -> list[Int32]:
            return [np.full(most if place < found else 0, 7, np.int32) for place, (_, most) in enumerate(wanted)]

    control, streams = DraftControl(3), [sequence_of([1, 2, 3]) for _ in range(16)]
    for stream in streams:
        control.judged(stream, 3, 3)
        stream.compute(0, 2, 0.0)
    control.costs.expect(16, STEP_S + 16 * 0.0012, 0.0012)
    scheduled = speculate(KnowsSome(), control, StepCost(), [ScheduledChunk(one, 2, 1, 1) for one in streams], 100)
    assert max(chunk.count for chunk in scheduled) == tokens
    if found == 1:
        made, right = streams[0].draft_tokens.pop_probe(np.array([1, 2, 3, 7, 7, 7], np.int32))
        assert made == right > 0


def test_drafting_is_considered_at_once_if_a_batch_shrinks() -> None:
    harness = TimedHarness(OracleDrafter())
    control = harness.control
    harness.submit(prompt(1, 6), 200)
    for seed in range(15):
        harness.submit(prompt(seed % 4, 6), 30, seed=seed)
    control.shares = lambda streams, room, left: [0] * len(streams)  # type: ignore[method-assign]
    while len(harness.scheduler.sequences) > 1:
        harness.step()
        while harness.answer():
            pass
    assert not harness.drafted
    del control.shares
    harness.step()
    harness.step()
    assert harness.drafted
    harness.run_all()


def test_the_stream_with_likelier_drafts_gets_the_spare_tokens() -> None:
    control = DraftControl(4)
    good, bad = sequence_of([1, 2, 3]), sequence_of([4, 5, 6])
    control.observe([ScheduledChunk(one, 2, 1, 1) for one in (good, bad)], StepCost(), 0.0)
    for _ in range(5):
        control.judged(good, 4, 4)
        control.judged(bad, 4, 1)
    assert control.shares([bad, good], [9, 9], 5) == [1, 4]


def test_acceptance_is_measured_only_at_reached_positions() -> None:
    acceptance = Acceptance(STREAM_FADING)
    for _ in range(50):
        acceptance.record(4, 2)
    first, second, third, fourth = acceptance.rates(0.5, 1.0)[:4]
    assert first == second > 0.9
    assert third < 0.1
    assert fourth == 0.5, "nobody ever got there"
    assert acceptance.mean_rate(0.5, 1.0) == pytest.approx(2 / 3, abs=0.02)
    acceptance.record(1, 1)
    assert acceptance.rates(0.5, 1.0)[0] >= first


class DearRows(StepCost):
    """A machine on which a row costs as much as a step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 1

    def predict(self, found: object) -> float:
        return 1.0

    def row_seconds(self, context: float) -> float:
        return 1.0


def test_draftable_texts_are_detected_without_verification() -> None:
    """Probes measure what drafts would have brought, without verifying any draft token."""
    for wrong, least, most in ((0, 0.9, 1.0), (1, 0.0, 0.1)):
        control, stream = DraftControl(4), sequence_of(prompt(1, 9))
        for token in answer(prompt(1, 9), 0, 50):
            stream.compute(stream.num_tokens - 1, stream.num_tokens - 1, 0.0)
            stream.append(token)
            (chunk,) = speculate(
                OracleDrafter(wrong), control, DearRows(), [ScheduledChunk(stream, stream.num_tokens - 1, 1, 1)], 100
            )
            assert chunk.count == 1
        assert least <= stream.draft_tokens.chances[0] <= most
