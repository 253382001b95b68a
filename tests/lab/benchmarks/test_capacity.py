"""Loads of the capacity benchmark have their lengths and prefixes; a search finds a known capacity."""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Sequence

import pytest

from lab.benchmarks.capacity import (
    CHAT,
    OBJECTIVES,
    SUMMARIES,
    CapacitySearch,
    LengthQuantiles,
    OpenLoad,
    loads,
    picture,
    rows_of,
)
from pillion.loadgen.figures import percentile

SCALE = 8.0


def prompt_lengths(load: str, count: int = 1500) -> list[int]:
    return [len(session.turns[0].ids) for session in loads(SCALE)[load](count, 1)]


@pytest.mark.parametrize(("load", "wanted"), [("chat", CHAT), ("summaries", SUMMARIES)])
def test_lengths_have_the_quantiles_of_their_data_set(load: str, wanted: LengthQuantiles) -> None:
    sessions = loads(SCALE)[load](1500, 1)
    prompts = [len(session.turns[0].ids) for session in sessions]
    answers = [session.turns[0].output_tokens for session in sessions]
    for lengths, (p50, p90) in ((prompts, wanted.prompt), (answers, wanted.answer)):
        assert statistics.median(lengths) == pytest.approx(p50 / SCALE, rel=0.1)
        assert percentile(lengths, 90) == pytest.approx(p90 / SCALE, rel=0.12)


def test_mixed_prompts_are_between_those_of_its_parts() -> None:
    means = [statistics.fmean(prompt_lengths(load)) for load in ("chat", "mixed", "summaries")]
    assert means == sorted(means)


def test_trace_prompts_share_prefixes_within_a_seed_only() -> None:
    made = loads(SCALE)["toolagent"](200, 1)
    begins = [tuple(session.turns[0].ids[:64]) for session in made]
    assert len(set(begins)) < len(begins)
    others = {tuple(session.turns[0].ids[:64]) for session in loads(SCALE)["toolagent"](200, 2)}
    assert not others & set(begins)


@pytest.mark.parametrize("load", ["chat", "turns"])
def test_requests_arrive_at_the_rate(load: str) -> None:
    made = OpenLoad(load, 5.0, 40.0, loads(SCALE)[load]).sessions(3)
    assert made == OpenLoad(load, 5.0, 40.0, loads(SCALE)[load]).sessions(3)
    requests = sum(len(session.turns) for session in made)
    assert requests == 200
    assert requests / made[-1].at_s == pytest.approx(5.0, rel=0.01)


@pytest.mark.parametrize("load", ["chat", "toolagent", "turns"])
def test_runs_at_all_rates_have_the_same_lengths_and_no_common_prompt(load: str) -> None:
    slow, fast = (OpenLoad(load, rate, 20.0, loads(SCALE)[load]).sessions(3) for rate in (2.0, 3.0))
    lengths = [[[len(turn.ids or turn.text.split()) for turn in each.turns] for each in made] for made in (slow, fast)]
    # The last chat may be cut by the number of requests.
    assert lengths[0][:-1] == lengths[1][: len(slow) - 1]
    begins = [{(tuple(each.turns[0].ids[:16]), each.system[:16]) for each in made} for made in (slow, fast)]
    assert not begins[0] & begins[1]


@pytest.mark.parametrize("start", [0.25, 1.0, 40.0])
def test_one_search_finds_the_capacities_of_all_objectives(start: float) -> None:
    """A system with gaps of 10 ms per request/s, and first tokens in time up to 20/s."""
    search = CapacitySearch({"strict": 55.0, "relaxed": 275.0}, start)
    while (rate := search.next()) is not None:
        search.runs[rate] = {"itl_p99_ms": 10 * rate, "ttft_of_bound_p99": rate / 20}
    found = search.capacities()
    assert 5.5 / 1.1 <= found["strict"] <= 5.5
    assert 20 / 1.1 <= found["relaxed"] <= 20


def test_a_run_for_a_stricter_objective_does_not_lower_another_capacity() -> None:
    """The strict search continues below the relaxed capacity, where a burst breaks the relaxed bound."""
    search = CapacitySearch({"strict": 50.0, "relaxed": 500.0}, 3.0)
    gaps = {3.0: 900.0, 1.5: 400.0, 0.75: 510.0, 0.375: 45.0}
    while (rate := search.next()) is not None:
        search.runs[rate] = {"itl_p99_ms": gaps.get(rate, 499.0 if rate < 2.0 else 600.0), "ttft_of_bound_p99": 0.5}
    found = search.capacities()
    assert 2.0 / 1.1 <= found["relaxed"] <= 2.0
    assert 0.375 <= found["strict"] < 0.375 * 1.1


def test_capacities_are_compared_with_the_peers_best_setting_and_the_better_policy() -> None:
    def row(system: str, rates: Sequence[float], round_: int = 1) -> dict[str, object]:
        capacity = dict(zip(OBJECTIVES, rates, strict=True))
        return {"load": "chat", "system": system, "round": round_, "capacity": capacity, "runs": []}

    found = [
        row("pillion auto", (6.0, 8.0)),
        row("pillion auto", (7.0, 8.0), 2),
        row("pillion auto", (6.5, 8.0), 3),
        row("pillion colocated", (5.0, 8.0)),
        row("vllm 128", (2.0, 3.0)),
        row("vllm 2048", (0.0, 4.0)),
    ]
    strict, relaxed = rows_of(found)
    assert strict["over_peer"] == pytest.approx(6.5 / 2.0)
    assert strict["over_better_policy"] == pytest.approx(6.5 / 5.0)
    assert relaxed["over_peer"] == pytest.approx(2.0)


def test_the_chart_has_a_line_for_each_system_and_objective(tmp_path: pathlib.Path) -> None:
    figures = ("itl_p99_ms", "ttft_of_bound_p99", "good_strict_per_s")
    runs = [{"rate": rate, **dict.fromkeys(figures, 10 * rate)} for rate in (1.0, 2.0, 2.0)]
    found = [{"load": "chat", "system": system, "runs": runs} for system in ("pillion auto", "vllm 512")]
    path = tmp_path / "capacity.svg"
    picture(path, found, {"strict": 55.0})
    drawn = path.read_text("utf-8")
    assert all(name in drawn for name in ("pillion auto", "vllm 512", "strict", "bound", "chat: answered within"))
