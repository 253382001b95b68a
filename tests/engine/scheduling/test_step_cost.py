"""The cost model learns a machine's costs from its steps and follows changes; the budget keeps to a target."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.engine.scheduling.block_manager import BlockManager
from pillion.engine.scheduling.scheduler import Scheduler
from pillion.engine.scheduling.step_cost import (
    AUTO_TARGET_STEPS,
    FADING,
    FIRST_STEP_TOKENS,
    INERTIA,
    MAX_SURPRISE,
    RECENT_STEPS,
    SCALES,
    StepCost,
    TokenBudget,
    features,
)
from pillion.engine.scheduling.step_model import (
    BACKLOG_WEIGHT,
    MAX_QUEUE_STEPS,
    MIN_TAIL_TOKENS,
    MIN_THROUGHPUT,
    QUEUE_S,
    QUEUE_STEP_TOKENS,
    StepModel,
    seconds_beside,
    seconds_for_queue,
)
from pillion.engine.scheduling.step_plan import ScheduledChunk, StepPlan
from pillion.kernels.step import Sampled
from pillion.rules.priority import MAX_PRIORITY
from tests.support.examples import examples
from tests.support.scheduler_harness import SchedulerHarness, prompt


@dataclass
class SimulatedMachine:
    """Computes the true seconds of a step from its chunks."""

    constant: float = 4e-3
    per_token: float = 1e-4
    per_read: float = 2e-8
    per_pair: float = 1e-9
    slow: float = 1.0

    def seconds(self, scheduled: list[ScheduledChunk]) -> float:
        tokens = sum(chunk.count for chunk in scheduled)
        reads = sum(chunk.start + chunk.count for chunk in scheduled)
        pairs = sum(chunk.count * (chunk.start + chunk.count / 2) for chunk in scheduled)
        work = self.constant + self.per_token * tokens + self.per_read * reads + self.per_pair * pairs
        return self.slow * work


def decodes(count: int, context: int) -> list[ScheduledChunk]:
    return [ScheduledChunk(None, context, 1, 1) for _ in range(count)]  # type: ignore[arg-type]


def chunk(start: int, count: int) -> ScheduledChunk:
    return ScheduledChunk(None, start, count, 0)  # type: ignore[arg-type]


def run(
    budget: TokenBudget,
    machine: SimulatedMachine,
    scheduled: list[ScheduledChunk],
    start: int,
    steps: int,
    noise: float = 0.0,
) -> list[float]:
    """Run steps of these decodes beside an endless prompt tail at ``start``; return their durations."""
    random, found = np.random.default_rng(7), []
    for now in itertools.islice(itertools.count(), steps):
        plan = [*scheduled, chunk(start, budget.room(scheduled, start).at(start))]
        seconds = machine.seconds(plan) * float(1 + noise * random.standard_normal())
        budget.begin(plan, float(now))
        budget.end(now + seconds)
        found.append(seconds)
    return found


def test_the_fit_recovers_the_simulated_machine() -> None:
    model, machine, random = StepCost(), SimulatedMachine(), np.random.default_rng(3)
    for _ in range(60):
        scheduled = [*decodes(int(random.integers(1, 60)), int(random.integers(1, 8000)))]
        scheduled += [chunk(int(random.integers(0, 30_000)), int(random.integers(1, 256)))] * int(random.integers(0, 2))
        model.observe(features(scheduled), machine.seconds(scheduled))
    for scheduled in (decodes(16, 300), [*decodes(8, 4000), chunk(20_000, 128)], [chunk(0, 256)]):
        assert model.predict(features(scheduled)) == pytest.approx(machine.seconds(scheduled), rel=0.3)


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_budget_meets_the_target(noise: float) -> None:
    found = run(TokenBudget(2048, 0.030), SimulatedMachine(), decodes(16, 500), 4000, 60, noise)
    assert np.median(found[10:]) == pytest.approx(0.030, rel=0.1)


@pytest.mark.parametrize(("tokens", "start"), [(10, 20_000), (40, 4000), (100, 0), (1, 60_000)])
def test_the_seconds_of_a_step_hold_all_its_prompt_tails(tokens: int, start: int) -> None:
    """A short prompt comes first; the rest goes to a later one with more expensive tokens."""
    budget, machine = TokenBudget(2048, 0.030), SimulatedMachine()
    for at in (0, 4000, 60_000):
        run(budget, machine, decodes(16, 500), at, 40)
    room = budget.room(decodes(16, 500), 0, 2)
    assert room.at(0) > tokens
    room.take(0, tokens)
    count = room.at(start)
    seconds = machine.seconds([*decodes(16, 500), chunk(0, tokens), chunk(start, count)])
    assert 0.027 <= seconds <= 0.033 or count == MIN_TAIL_TOKENS - tokens
    room.take(start, count)
    assert room.at(start) == 0


def test_unmeasured_late_chunks_are_priced_by_the_models_shape() -> None:
    """Only short prompts came so far, then the end of a long one."""
    machine, target_s, late = SimulatedMachine(per_pair=2.6e-8), 0.050, {}
    for pair_tokens in (0.0, 2.6e-4):
        budget = TokenBudget(2048, target_s, pair_tokens=pair_tokens)
        run(budget, machine, decodes(8, 200), 0, 30)
        late[pair_tokens] = run(budget, machine, decodes(8, 200), 3000, 3)
    assert max(late[0.0]) > 1.2 * target_s
    assert max(late[2.6e-4]) <= 1.1 * target_s


def test_measurements_override_the_models_shape() -> None:
    """Attention is three times as slow as the shape says, or free."""
    for per_pair in (7.8e-8, 0.0):
        budget, machine = TokenBudget(2048, 0.050, pair_tokens=2.6e-4), SimulatedMachine(per_pair=per_pair)
        for at in (0, 3000):
            run(budget, machine, decodes(8, 200), at, 30)
        scheduled = [*decodes(8, 200), chunk(3000, 100)]
        assert budget.cost.predict(features(scheduled)) == pytest.approx(machine.seconds(scheduled), rel=0.1)


def test_late_steps_have_a_minimum_of_prompt_tail_tokens() -> None:
    budget = TokenBudget(256, 0.001)
    run(budget, SimulatedMachine(), decodes(16, 500), 0, 10)
    room = budget.room(decodes(16, 500), 0, 3)
    for count in (1, 5, MIN_TAIL_TOKENS - 6):
        assert room.at(3000) >= count
        room.take(3000, count)
    assert room.at(0) == 0


def test_the_budget_reacts_within_a_few_steps() -> None:
    budget, machine = TokenBudget(2048, 0.030), SimulatedMachine()
    run(budget, machine, decodes(16, 500), 4000, 30)
    # The machine slows down by half, for instance because of other programs.
    machine.slow = 2.0
    late = run(budget, machine, decodes(16, 500), 4000, 12)
    assert max(late[3:]) <= 0.036
    machine.slow = 1.0
    run(budget, machine, decodes(16, 500), 4000, 20)
    late = run(budget, machine, decodes(16, 8000), 120_000, 12)
    assert max(late[3:]) <= 0.036
    late = run(budget, machine, decodes(4, 100), 0, 20)
    assert np.median(late[10:]) == pytest.approx(0.030, rel=0.1)


def test_a_single_slow_step_is_ignored() -> None:
    budget, machine = TokenBudget(2048, 0.030), SimulatedMachine()
    run(budget, machine, decodes(16, 500), 4000, 30)
    before = budget.room(decodes(16, 500), 4000).at(4000)
    plan = [*decodes(16, 500), chunk(4000, before)]
    budget.begin(plan, 0.0)
    budget.end(3.0)
    run(budget, machine, decodes(16, 500), 4000, 8)
    assert budget.room(decodes(16, 500), 4000).at(4000) >= 0.7 * before


def test_a_target_that_cannot_be_met_still_serves_prompt_tails() -> None:
    budget = TokenBudget(256, 0.001)
    found = run(budget, SimulatedMachine(), decodes(16, 500), 0, 10)
    assert budget.room(decodes(16, 500), 0).at(0) == MIN_TAIL_TOKENS
    assert found[-1] > 0.001
    # The hard limit wins: decodes leave nothing for the prompt tail.
    assert budget.room(decodes(250, 500), 0).at(0) == 6


def test_the_hard_limit_holds() -> None:
    assert run(TokenBudget(64, 10.0), SimulatedMachine(), decodes(16, 500), 0, 10)[-1] < 0.02
    assert TokenBudget(64, 10.0).room(decodes(16, 500), 0).at(0) == 48


def test_without_a_target_the_budget_is_constant() -> None:
    budget = TokenBudget(64)
    run(budget, SimulatedMachine(slow=100.0), decodes(16, 500), 0, 5)
    assert budget.room(decodes(16, 500), 0).at(0) == 48


def test_costs_for_the_planner_remember_chunks() -> None:
    """The planner still knows a token's cost long after the last chunk, with or without a target."""
    budget, machine = TokenBudget(256), SimulatedMachine()
    assert budget.cost.weights_s() == ()
    for start in range(0, 4000, 200):
        run(budget, machine, decodes(4, 500), start, 1)
    chunk_s = budget.cost.predict(features([*decodes(4, 500), chunk(2000, 252)]))
    for _ in range(300):
        budget.begin(decodes(4, 500), 0.0)
        budget.end(machine.seconds(decodes(4, 500)))
    assert budget.cost.predict(features([*decodes(4, 500), chunk(2000, 252)])) == pytest.approx(chunk_s, rel=0.25)
    assert budget.largest_step_tokens == 256
    assert len(budget.cost.weights_s()) == 5


def test_borrowed_cores_change_the_budget_but_not_the_planners_costs() -> None:
    """Half of the steps have twice the cores. The fit is for own cores; the budget follows the current ones."""
    machine, target_s = SimulatedMachine(), 0.020
    own, lent = TokenBudget(2048, target_s), TokenBudget(2048, target_s)
    for budget in (own, lent):
        for number, (count, tokens) in enumerate(itertools.product((1, 4, 16) * 3, (0, 16, 64, 200))):
            scheduled = [*decodes(count, 500), *([chunk(500, tokens)] if tokens else [])]
            for _ in range(4):
                seconds = machine.seconds(scheduled)
                borrowed_s = seconds / 2 if budget is lent and number % 2 else 0.0
                budget.begin(scheduled, 0.0)
                budget.end(seconds - borrowed_s, borrowed_s)
    assert lent.cost.weights_s() == pytest.approx(own.cost.weights_s())
    beside = decodes(4, 500)
    assert lent.cost.predict(features(beside)) == pytest.approx(own.cost.predict(features(beside)) / 2)
    assert lent.room(beside, 500).at(500) > 1.5 * own.room(beside, 500).at(500)


def test_scored_rows_do_not_affect_the_fit() -> None:
    """Each scored token has a row of logits, far more expensive than a prompt token without one."""
    machine, budget = SimulatedMachine(), TokenBudget(256, 0.05)
    trained(machine, budget, (500,))
    before = budget.cost.weights_s(), budget.room(decodes(4, 500), 500).at(500)
    for _ in range(20):
        scheduled = [*decodes(4, 500), replace(chunk(0, 100), scores=100)]
        budget.begin(scheduled, 0.0)
        budget.end(machine.seconds(scheduled) + 100 * 2e-3)
    assert (budget.cost.weights_s(), budget.room(decodes(4, 500), 500).at(500)) == before


def test_rare_chunks_do_not_overshoot_the_target() -> None:
    """A decode worker that rarely sees a chunk, on a machine for which a fourth stream costs next to nothing: neither
    its first chunk nor one after many plain steps overshoots its target of 100 ms."""
    budget, machine = (
        TokenBudget(256, 0.1),
        SimulatedMachine(constant=9.5e-3, per_token=1.05e-3, per_read=7.5e-7, per_pair=2.9e-7),
    )
    random, prompt_tails = np.random.default_rng(1), []

    def step(scheduled: list[ScheduledChunk]) -> float:
        streams = sum(chunk.samples for chunk in scheduled)
        seconds = machine.seconds(scheduled) - machine.per_token * min(streams, 4) + 3e-4 * streams
        budget.begin(scheduled, 0.0)
        budget.end(seconds * float(random.normal(1.0, 0.03)))
        return seconds

    for tokens in (60, 60, 150, 2000, 60, 150) * 3:
        for _ in range(100):
            step(decodes(int(random.choice([1, 2, 3, 4, 8])), 300))
        beside, start = decodes(int(random.choice([1, 4, 8, 16])), 400), 0
        while start < tokens:
            count = min(budget.room(beside, start).at(start), tokens - start)
            prompt_tails.append(step([*beside, chunk(start, count)]))
            start += count
    assert max(prompt_tails) < 0.120
    assert np.median(prompt_tails) > 0.080


def test_the_scheduler_meets_the_itl_target() -> None:
    """A prompt tail of 600 tokens beside a decode: its chunks shrink until a step takes 20 ms by its clock."""
    harness = SchedulerHarness(slots=400, budget=256, max_num_seqs=4)
    harness.scheduler = Scheduler(
        blocks=BlockManager(4), max_num_batched_tokens=256, max_num_seqs=4, target_itl_s=0.020
    )
    harness.submit(prompt(1, 8), 60)
    harness.submit(prompt(2, 600), 4)
    counts = []
    while harness.scheduler.sequences:
        harness.now += 0.001
        plan: StepPlan = harness.scheduler.schedule(harness.now)
        sampled: Sampled = harness.run_plan(plan)
        harness.now += SimulatedMachine(per_token=2e-4).seconds(list(plan.scheduled))
        harness.receive(harness.scheduler.commit(plan, sampled, harness.now))
        while harness.answer():
            pass
        harness.receive_flush()
        counts.append(plan.num_tokens)
    assert max(counts[1:]) <= 110
    assert 60 <= counts[3] <= 100
    harness.settle()
    harness.check_answers()


COSTS = st.fixed_dictionaries(
    {
        "constant": st.floats(1e-3, 4e-2),
        "per_token": st.floats(5e-5, 3e-3),
        "per_read": st.floats(0, 1e-7),
        "per_pair": st.floats(0, 2e-9),
    }
)


def trained(machine: SimulatedMachine, budget: TokenBudget, contexts: tuple[int, ...]) -> None:
    """Train a budget on its machine: steps with and without prompt tails, of all sizes."""
    for count, context, tokens in itertools.product((1, 4, 16), contexts, (0, 16, 64, 200)):
        scheduled = [*decodes(count, context), *([chunk(context, tokens)] if tokens else [])]
        for _ in range(3):
            budget.begin(scheduled, 0.0)
            budget.end(machine.seconds(scheduled))


@given(cost=COSTS, streams=st.integers(6, 32), context=st.sampled_from([100, 500, 2000]))
@settings(max_examples=examples(60))
def test_auto_limits_gaps_to_a_multiple_of_plain_steps(cost: dict[str, float], streams: int, context: int) -> None:
    """On fast and slow machines, without waiting prompts."""
    machine, budget = SimulatedMachine(**cost), TokenBudget(256, target_steps=AUTO_TARGET_STEPS)
    trained(machine, budget, (context,))
    plain = decodes(streams, context)
    count = budget.room(plain, context, 1).at(context)
    limit = AUTO_TARGET_STEPS * budget.cost.predict(features(plain))
    found = budget.cost.predict(features([*plain, chunk(context, count)]))
    assert found <= limit * 1.001 or count == min(MIN_TAIL_TOKENS, 256 - streams)
    assert count == 256 - streams or budget.cost.predict(features([*plain, chunk(context, count + 1)])) > limit * 0.999


@given(
    plain_s=st.floats(1e-3, 0.1),
    fixed_share=st.floats(0.01, 1.0),
    streams=st.integers(1, 64),
    waiting=st.floats(1, 100),
    more=st.floats(0, 10),
)
@settings(max_examples=examples(300))
def test_step_time_is_shared_between_prompts_and_streams(
    plain_s: float, fixed_share: float, streams: int, waiting: float, more: float
) -> None:
    """A step is as long as the waiters' shares make it, between the target and the length needed for throughput; it
    grows with the queue, without jumps."""

    def step_s(prompts: float) -> float:
        return seconds_beside(plain_s, AUTO_TARGET_STEPS, prompts, streams, fixed_s, longest_s)

    fixed_s, longest_s = fixed_share * plain_s, 100 * plain_s
    target_s, found = AUTO_TARGET_STEPS * plain_s, step_s(waiting)
    most_s = max(target_s, fixed_s / (1 - MIN_THROUGHPUT * (1 - fixed_s / longest_s)))
    assert target_s <= found <= most_s
    if target_s < found < most_s:
        assert (found - plain_s) / plain_s == pytest.approx(BACKLOG_WEIGHT * (waiting - 0.5) / streams)
    assert 0 <= step_s(waiting + more) - found <= BACKLOG_WEIGHT * more / streams * plain_s * (1 + 1e-9) + 1e-12
    # Nothing is gained if steps have no fixed cost.
    assert seconds_beside(plain_s, AUTO_TARGET_STEPS, waiting, streams, 0.0, longest_s) == target_s


@given(
    plain_s=st.floats(1e-3, 0.1),
    longest_s=st.floats(1e-3, 1.0),
    queue_s=st.floats(0, 20),
    more_s=st.floats(0, 5),
)
@settings(max_examples=examples(300))
def test_steps_grow_with_the_queue(plain_s: float, longest_s: float, queue_s: float, more_s: float) -> None:
    """Proportionally and smoothly, so that steps do not oscillate, and within both limits."""

    def step_s(queue_s: float) -> float:
        return seconds_for_queue(plain_s, AUTO_TARGET_STEPS, queue_s, longest_s)

    target_s, found = AUTO_TARGET_STEPS * plain_s, step_s(queue_s)
    most_s = min(MAX_QUEUE_STEPS * plain_s, longest_s)
    assert found == pytest.approx(min(target_s * queue_s / QUEUE_S, most_s))
    assert step_s(0.0) == 0.0
    assert 0 <= step_s(queue_s + more_s) - found <= target_s * more_s / QUEUE_S * (1 + 1e-9) + 1e-12


TAILS = st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 4000)), max_size=20)


@given(tails=TAILS, more=st.tuples(st.integers(0, 4000), st.integers(1, 4000)))
@settings(max_examples=examples(100))
def test_the_longest_prompt_is_in_no_queue(tails: list[tuple[int, int]], more: tuple[int, int]) -> None:
    model = StepModel(5e-3, 6e-4, 2e-4, 3e-7, 2e-7)
    line = [(start, start + count) for start, count in tails]
    added = (more[0], sum(more))
    assert model.queue_s(line[:1]) == 0.0
    assert model.queue_s([*line, added]) >= model.queue_s(line) - 1e-9
    if line:
        # The added prompt's length does not count, only the waiting ones.
        assert model.queue_s([*line, (0, 1_000_000)]) == pytest.approx(
            sum(model.queue_s([one, (0, 10**6)]) for one in line)
        )


@pytest.mark.parametrize("budget_tokens", [256, 8192])
def test_a_queue_lengthens_steps_until_it_is_gone(budget_tokens: int) -> None:
    machine, budget = SimulatedMachine(), TokenBudget(budget_tokens, target_steps=AUTO_TARGET_STEPS)
    trained(machine, budget, (500,))
    plain = decodes(16, 500)
    for _ in range(8):
        run(budget, machine, [*plain, chunk(0, budget_tokens - 16)], 500, 1)
    plain_s = budget.cost.predict(features(plain))

    def step_s(line: list[tuple[int, int]]) -> float:
        count = budget.room(plain, 0, 1, queue=line).at(0)
        return budget.cost.predict(features([*plain, chunk(0, count)]))

    long, short = [(0, 60_000)], [(0, 1000)] * 200
    target_s = AUTO_TARGET_STEPS * plain_s
    most_s = budget.cost.predict(features([*plain, chunk(0, min(budget_tokens - 16, QUEUE_STEP_TOKENS))]))
    assert step_s(long) == pytest.approx(target_s, rel=0.02)
    assert step_s(short) == pytest.approx(min(MAX_QUEUE_STEPS * plain_s, most_s), rel=0.02)
    assert step_s([]) == pytest.approx(target_s, rel=0.02)


@pytest.mark.parametrize(("flow", "priority"), [(1, 0), (2, 0), (1, MAX_PRIORITY)])
def test_only_a_queue_of_the_same_tenant_lengthens_steps(flow: int, priority: int) -> None:
    """Sixteen streams of a tenant; then a long prompt, many short ones, and a long one again."""
    harness = SchedulerHarness(slots=3000, budget=400, max_num_seqs=64)
    scheduler = harness.scheduler
    scheduler.budget.target_steps = AUTO_TARGET_STEPS

    def step() -> float:
        """Run a step; return its tokens beyond those of its decodes."""
        plan = scheduler.schedule(harness.now)
        decodes = sum(chunk.sequence.decoding for chunk in plan.scheduled)
        sampled = harness.run_plan(plan)
        harness.now += 0.01 * plan.num_tokens
        harness.receive(scheduler.commit(plan, sampled, harness.now))
        while harness.answer():
            pass
        harness.receive_flush()
        return plan.num_tokens / max(1, decodes)

    def longest(prompts: list[list[int]], flow: int, priority: int = 0) -> float:
        """Return the longest step until these prompts are computed, in plain ones."""
        for one in prompts:
            harness.submit(one, 1, flow=flow, priority=priority)
        found = [0.0]
        while scheduler.queues.prompt_tails():
            found.append(step())
        return max(found)

    for number in range(16):
        harness.submit(prompt(number, 5), 200, flow=1)
    for _ in range(60):
        step()
    short = [prompt(100 + number, 40) for number in range(30)]
    assert longest([prompt(50, 400)], 1) <= AUTO_TARGET_STEPS * 1.05
    grown = longest(short, flow, priority)
    assert grown > 0.9 * MAX_QUEUE_STEPS if (flow, priority) == (1, 0) else grown <= AUTO_TARGET_STEPS * 1.05
    assert longest([prompt(51, 400)], 1) <= AUTO_TARGET_STEPS * 1.05


def test_a_target_in_seconds_is_kept_whatever_waits() -> None:
    machine, budget = SimulatedMachine(), TokenBudget(2048, 0.030)
    trained(machine, budget, (500,))
    plain = decodes(16, 500)
    count = budget.room(plain, 500, 1).at(500)
    assert budget.room(plain, 500, 200, queue=[(0, 1000)] * 200).at(500) == count < 2032


def test_a_queue_lengthens_steps_before_it_is_as_long_as_the_streams() -> None:
    """With sixteen streams on a machine whose steps are half fixed cost."""
    machine, budget = SimulatedMachine(constant=9e-3, per_token=5e-4), TokenBudget(2048, target_steps=AUTO_TARGET_STEPS)
    trained(machine, budget, (500,))
    plain = decodes(16, 500)
    run(budget, machine, plain, 500, 20)
    plain_s = budget.cost.predict(features(plain))
    steps = [
        budget.cost.predict(features([*plain, chunk(500, budget.room(plain, 500, waiting).at(500))])) / plain_s
        for waiting in (1, 2, 3, 4)
    ]
    assert steps == pytest.approx([2.5, 2.5, 3.5, 4.5], rel=0.05)


@given(cost=COSTS, streams=st.integers(1, 8), start=st.sampled_from([0, 1000, 4000]))
@settings(max_examples=examples(60))
def test_auto_gives_up_little_of_the_throughput(cost: dict[str, float], streams: int, start: int) -> None:
    """Where prompts limit the throughput: prompt tokens for each second of what is not spent on the decodes' tokens."""
    machine, budget = SimulatedMachine(**cost), TokenBudget(256, target_steps=AUTO_TARGET_STEPS)
    trained(machine, budget, (500, start))
    plain = decodes(streams, 500)

    def share_of_work(count: int) -> float:
        """Return the share of a step spent neither on fixed cost nor on reading the tail's own context again."""
        step, _, sequences, reads, _ = budget.cost.weights_s()
        return 1 - (step + sequences + reads * start) / budget.cost.predict(features([*plain, chunk(start, count)]))

    count = budget.room(plain, start, 3 * streams).at(start)
    assert share_of_work(count) >= 0.99 * MIN_THROUGHPUT * share_of_work(256 - streams)
    assert count >= budget.room(plain, start, 1).at(start)


def test_no_target_limits_a_prompt_without_decodes() -> None:
    """The chunk is then as long as the budget: before any step was measured, and after all."""
    machine = SimulatedMachine()
    for target in ({"target_steps": AUTO_TARGET_STEPS}, {"target_s": 0.010}):
        budget = TokenBudget(256, **target)
        assert budget.room([], 0, 1).at(0) == 256
        trained(machine, budget, (500,))
        assert budget.room([], 0, 3).at(0) == 256
        assert budget.room(decodes(1, 500), 0, 1).at(0) < 248
        # The only stream has no chunk in this step, but waits for it.
        assert budget.room([], 0, 1, streams=1).at(0) < 248


@pytest.mark.parametrize("even", [False, True])
def test_even_steps_take_equal_time_throughout_a_prompt(even: bool) -> None:
    """Without a fit they have equal tokens. The second run of the prompt uses the fit of the first."""
    machine, budget = SimulatedMachine(per_pair=2e-8), TokenBudget(256, even=even)
    assert budget.room([], 3000).at(3000) == 256
    for _ in range(2):
        start, seconds, counts = 0, [], []
        while start < 6000:
            counts.append(budget.room([], start).at(start))
            scheduled = [chunk(start, counts[-1])]
            seconds.append(machine.seconds(scheduled))
            budget.begin(scheduled, start)
            budget.end(start + seconds[-1])
            start += counts[-1]
    assert counts[0] == 256
    assert (max(seconds) / min(seconds) < 1.15) == even
    # Prompts too long for that get steps that are not too short.
    assert budget.room([], 1_000_000).at(1_000_000) == (64 if even else 256)


def test_whole_prompts_disable_even_steps() -> None:
    shape = {"max_num_batched_tokens": 512, "max_num_seqs": 2, "even_steps": True}
    assert Scheduler(blocks=BlockManager(16), **shape).budget.even
    assert not Scheduler(blocks=BlockManager(16), **shape, max_whole_tokens=500).budget.even


def test_auto_does_not_limit_drafts() -> None:
    machine, budget = SimulatedMachine(), TokenBudget(256, target_steps=AUTO_TARGET_STEPS)
    trained(machine, budget, (500,))
    assert budget.room(decodes(8, 500), 0, 0, min_tokens=0).at(0) == 248
    assert budget.room(decodes(8, 500), 0, 1).at(0) < 248


def test_auto_bounds_a_step_beside_a_stream_whose_mask_is_late() -> None:
    """The stream has no chunk in that step, but would wait for all of it."""
    harness = SchedulerHarness(slots=200, budget=256)
    harness.scheduler.budget.target_steps = AUTO_TARGET_STEPS
    harness.submit(prompt(1, 4), 40, grammar=3)
    while not any(sequence.decoding for sequence in harness.scheduler.queues.running):
        harness.step()
    harness.masks.punctual = 0.0
    harness.step()
    harness.submit(prompt(2, 250), 4)
    plan = harness.scheduler.schedule(harness.now)
    assert [chunk.sequence.decoding for chunk in plan.scheduled] == [False]
    assert plan.num_tokens <= FIRST_STEP_TOKENS


def test_auto_suits_slow_and_fast_machines() -> None:
    """Plain steps of 6 and 58 ms: gaps beside prompts are two and a half of each."""
    for machine in (SimulatedMachine(), SimulatedMachine(slow=10.0)):
        budget = TokenBudget(2048, target_steps=AUTO_TARGET_STEPS)
        trained(machine, budget, (500,))
        found = run(budget, machine, decodes(16, 500), 500, 40)
        assert np.median(found[10:]) == pytest.approx(2.5 * machine.seconds(decodes(16, 500)), rel=0.1)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=examples(60))
def test_the_fit_matches_numpy(seed: int) -> None:
    random, cost = np.random.default_rng(seed), StepCost(pair_tokens=1e-4 * (seed % 2))
    scales = np.array(SCALES)
    moved = np.eye(5)
    moved[4, 1] = -1e-4 * (seed % 2) * scales[4] / scales[1]
    sums, products, weights = np.zeros((2, 5, 5)), np.zeros((2, 5)), np.zeros(5)
    for _ in range(30):
        found, seconds = random.exponential(size=5), float(random.exponential())
        expected, learnt = float(np.array(cost._weights) @ found) * cost._own_factor, seconds
        if cost.steps >= RECENT_STEPS and expected > 0:
            learnt = min(max(seconds, expected / MAX_SURPRISE), expected * MAX_SURPRISE)
        row, kind = found / learnt, int(found[1] > found[2])
        sums[kind] = sums[kind] * FADING + row[:, None] * row
        products[kind] = products[kind] * FADING + row
        pull = INERTIA * sums.sum(0).trace() * (moved.T @ moved)
        squares, right = sums.sum(0) + pull, products.sum(0) + pull @ weights
        weights = np.linalg.solve(squares, right)
        while weights.min() < 0:
            kept = np.flatnonzero(weights > 0)
            weights = np.zeros(5)
            weights[kept] = np.linalg.solve(squares[kept[:, None], kept], right[kept])
        cost.observe(tuple(found.tolist()), seconds)
        np.testing.assert_allclose(cost._weights, weights, rtol=1e-7, atol=1e-12 * max(1.0, weights.max()))
