"""`python -m lab.fleets`: the effect of a flag, the workers needed for objectives, one line per mistake."""

from __future__ import annotations

import json
import pathlib
import re

import pytest

from lab.benchmarks.traces import generate, write_trace
from lab.fleets.__main__ import main

COST = "--step-cost=5e-3,4e-5,5e-5,2e-8,1e-9"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("traces") / "trace.jsonl"
    write_trace(path, [row for row in generate(5, 40) if row.input_length < 8000][:16])
    return path


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main([*words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_a_flag_is_compared_for_the_same_requests(
    trace: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More tokens per step: first tokens come sooner. The table and the file agree."""
    monkeypatch.setenv("COLUMNS", "80")
    found = tmp_path / "found.json"
    flags = ("--flag=max-num-batched-tokens=64,2048", "--flag=split-policy=colocated", "--speed=20")
    assert run(f"--trace={trace}", COST, *flags, f"--json={found}", "--ttft-ms=900") == 0
    small, large = json.loads(found.read_text())["fleets"]
    assert (small["fleet"], large["fleet"]) == ("max-num-batched-tokens=64", "max-num-batched-tokens=2048")
    assert small["requests"] == large["requests"] == 16
    assert large["ttft_p50_ms"] < small["ttft_p50_ms"]
    assert large["faster_share"] > 0.5
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    (sooner,) = re.findall(r"sooner than .*", shown)
    assert f"{large['faster_share']:.0%}" in sooner


def test_the_fewest_workers_are_found(
    trace: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tmp_path / "found.json"
    monkeypatch.setenv("COLUMNS", "80")
    words = (f"--trace={trace}", COST, "--speed=60", "--ttft-ms=1500", f"--json={found}")
    assert run(*words, "--capacity", "--attainment=0.8") == 0
    result = json.loads(found.read_text())
    tried = {(one["prefills"], one["decodes"]): one for one in result["tried"]}
    best = tried[result["best"]["prefills"], result["best"]["decodes"]]
    assert best["enough"]
    assert best["good_share"] >= 0.8
    fewer = [one for one in tried.values() if one["prefills"] + one["decodes"] < sum(result["best"].values())]
    assert fewer
    assert not any(one["enough"] for one in fewer)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert f"The fewest: {result['best']['prefills']} prefill and {result['best']['decodes']} decode workers" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "Missing option '--step-cost'"),
        ((COST, "--flag=max-num-sqs=3"), "no such flag; did you mean max_num_seqs?"),
        ((COST, "--flag=http-port=3"), "--http-port changes nothing in the simulation"),
        ((COST, "--flag=max-num-seqs=x"), "max-num-seqs=x"),
        ((COST, "--flag=max-num-seqs=0"), "0 is less than 1"),
        ((COST, "--flag=max-num-seqs"), "is not NAME=VALUE"),
        ((COST, "--flag=decode-workers=0"), "0 is less than 1"),
        ((COST, "--flag=decode-workers=20000"), "10000 workers at most"),
        ((COST, "--flag=split-policy=fraction:2"), "write fraction:x"),
        ((COST, "--flag=split-policy=auto,chunked"), "is not auto, disaggregated"),
        ((COST, "--flag=block-size=48"), "does not divide"),
        ((COST, "--flag=max-model-len=3"), "--max-model-len 3"),
        ((COST, "--flag=kv-pool-bytes=1GiB"), "--block-bytes"),
        ((COST, "--capacity"), "needs an objective"),
        ((COST, "--capacity", "--ttft-ms=5", "--flag=decode-workers=3"), "chooses the numbers of workers"),
        (("--step-cost=1,2",), "'1,2' is not STEP,TOKEN"),
    ],
    ids=lambda value: " ".join(value)[-30:] if isinstance(value, tuple) else None,
)
def test_invalid_arguments_are_reported_in_one_line(
    trace: pathlib.Path, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(f"--trace={trace}", *words) == 2
    shown = capsys.readouterr()
    assert said in " ".join(shown.err.split())
    assert shown.out == "", "a fleet was simulated before"


def test_a_file_that_is_not_a_trace_is_refused(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"timestamp": 0}\n')
    assert run(f"--trace={path}", COST) == 2
    assert "row 1" in capsys.readouterr().err
    assert run(f"--trace={tmp_path}/none", COST) == 2
