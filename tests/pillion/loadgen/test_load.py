"""Arrivals, lengths and prompts are determined by config and seed; numpy and counting are the oracles."""

from __future__ import annotations

import dataclasses
import json
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.benchmarks.traces import write_trace
from pillion.errors import ConfigError
from pillion.loadgen.load import (
    MAX_TOKENS,
    LoadConfig,
    arrival_times,
    burstiness_of,
    make_sessions,
    parse_lengths,
    text_of,
)
from pillion.loadgen.traces import PromptMaker, TraceRequest, read_trace
from tests.support.examples import examples

VOCABULARY = range(1000, 30_000)


@given(st.floats(0.01, 1000), st.sampled_from([0.25, 1.0, 4.0, math.inf]), st.integers(0, 99), st.integers(1, 200))
def test_arrivals_keep_to_their_rate_and_are_in_order(rate, burstiness, seed, count):
    times = arrival_times(rate, burstiness, seed, count)
    assert len(times) == count
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] == pytest.approx(count / rate)
    assert times == arrival_times(rate, burstiness, seed, count)
    unscaled = arrival_times(rate, burstiness, seed, count, math.inf)
    assert arrival_times(rate, burstiness, seed, count, unscaled[0]) == unscaled[:1]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_are_gamma_distributed(burstiness):
    """Mean 1/rate, coefficient of variation 1/sqrt(burstiness); 20,000 draws, six standard errors."""
    gaps = np.diff(arrival_times(5.0, burstiness, 1, 20_000, math.inf), prepend=0.0)
    cv = 1 / math.sqrt(burstiness)
    assert gaps.mean() == pytest.approx(0.2, rel=6 * cv / math.sqrt(len(gaps)))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)


def test_constant_gaps_are_equal_and_burstiness_is_checked():
    assert np.diff(arrival_times(8.0, math.inf, 0, 1000)) == pytest.approx(np.full(999, 0.125))
    assert [burstiness_of(name, 0.5) for name in ("constant", "poisson", "gamma")] == [math.inf, 1.0, 0.5]
    for process, factor in (("tidal", 1.0), ("gamma", 0.0), ("gamma", math.nan)):
        with pytest.raises(ValueError, match=r"tidal|burstiness"):
            burstiness_of(process, factor)
    with pytest.raises(ValueError, match="not above 0"):
        arrival_times(0.0, 1.0, 0, 5)


@given(st.integers(1, MAX_TOKENS), st.integers(1, MAX_TOKENS), st.integers())
def test_lengths_stay_within_their_limits(one, other, seed):
    low, high = sorted((one, other))
    draw = random.Random(seed)
    assert parse_lengths(str(low)).draw(draw) == low
    assert low <= parse_lengths(f"uniform:{low},{high}").draw(draw) <= high
    assert 1 <= parse_lengths(f"lognormal:{low},10,{high}").draw(draw) <= high


def test_lognormal_lengths_have_their_median():
    draw, lengths = random.Random(2), parse_lengths("lognormal:200,0.8")
    drawn = [lengths.draw(draw) for _ in range(4001)]
    assert np.median(drawn) == pytest.approx(200, rel=0.1)
    assert np.std(np.log(drawn)) == pytest.approx(0.8, rel=0.1)


@pytest.mark.parametrize(
    "text", ["", "x", "0", "1.5", "uniform:5", "uniform:9,3", "lognormal:0,1", "lognormal:5,-1", "5,6"]
)
def test_invalid_lengths_name_the_valid_form(text):
    with pytest.raises(ValueError, match="length"):
        parse_lengths(text)


def test_a_load_depends_only_on_its_seed():
    config = LoadConfig(rate=2.0, requests=20, input_len="uniform:5,50", output_len="uniform:1,9", seed=3)
    sessions = make_sessions(config)
    assert sessions == make_sessions(config)
    assert {len(session.turns[0].ids) for session in sessions} <= set(range(5, 51))
    other = make_sessions(dataclasses.replace(config, seed=4))
    assert [len(s.turns[0].ids) for s in sessions] != [len(s.turns[0].ids) for s in other]
    assert [s.at_s for s in sessions] != [s.at_s for s in other]
    same_length = dataclasses.replace(config, input_len="40")
    beginnings = {
        tuple(session.turns[0].ids[:8])
        for seed in (3, 4)
        for session in make_sessions(dataclasses.replace(same_length, seed=seed))
    }
    assert len(beginnings) == 40


def test_chats_share_system_prompts_and_count_turns():
    config = LoadConfig(workload="chats", rate=2.0, requests=101, system_prompts=3, system_len="9", turns="uniform:2,5")
    sessions = make_sessions(config)
    assert sum(len(session.turns) for session in sessions) == 101
    assert len({session.system for session in sessions}) == 3
    assert {len(session.system.split()) for session in sessions} == {9}
    assert all(turn.think_s == 0 for session in sessions for turn in session.turns[:1])
    assert all(turn.think_s > 0 for session in sessions for turn in session.turns[1:])


def test_a_duration_ends_arrivals():
    sessions = make_sessions(LoadConfig(rate=10.0, requests=10_000, duration_s=3.0, input_len="1"))
    assert 0 < len(sessions) < 100
    assert sessions[-1].at_s <= 3.0


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({}, "--rate"),
        ({"rate": 1.0, "concurrency": 2}, "--max-concurrency"),
        ({"rate": -1.0}, "not above 0"),
        ({"rate": 1.0, "workload": "storm"}, "storm"),
        ({"rate": 1.0, "requests": 0}, "0 requests"),
        ({"rate": 1.0, "input_len": "many"}, "many"),
        ({"rate": 1.0, "input_len": "1000000", "requests": 1000}, "fewer --requests"),
        ({"rate": 1.0, "token_range": (5, 5)}, "not a range"),
        ({"workload": "trace"}, "--trace"),
        ({"workload": "trace", "trace": "/nowhere.jsonl"}, "nowhere"),
    ],
)
def test_an_invalid_load_is_rejected(fields, complaint):
    with pytest.raises(ConfigError, match=complaint):
        make_sessions(LoadConfig(**fields))


@settings(max_examples=examples(50))
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=2, max_size=2),
    st.integers(1, 2500),
    st.integers(1, 2500),
)
def test_trace_prompts_share_prefixes_as_far_as_their_hashes(ids, one, other):
    # Chained hashes: equal at a place only if all before are.
    chains = [tuple(f for f in range(len(row_ids)) if row_ids[: f + 1]) for row_ids in ids]
    chained = [
        tuple(hash(tuple(row_ids[: place + 1])) for place in chain) for row_ids, chain in zip(ids, chains, strict=True)
    ]
    rows = [TraceRequest(0, length, 1, hashes) for length, hashes in zip((one, other), chained, strict=True)]
    maker = PromptMaker(7, VOCABULARY)
    prompts = [maker.prompt_of(number, row) for number, row in enumerate(rows)]
    assert [len(prompt) for prompt in prompts] == [one, other]
    assert prompts[0] == PromptMaker(7, VOCABULARY).prompt_of(0, rows[0])
    same = next((place for place, (a, b) in enumerate(zip(*chained, strict=False)) if a != b), min(map(len, chained)))
    shared = min(one, other, 512 * same)
    assert prompts[0][:shared] == prompts[1][:shared]
    if min(one, other) >= shared + 20:
        assert prompts[0][shared : shared + 20] != prompts[1][shared : shared + 20]
    assert text_of(prompts[0][:shared]) == text_of(prompts[1][:shared])


def test_a_trace_is_read_as_it_was_written(tmp_path):
    mooncake = tmp_path / "a.jsonl"
    mooncake.write_text('{"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [0, 9]}\n\n'
                        '{"timestamp": 0, "input_length": 2, "output_length": 1, "hash_ids": [4]}\n')  # fmt: skip
    rows = read_trace(mooncake)
    assert rows == [TraceRequest(0, 2, 1, (4,)), TraceRequest(3000, 700, 5, (0, 9))]
    write_trace(tmp_path / "b.jsonl", rows)
    assert read_trace(tmp_path / "b.jsonl") == rows


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", '{"timestamp": 1}\n', "{broken\n", "[]\n"])
def test_a_malformed_trace_is_named(tmp_path, text):
    path = tmp_path / "odd.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"odd\.jsonl"):
        read_trace(path)


def test_a_trace_is_stretched_to_a_rate_and_cut_to_the_model(tmp_path):
    path = tmp_path / "t.jsonl"
    rows = [{"timestamp": 100 * n + 50, "input_length": 10 * n + 1, "output_length": 3} for n in range(11)]
    path.write_text("\n".join(map(json.dumps, rows)))
    config = LoadConfig(workload="trace", trace=str(path))
    assert [s.at_s for s in make_sessions(config)] == pytest.approx([n / 10 for n in range(11)])
    slow = make_sessions(dataclasses.replace(config, rate=1.0))
    assert [s.at_s for s in slow] == pytest.approx(list(range(11)))
    short = make_sessions(dataclasses.replace(config, max_model_len=54))
    assert [len(s.turns[0].ids) for s in short] == [1, 11, 21, 31, 41, 51]
    with pytest.raises(ConfigError, match="no request that fits"):
        make_sessions(dataclasses.replace(config, max_model_len=1))
