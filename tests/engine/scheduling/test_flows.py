"""Tenants' shares of a worker: order, preemption, no saving up, no starvation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.engine.scheduling import queues as queues_module
from pillion.rules.priority import (
    MAX_PRIORITY,
    MAX_WEIGHT,
    MIN_FLOW_WEIGHT,
    OUTPUT_COST,
    PRIORITY_AGING_S,
    bounded_flow,
)
from tests.support.ahead_harness import AheadHarness
from tests.support.examples import examples
from tests.support.scheduler_harness import FLOWS, SchedulerHarness, prompt

NOBODY, ONE, THREE, HALF = range(4)
MakeHarness = Callable[..., SchedulerHarness]
EITHER_WAY = pytest.mark.parametrize("make", [SchedulerHarness, AheadHarness])


def steps(harness: SchedulerHarness, count: int) -> None:
    for _ in range(count):
        harness.answered_step()


def started(harness: SchedulerHarness, ids: Iterable[int | None]) -> int:
    return sum(bool(harness.records[seq_id].token_ids) for seq_id in ids if seq_id is not None)


def ended(harness: SchedulerHarness, ids: Iterable[int | None]) -> int:
    return sum(harness.records[seq_id].end is not None for seq_id in ids if seq_id is not None)


@EITHER_WAY
def test_a_lone_request_does_not_wait_for_a_flood(make: MakeHarness) -> None:
    harness = make(slots=400, budget=32, max_num_seqs=4)
    crowd = harness.flood(ONE, 12)
    steps(harness, 10)
    for number in range(3):
        lone = harness.submit(prompt(9, 6), 5, flow=THREE)
        assert lone is not None
        # The next step has its prompt; if steps run ahead, it lands with the one after it.
        steps(harness, 2)
        assert harness.records[lone].token_ids, f"request {number} had no token"
        while not ended(harness, [lone]):
            steps(harness, 1)
    assert (started(harness, crowd), ended(harness, crowd)) == (4, 0)
    harness.finish()
    harness.check_answers()
    assert harness.preemptions == 0, "a place was taken with its memory"


def test_a_yielding_sequence_recomputes_nothing() -> None:
    harness = SchedulerHarness(slots=400, budget=32, max_num_seqs=4)
    crowd = harness.flood(ONE, 4, tokens=20)
    steps(harness, 5)
    computed = sum(harness.scheduler.sequences[seq_id].num_computed for seq_id in crowd)
    harness.submit(prompt(9, 6), 5, flow=THREE)
    waited: Counter[int] = Counter()
    while harness.scheduler.sequences:
        computed += harness.answered_step().num_tokens
        waited.update(s.seq_id for s in harness.scheduler.queues.preempted)
    assert waited == {crowd[-1]: 5}, "the newest one, as long as the other has its place"
    assert computed == sum(len(one.prompt) + len(one.token_ids) - 1 for one in harness.records.values())
    harness.check_answers()


def test_the_least_urgent_sequence_yields() -> None:
    harness = SchedulerHarness(slots=400, budget=32, max_num_seqs=3)
    patient, *_ = harness.flood(ONE, 1, priority=2), harness.flood(ONE, 2)
    steps(harness, 5)
    harness.submit(prompt(9, 6), 5, flow=THREE)
    steps(harness, 1)
    assert [s.seq_id for s in harness.scheduler.queues.preempted] == patient
    harness.finish()
    harness.check_answers()


@EITHER_WAY
def test_a_tenants_only_running_sequence_does_not_yield(make: MakeHarness) -> None:
    harness = make(slots=400, budget=64, max_num_seqs=2)
    one, half = harness.flood(ONE, 5, tokens=45), harness.flood(HALF, 1, tokens=30)
    steps(harness, 4)
    assert (started(harness, one), started(harness, half)) == (1, 1)
    late = harness.flood(THREE, 1)
    while not started(harness, late):
        steps(harness, 1)
    assert ended(harness, [*one, *half]) == 1, "it waits for one answer, and for no second one"
    harness.finish()
    harness.check_answers()


def test_background_requests_displace_no_sequence() -> None:
    harness = SchedulerHarness(slots=400, budget=64, max_num_seqs=3)
    crowd = harness.flood(ONE, 6, tokens=20)
    steps(harness, 3)
    hidden = harness.flood(THREE, 1, priority=MAX_PRIORITY)
    while not started(harness, hidden):
        steps(harness, 1)
    assert started(harness, crowd) == 6, "it has its turn after all that is usual"
    harness.finish()


@EITHER_WAY
def test_background_sequences_yield_first(make: MakeHarness) -> None:
    """Before tenants that had more, and even if it is the only one of its tenant."""
    harness = make(slots=400, budget=64, max_num_seqs=3)
    crowd = harness.flood(ONE, 2, tokens=40)
    steps(harness, 20)
    hidden = harness.flood(HALF, 1, tokens=40, priority=MAX_PRIORITY)
    steps(harness, 2)
    assert started(harness, [*crowd, *hidden]) == 3
    lone = harness.flood(THREE, 1, tokens=4)
    steps(harness, 2)
    assert started(harness, lone) == 1
    assert [s.seq_id for s in harness.scheduler.queues.preempted] == hidden
    harness.finish()
    harness.check_answers()


def served(harness: SchedulerHarness, owners: dict[int, int]) -> Counter[int]:
    """Return the tokens charged to each flow; no prompt is cached."""
    found: Counter[int] = Counter()
    for seq_id, flow in owners.items():
        sequence, record = harness.scheduler.sequences.get(seq_id), harness.records[seq_id]
        computed = len(record.prompt) if sequence is None else min(sequence.next_start, len(record.prompt))
        found[flow] += computed + OUTPUT_COST * len(record.token_ids)
    return found


@EITHER_WAY
def test_weights_are_shares_within_five_percent(make: MakeHarness) -> None:
    """Each tenant sends a request as soon as an answer has ended; the heavy one's answers are longer."""
    harness = make(slots=300, budget=64, max_num_seqs=6)
    owners: dict[int, int] = {}
    for number in range(600):
        for flow, tokens in ((ONE, 12), (THREE, 18)):
            alive = sum(harness.records[i].end is None for i, owner in owners.items() if owner == flow)
            for _ in range(9 - alive):
                text = [len(owners) % 97, len(owners) // 97, *prompt(flow, 4 + number % 5)]
                seq_id = harness.submit(text, tokens, flow=flow)
                assert seq_id is not None
                owners[seq_id] = flow
        harness.answered_step()
        if number == 100:
            before = served(harness, owners)
    found = served(harness, owners)
    found.subtract(before)
    assert found[THREE] / found[ONE] == pytest.approx(3, rel=0.05)
    harness.finish()


def test_idle_and_light_tenants_accumulate_no_credit() -> None:
    harness = SchedulerHarness(slots=800, budget=64, max_num_seqs=4)
    crowd = harness.flood(ONE, 40, tokens=16)
    half = []
    for _ in range(60):
        if not half or ended(harness, half[-1:]):
            half.append(harness.submit([len(half), *prompt(7, 5)], 10, flow=HALF))
        steps(harness, 1)
    # The tenant that sent single requests now floods too, and gets only its share of new ones.
    before = started(harness, crowd)
    owners = dict.fromkeys(harness.flood(HALF, 40, tokens=16), HALF) | dict.fromkeys(crowd, ONE)
    start = served(harness, owners)
    while started(harness, crowd) < before + 20:
        steps(harness, 1)
    found = served(harness, owners)
    found.subtract(start)
    assert found[ONE] / found[HALF] == pytest.approx(2, rel=0.25)
    harness.finish()


def test_another_tenants_prompt_runs_before_the_rest_of_a_started_one() -> None:
    harness = SchedulerHarness(slots=400, budget=8, max_num_seqs=4)
    long = harness.submit(prompt(1, 100), 2, flow=ONE)
    steps(harness, 1)
    short = harness.submit(prompt(2, 5), 2, flow=THREE)
    assert [chunk.sequence.seq_id for chunk in harness.answered_step().scheduled] == [short, long]
    harness.finish()


def test_shares_count_before_the_priority_within_a_tenant() -> None:
    harness = SchedulerHarness(slots=400, budget=8, max_num_seqs=8)
    patient = harness.submit(prompt(1, 20), 2, flow=ONE, priority=5)
    usual = harness.submit(prompt(2, 20), 2, flow=ONE)
    other = harness.submit(prompt(3, 20), 2, flow=THREE, priority=9)
    order: list[int] = []
    while harness.scheduler.sequences:
        order += [chunk.sequence.seq_id for chunk in harness.answered_step().scheduled]
    assert list(dict.fromkeys(order)) == [usual, other, patient]


def test_raised_priority_goes_before_other_tenants() -> None:
    """Tenants need permission for that. Aging applies as everywhere: early requests go first."""
    for early_s, first in ((0.0, "urgent"), (PRIORITY_AGING_S + 1, "usual")):
        harness = SchedulerHarness(slots=400, budget=8, max_num_seqs=8)
        # The urgent request's tenant has had more.
        harness.submit(prompt(9, 30), 40, flow=ONE)
        steps(harness, 5)
        usual = harness.submit(prompt(2, 20), 2, flow=THREE)
        harness.now += early_s
        urgent = harness.submit(prompt(1, 20), 2, flow=ONE, priority=-1)
        tails = [chunk.sequence.seq_id for chunk in harness.answered_step().scheduled if not chunk.sequence.decoding]
        assert tails == [urgent if first == "urgent" else usual]
        harness.finish()


def test_the_most_served_tenant_is_preempted() -> None:
    harness = SchedulerHarness(slots=24, budget=32, max_num_seqs=4)
    harness.flood(ONE, 3, tokens=40)
    steps(harness, 12)
    lone = harness.submit(prompt(9, 5), 40, flow=THREE)
    assert lone is not None, "there is no room: the scene shows nothing"
    harness.finish()
    assert harness.preemptions
    end = harness.records[lone].end
    assert end is not None
    assert end.progress is not None
    assert end.progress.preemptions == 0
    harness.check_answers()


def test_answers_to_one_prompt_are_charged_for_it_once() -> None:
    harness = SchedulerHarness(slots=400, budget=32, max_num_seqs=8)
    harness.submit(prompt(1, 10), 6, flow=ONE, parallel_seeds=(1, 2))
    # Another request keeps the account of the first.
    harness.submit(prompt(2, 5), 60, flow=THREE)
    flows = harness.scheduler.queues.flows
    while FLOWS[ONE].key in flows.accounts:
        steps(harness, 1)
    assert flows.absent[FLOWS[ONE].key] == 10 + OUTPUT_COST * 3 * 6
    harness.finish()
    assert not flows.absent, "an idle worker remembers nobody"


def test_remembered_idle_flows_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues_module, "MAX_ABSENT_FLOWS", 1)
    harness = SchedulerHarness(slots=400, budget=32, max_num_seqs=8)
    harness.submit(prompt(2, 5), 60, flow=THREE)
    harness.submit(prompt(1, 6), 8, flow=ONE)
    harness.submit(prompt(1, 6), 4, flow=HALF)
    flows = harness.scheduler.queues.flows
    while flows.several:
        steps(harness, 1)
    assert flows.absent.keys() == {FLOWS[HALF].key}, "the one that is furthest ahead is remembered"
    harness.finish()


@pytest.mark.parametrize(
    ("weight", "counted"),
    [(2.0, 2.0), (0.0, 1.0), (-1.0, 1.0), (float("nan"), 1.0), (float("inf"), MAX_WEIGHT), (1e-300, MIN_FLOW_WEIGHT)],
)
def test_a_weight_is_bounded(weight: float, counted: float) -> None:
    assert bounded_flow(b"k", weight) == (b"k", counted)


@settings(max_examples=examples(40))
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(0, 3)), min_size=4, max_size=24),
    st.integers(1, 4),
    st.integers(4, 24),
)
def test_a_single_tenant_gets_the_same_steps_as_none(
    asked: list[tuple[int, int, int]], max_num_seqs: int, budget: int
) -> None:
    """Every step has the same chunks with and without a tenant's name."""
    plans = []
    for flow in (NOBODY, THREE):
        harness = SchedulerHarness(slots=60, budget=budget, max_num_seqs=max_num_seqs, token_s=0.005)
        found = []
        for length, tokens, count in asked:
            harness.submit(prompt(length, length), tokens, flow=flow, priority=length % 3 - 1)
            for _ in range(count):
                plan = harness.answered_step()
                found.append([(chunk.sequence.seq_id, chunk.start, chunk.count) for chunk in plan.scheduled])
        plans.append(found)
        harness.finish()
    assert plans[0] == plans[1]


@settings(max_examples=examples(40))
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(0, 3)), min_size=8, max_size=40),
    st.integers(1, 4),
    st.integers(4, 24),
    st.booleans(),
)
def test_the_least_served_flow_starts_next(
    asked: list[tuple[int, int, int]], max_num_seqs: int, budget: int, ahead: bool
) -> None:
    """No other waiting flow is behind a starting sequence's flow by more than its step's prompt tokens."""
    make = AheadHarness if ahead else SchedulerHarness
    harness = make(slots=600, budget=budget, max_num_seqs=max_num_seqs)
    for length, tokens, flow in asked:
        harness.submit(prompt(length, length), tokens, flow=flow)
    queues = harness.scheduler.queues
    while harness.scheduler.sequences:
        counters = queues.flows.counters([*queues.running, *queues.preempted])
        waiting = {s.flow.key for s in queues.waiting}
        was_waiting = {s.seq_id for s in queues.waiting}
        lacked = {s.seq_id: s.left_to_compute for s in queues if not s.decoding}
        scheduled = harness.answered_step().scheduled
        largest = sum(lacked.get(p.sequence.seq_id, 0) / p.sequence.flow.weight for p in scheduled)
        for sequence in (chunk.sequence for chunk in scheduled if chunk.sequence.seq_id in was_waiting):
            left = waiting & {s.flow.key for s in queues.waiting}
            assert all(counters[sequence.flow.key] <= counters[key] + largest for key in left)
    harness.finish()
    harness.check_answers()
