"""Wanted workers over time: no flapping, ahead of a rise, agreed between gateways, never less than what is known."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pillion.engine.scheduling.step_model import StepModel
from pillion.errors import ConfigError
from pillion.gateway.scaling import arrival_history
from pillion.gateway.scaling.arrival_history import LEAST_WINDOW_S, TICK_S, ArrivalHistory
from pillion.gateway.scaling.forecaster import HeldWish, WorkerForecaster
from pillion.gateway.scaling.objectives import Objectives, parse_objectives
from pillion.gateway.scaling.worker_needs import (
    DecodeNeeds,
    GivenAnswer,
    PlannedPrompt,
    PrefillNeeds,
    TypicalWorker,
    range_s,
)
from pillion.wire.registry import ComponentRecord
from tests.support.examples import examples
from tests.support.planner_components import COST, decode, node, prefill

FLEET = (node(0), prefill(0, model="m"), *(decode(number, model="m") for number in range(3)))
GOALS = Objectives(start_s=60.0)


def gateway(number: int, arrivals: int) -> ComponentRecord:
    return ComponentRecord(
        component_id=f"gateway-{number}", role="gateway", address="x", arrivals=(("m", arrivals),) if arrivals else ()
    )


def serve(forecaster: WorkerForecaster, requests: int) -> None:
    for _ in range(requests):
        forecaster.arrived("m")
        forecaster.planned("m", PlannedPrompt(0, 480, 500))
        forecaster.answered("m", GivenAnswer(500, 80, 1))


def run(
    forecaster: WorkerForecaster,
    per_s: Callable[[float], float],
    seconds: float,
    draw: random.Random | None = None,
    begin_s: float = 1000.0,
    fleet: tuple[ComponentRecord, ...] = FLEET,
) -> list[tuple[int, int]]:
    """Return the wanted prefill and decode workers at each tick. Requests come evenly, or at random with ``draw``."""
    found, due = [], 0.0
    for number in range(int(seconds / TICK_S)):
        at_s = number * TICK_S
        if draw is None:
            due += per_s(at_s) * TICK_S
            count, due = int(due), due % 1
        else:
            # A Poisson number by its waits.
            count, left_s = 0, TICK_S - draw.expovariate(per_s(at_s))
            while left_s > 0:
                count, left_s = count + 1, left_s - draw.expovariate(per_s(at_s))
        serve(forecaster, count)
        forecaster.tick(begin_s + at_s, fleet, "gateway-0")
        if "m" in forecaster.forecasts:
            wanted = forecaster.forecasts["m"].wanted
            if wanted:
                found.append((wanted["prefill"], wanted["decode"]))
    return found


@settings(max_examples=examples(6))
@given(per_s=st.floats(0.3, 40.0))
@example(24.80153886624747)
def test_a_constant_load_wants_a_constant_number(per_s: float) -> None:
    """What is known of the load may approach a bound between two numbers slowly, and crosses it once at most."""
    wanted = run(WorkerForecaster(GOALS), lambda at_s: per_s, 1800.0)
    settled = wanted[int(600 / TICK_S) :]
    assert sum(one != other for one, other in itertools.pairwise(settled)) <= 1


@pytest.mark.parametrize("per_s", [0.5, pytest.param(3.0, marks=pytest.mark.long), 20.0])
def test_chance_alone_does_not_flap(per_s: float) -> None:
    wanted = run(WorkerForecaster(GOALS), lambda at_s: per_s, 3600.0, random.Random(3))
    settled = wanted[int(600 / TICK_S) :]
    for kind in (0, 1):
        numbers = [each[kind] for each in settled]
        changes = sum(one != other for one, other in itertools.pairwise(numbers))
        # 50 minutes: hardly more often than once in ten.
        assert changes <= 5, (kind, changes)
        assert max(numbers) <= 1.5 * min(numbers) + 1


def test_a_rise_is_wanted_before_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the load grows evenly, what is wanted now is what that load needs when the workers have started, and the
    line alone says so."""
    monkeypatch.setattr(arrival_history, "MAX_MARGIN", 1.0)

    def rising(at_s: float) -> float:
        return 2.0 + at_s / 20

    ahead = run(WorkerForecaster(GOALS), rising, 900.0)
    blind = run(WorkerForecaster(Objectives(start_s=TICK_S)), rising, 900.0)
    start = int(GOALS.start_s / TICK_S)
    for at in range(int(300 / TICK_S), len(ahead) - start):
        for kind in (0, 1):
            assert ahead[at][kind] >= blind[at + start][kind] - 1
    assert sum(map(sum, ahead)) > sum(map(sum, blind))


def test_a_fall_is_believed_after_a_window() -> None:
    forecaster = WorkerForecaster(GOALS)
    busy = run(forecaster, lambda at_s: 20.0, 600.0)[-1]
    quiet = run(forecaster, lambda at_s: 1.0, 900.0, begin_s=1600.0)
    held = [at for at, each in enumerate(quiet) if each == busy]
    assert len(held) * TICK_S >= LEAST_WINDOW_S
    assert quiet[-1][1] <= busy[1] / 4
    assert all(later <= earlier for earlier, later in itertools.pairwise(quiet))


@settings(max_examples=examples(10))
@given(counts=st.lists(st.integers(0, 150), min_size=2, max_size=60))
def test_never_less_than_the_present_arrivals_need(counts: list[int]) -> None:
    forecaster = WorkerForecaster(GOALS)
    worker = TypicalWorker(model=StepModel(*COST), step_tokens=256, slots=64)
    prefiller = TypicalWorker(model=StepModel(*COST), step_tokens=512)
    prompts, answers = [PlannedPrompt(0, 480, 500)], [GivenAnswer(500, 80, 1)]
    prefills = PrefillNeeds(prefiller, prompts, GOALS)
    decodes = DecodeNeeds(worker, prompts, answers, [range_s(prefiller, prompts[0])], GOALS)
    serve(forecaster, 1)
    for number, count in enumerate(counts):
        serve(forecaster, count)
        forecaster.tick(1000.0 + number * TICK_S, FLEET, "gateway-0")
        found = forecaster.forecasts["m"]
        assert found.rates.ahead >= found.rates.present
        assert found.wanted["prefill"] >= prefills.workers(found.rates.present)
        assert found.wanted["decode"] >= decodes.workers(found.rates.present)


def test_a_burst_is_seen_at_once() -> None:
    forecaster = WorkerForecaster(GOALS)
    before = run(forecaster, lambda at_s: 2.0, 900.0)[-1]
    after = run(forecaster, lambda at_s: 20.0, 30.0, begin_s=1900.0)
    assert after[-1][1] >= 5 * before[1]
    # Half a minute shows it, however slowly the line follows.
    assert forecaster.forecasts["m"].rates.present > 17.5


def test_gateways_that_see_a_part_agree_with_one_that_sees_all() -> None:
    alone, parts = WorkerForecaster(GOALS), (WorkerForecaster(GOALS), WorkerForecaster(GOALS))
    draw, came = random.Random(4), [0, 0]
    for number in range(100):
        for _ in range(draw.randrange(180)):
            part = draw.randrange(4) // 3
            came[part] += 1
            serve(parts[part], 1)
            serve(alone, 1)
        now = 1000.0 + number * TICK_S
        alone.tick(now, FLEET, "gateway-0")
        for part, forecaster in enumerate(parts):
            assert dict(forecaster.arrivals()).get("m", 0) == came[part]
            forecaster.tick(now, (*FLEET, gateway(0, came[0]), gateway(1, came[1])), f"gateway-{part}")
    wanted = [forecaster.forecasts["m"].wanted for forecaster in (alone, *parts)]
    assert wanted[0]["decode"] > 3
    assert wanted[1:] == [wanted[0], wanted[0]]


def test_a_gateway_that_comes_late_or_again_is_no_burst() -> None:
    forecaster = WorkerForecaster(GOALS)
    for number, theirs in enumerate([0, 0, 50_000, 50_010, 50_020, 4, 8]):
        serve(forecaster, 5)
        forecaster.tick(1000.0 + number * TICK_S, (*FLEET, gateway(1, theirs)), "gateway-0")
    # The first tick begins the history; then come 5 each time, and 10, 10, 4 and 4 of the other gateway.
    assert forecaster.forecasts["m"].rates.present < 6.0


def test_no_wish_is_told_before_something_is_known() -> None:
    """Another gateway may know more, and the largest wish counts."""
    forecaster = WorkerForecaster(GOALS)
    serve(forecaster, 1)
    blank = tuple(replace(one, step_cost_s=()) for one in FLEET)
    assert run(forecaster, lambda at_s: 0.2, 1800.0, fleet=blank) == []
    # With the curve, but not yet a window of arrivals.
    forecaster = WorkerForecaster(GOALS)
    assert set(run(forecaster, lambda at_s: 0.2, LEAST_WINDOW_S - 20.0)) == {(1, 3)}
    assert run(forecaster, lambda at_s: 0.2, 600.0, begin_s=1100.0)[-1] == (1, 1)


def test_streams_and_prompts_that_wait_count_beside_the_rate() -> None:
    def wanted(*fleet: ComponentRecord) -> dict[str, int]:
        forecaster = WorkerForecaster(GOALS)
        run(forecaster, lambda at_s: 1.0, 300.0, fleet=(node(0), *fleet))
        return dict(forecaster.forecasts["m"].wanted)

    idle = wanted(prefill(model="m"), decode(model="m"))
    crowded = wanted(prefill(model="m"), decode(model="m", streams=60, waiting_requests=400, free_seqs=4))
    assert crowded["decode"] >= 460 / 64 > idle["decode"]
    queued = wanted(prefill(model="m", queued_tokens=500_000), decode(model="m"))
    assert queued["prefill"] > idle["prefill"]


def test_the_horizon_is_the_longest_start() -> None:
    forecaster = WorkerForecaster(Objectives())
    run(forecaster, lambda at_s: 1.0, 60.0, fleet=(*FLEET, decode(9, model="m", start_s=77.0)))
    assert forecaster.forecasts["m"].horizon_s == 77.0


def test_a_line_that_was_wrong_gets_a_margin() -> None:
    draw, calm, wild = random.Random(2), ArrivalHistory(2.0, 0.95), ArrivalHistory(2.0, 0.95)
    for number in range(500):
        now = 1000.0 + number * TICK_S
        # Bursts that no line foresees, of the same mean.
        calm.tick(now, 50)
        wild.tick(now, 250 if number % 60 < 12 else draw.randrange(2))
        steady, bursty = calm.rates(60.0), wild.rates(60.0)
    assert steady.ahead == pytest.approx(10.0, rel=0.02)
    assert bursty.ahead > 1.5 * bursty.present


def test_a_late_tick_shares_its_count_out() -> None:
    history = ArrivalHistory(2.0, 0.95)
    history.tick(1000.0, 7)
    history.tick(1040.0, 80)
    assert history.rates(60.0).present == pytest.approx(2.0)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=60))
def test_a_wish_is_never_less_than_what_is_needed(needs: list[tuple[int, int]]) -> None:
    wish, hold_s = HeldWish(2, 0.0), 30.0
    for number, (needed, more) in enumerate(needs):
        now = number * TICK_S
        lately = [one + plus for at, (one, plus) in enumerate(needs[: number + 1]) if at * TICK_S >= now - hold_s]
        before = wish.wanted
        wanted = wish.take(needed, needed + more, now, hold_s)
        assert wanted >= needed
        assert wanted <= max(before, needed)
        if now >= hold_s:
            assert wanted <= max(needed, *lately)


def test_objectives_are_read() -> None:
    found = parse_objectives("ttft=1.0+0.003*n, itl_p95=0.2", 0.9, 12.0)
    assert found == Objectives(ttft_s=1.0, ttft_token_s=0.003, itl_s=0.2, attainment=0.9, start_s=12.0)
    assert found.ttft_of(1000) == 4.0
    assert found.late_share == pytest.approx(0.1 / 3)


@pytest.mark.parametrize(
    ("slo", "words"),
    [
        ("", "write ttft=SECONDS"),
        ("ttft=1", "write ttft=SECONDS"),
        ("ttft=1,itl=0.1,e2e=20", "write ttft=SECONDS"),
        ("ttft=1+0.1*m,itl=0.1", "only ttft may grow"),
        ("ttft=1,itl=0.1+0.1*n", "only ttft may grow"),
        ("ttft=1,itl=0", "more than 0"),
        ("ttft=fast,itl=0.1", "--slo"),
    ],
)
def test_other_objectives_are_refused(slo: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_objectives(slo, 0.95, 0.0)
