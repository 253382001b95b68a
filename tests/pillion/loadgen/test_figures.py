"""Percentiles, records, objectives and goodput, against numpy and against arithmetic by hand."""

from __future__ import annotations

import io
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pillion.loadgen.figures import Record, Run, bottleneck, client_figures, distribution, percentile, summarize
from pillion.loadgen.report import summarize_run, tables
from pillion.loadgen.slo import MEASURES, Objective, good, measured_s, meets, parse_slo

SECONDS = st.floats(0, 1e4)


def record(number=0, due=0.0, messages=((1.0, 1),), **more):
    fields = {
        "number": number,
        "session": number,
        "turn": 0,
        "due_s": due,
        "held_s": 0.0,
        "sent_s": due,
        "ended_s": messages[-1][0] if messages else due,
        "messages": tuple(messages),
        "prompt_tokens": 100,
        "output_tokens": sum(tokens for _, tokens in messages),
        **more,
    }
    return Record(**fields)


@given(st.lists(SECONDS, min_size=1), st.floats(0, 100))
def test_percentiles_match_numpy(values, percent):
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), rel=1e-9, abs=1e-12)
    assert min(values) <= percentile(values, percent) <= max(values)


@given(st.lists(SECONDS, min_size=1))
def test_a_distribution_matches_numpy_in_ms(values):
    found = distribution(values)
    assert found["mean"] == pytest.approx(np.mean(values) * 1000)
    for percent in (50, 90, 95, 99):
        assert found[f"p{percent}"] == pytest.approx(np.percentile(values, percent) * 1000, rel=1e-9, abs=1e-9)
    assert distribution([]) is None


def test_latencies_are_counted_from_the_intended_arrival():
    late = record(due=2.0, sent_s=3.5, held_s=0.5, messages=((4.0, 2), (4.5, 1), (6.0, 3)))
    assert late.ttft_s == 2.0
    assert late.e2e_s == 4.0
    assert late.itl_s == [0.5, 1.5]
    # Six tokens, of which two came first.
    assert late.tpot_s == 0.5
    assert late.lag_s == 1.0
    failed = record(messages=(), status="HTTP 429")
    assert failed.ttft_s == failed.e2e_s == math.inf
    assert record(messages=((1.0, 5),)).tpot_s == 0.0


@given(st.lists(st.lists(st.floats(0.001, 10), min_size=1, max_size=9), min_size=1, max_size=9), st.floats(0.1, 100))
def test_a_summary_matches_numpy(gaps, duration_s):
    records = [
        record(n, due=float(n), messages=tuple((float(at), 1) for at in n + np.cumsum(request_gaps)), cached_tokens=25)
        for n, request_gaps in enumerate(gaps)
    ]
    failed = record(len(gaps), due=99.0, messages=(), status="Overloaded", error="full")
    again = record(len(gaps) + 1, due=99.5, messages=(), status="Overloaded", error="still full")
    summary = summarize([*records, failed, again], duration_s)
    assert summary["ok"] == len(gaps)
    assert summary["errors"] == {"Overloaded": {"count": 2, "first": "full"}}
    assert summary["hit_rate"] == 0.25
    assert summary["output_tokens_per_s"] == pytest.approx(sum(map(len, gaps)) / duration_s)
    assert summary["ttft_ms"]["p90"] == pytest.approx(
        np.percentile([request_gaps[0] for request_gaps in gaps], 90) * 1000
    )
    later = [gap for request_gaps in gaps for gap in request_gaps[1:]]
    if later:
        assert summary["itl_ms"]["p99"] == pytest.approx(np.percentile(later, 99) * 1000)
        means = [np.mean(request_gaps[1:]) for request_gaps in gaps if len(request_gaps) > 1]
        assert summary["tpot_ms"]["p50"] == pytest.approx(np.median(means) * 1000)
    else:
        assert summary["itl_ms"] is None
    assert summary["e2e_ms"]["max"] == pytest.approx(max(map(sum, gaps)) * 1000)


def test_objectives_are_read():
    assert parse_slo("") == ()
    assert parse_slo("ttft=1.0, itl_p99=.1") == (Objective("ttft", 1.0), Objective("itl_p99", 0.1))
    assert parse_slo("ttft=1.0+0.002*n") == (Objective("ttft", 1.0, 0.002),)
    assert parse_slo("e2e = 2e-3*n + 1e+1 + 0.1*m+1") == (Objective("e2e", 11.0, 0.002, 0.1),)


@pytest.mark.parametrize(
    "text", ["ttft", "ttft=", "ttft=x", "speed=1", "ttft=1,ttft=2", "ttft=1+n", "ttft=-1", "ttft=2*k", "ttft=1++2"]
)
def test_invalid_objectives_name_the_valid_form(text):
    with pytest.raises(ValueError, match="objective"):
        parse_slo(text)


@given(st.sampled_from(MEASURES), st.floats(0, 100), st.floats(0, 1), st.floats(0, 1))
def test_written_records_are_read_back(measure, fixed, prompt, answer):
    assert parse_slo(f"{measure}={fixed!r}+{prompt!r}*n+{answer!r}*m") == (Objective(measure, fixed, prompt, answer),)


def test_bounds_grow_with_the_prompt_and_failures_meet_no_objective():
    (objective,) = parse_slo("ttft=1+0.01*n")
    assert objective.bound_s(50, 0) == 1.5
    assert meets(objective, record(messages=((1.5, 1),), prompt_tokens=50))
    assert not meets(objective, record(messages=((1.6, 1),), prompt_tokens=50))
    assert not meets(objective, record(messages=((0.1, 1),), status="timeout"))
    assert not meets(objective, record(messages=(), status="HTTP 500"))


@given(st.lists(st.floats(0.001, 5), min_size=1, max_size=30))
def test_token_gap_statistics_of_one_request_match_numpy(gaps):
    one = record(messages=((1.0, 1), *((float(at), 1) for at in 1.0 + np.cumsum(gaps))))
    assert measured_s("itl", one) == pytest.approx(np.mean(gaps))
    assert measured_s("tpot", one) == pytest.approx(np.mean(gaps))
    assert measured_s("itl_p90", one) == pytest.approx(np.percentile(gaps, 90), abs=1e-9)
    assert measured_s("itl_max", one) == pytest.approx(max(gaps))
    assert measured_s("itl_p99", record()) == 0.0


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0, 1), st.booleans()), max_size=20))
def test_goodput_counts_requests_that_met_every_objective(outcomes):
    records = [
        record(n, messages=((ttft, 1), (ttft + gap, 1)), status="ok" if fine else "timeout")
        for n, (ttft, gap, fine) in enumerate(outcomes)
    ]
    met = good(parse_slo("ttft=1,itl_max=0.5"), records)
    assert met == [fine and ttft <= 1 and (ttft + gap) - ttft <= 0.5 for ttft, gap, fine in outcomes]
    assert good((), records) == [fine for _, _, fine in outcomes]


def test_a_result_is_json_and_flags_a_slow_client():
    records = (record(0, due=1.0), record(1, due=2.0, messages=(), status="empty"))
    objectives = parse_slo("ttft=1")
    config = {"load": {"concurrency": None}}
    result = summarize_run(Run(records, 4.0, 0.4, (0.001,), unsent=2), objectives, config)
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert result["goodput"]["attainment"] == 0.5
    assert result["goodput"]["requests_per_s"] == 0.25
    assert result["summary"]["unsent_turns"] == 2
    assert result["warning"] == ""
    busy = summarize_run(Run(records, 4.0, 3.9, (0.001,)), objectives, config)
    assert "98% of one core" in busy["warning"]
    late = client_figures(Run((record(due=0.0, sent_s=0.2),), 1.0, 0.0, ()))
    assert "late by 200 ms" in bottleneck(late, {"p50": 300.0})
    assert bottleneck(late, {"p50": 3000.0}) == ""
    held = client_figures(Run((record(due=0.0, sent_s=0.2, held_s=0.2),), 1.0, 0.0, ()))
    assert bottleneck(held, None) == ""
    assert held["held_requests"] == 1


def test_a_table_shows_failures_and_warnings():
    records = (
        record(0, due=1.0, messages=((2.0, 1), (3.0, 1))),
        record(1, messages=(), status="HTTP 429", error="[slow]"),
    )
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(
        tables(summarize_run(Run(records, 4.0, 3.9, ()), parse_slo("ttft=1"), {"load": {"concurrency": None}}))
    )
    text = console.export_text()
    for words in (
        "HTTP 429: 1 ([slow])",
        "1 of 2 answered",
        "50.0% met all",
        "warning: the client",
        "1,000.0",
        "P90 TTFT",
    ):
        assert words in text
