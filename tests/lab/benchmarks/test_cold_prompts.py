"""The benchmark of cold prompts: rounds of several runs are combined, and times compared within a round."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any

import pytest

from lab.benchmarks import cold_prompts
from lab.benchmarks.peers import bf16_gguf
from lab.benchmarks.report import machine


def test_every_system_is_compared_with_peers_of_the_same_weights() -> None:
    assert {system.rsplit("-", 1)[1] for system in cold_prompts.SYSTEMS} == {"bf16", "gguf"}
    for system, peers in cold_prompts.PEERS.items():
        assert {peer.rsplit("-", 1)[1] for peer in peers} == {system.rsplit("-", 1)[1]}


def test_ratios_compare_results_of_the_same_round() -> None:
    rounds = {
        "1024": [
            {"pillion-bf16": 100.0, "vllm-bf16": 200.0},
            {"pillion-bf16": 300.0, "vllm-bf16": 300.0},
            {"pillion-bf16": 200.0},
        ],
        "128": [{"llama.cpp-gguf": 10.0}],
    }
    rows = cold_prompts.rows_of(rounds)
    assert [(row["tokens"], row["system"], row["rounds"]) for row in rows] == [
        (128, "llama.cpp-gguf", 1),
        (1024, "pillion-bf16", 3),
        (1024, "vllm-bf16", 2),
    ]
    assert rows[1]["ms"] == {"min": 100, "median": 200, "max": 300}
    assert rows[1]["of vllm-bf16"] == {"min": 0.5, "median": 0.75, "max": 1.0}
    assert not any(key.startswith("of ") for row in (rows[0], rows[2]) for key in row)


def test_figures_of_a_system_are_split_into_rounds() -> None:
    found = {
        ("1024/1 x 1", "vllm-bf16"): [{"ttft_p50_ms": 1.0}, {"ttft_p50_ms": 2.0}],
        ("1024/1 x 1", "pillion-bf16"): [{"ttft_p50_ms": 3.0}, {"ttft_p50_ms": 4.0}],
        ("512/1 x 1", "pillion-bf16"): [{"ttft_p50_ms": 5.0}, {"ttft_p50_ms": 6.0}],
    }
    assert cold_prompts.rounds_of(found, [512, 1024], 2) == {
        "512": [{"pillion-bf16": 5.0}, {"pillion-bf16": 6.0}],
        "1024": [{"vllm-bf16": 1.0, "pillion-bf16": 3.0}, {"vllm-bf16": 2.0, "pillion-bf16": 4.0}],
    }


def test_rounds_are_not_added_to_those_of_another_machine(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "cold_prompts.json"
    assert cold_prompts.earlier(path)["rounds"] == {}
    result: dict[str, Any] = {"machine": {**machine(), "date": "2000-01-01"}, "rounds": {"128": [{}]}, "systems": {}}
    path.write_text(json.dumps(result))
    assert cold_prompts.earlier(path)["rounds"] == {"128": [{}]}
    result["machine"]["kernels"] = "another"
    path.write_text(json.dumps(result))
    with pytest.raises(SystemExit, match="another machine"):
        cold_prompts.earlier(path)


def test_missing_peers_are_left_out(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = argparse.Namespace(vllm="/no/such/vllm", llama_python=None, systems=cold_prompts.SYSTEMS, pillion_flags="")
    found = cold_prompts.systems(args, pathlib.Path("folder"), pathlib.Path("file"), tmp_path)
    assert [system.name for system in found] == ["pillion-bf16", "pillion-gguf"]
    printed = capsys.readouterr().out
    for system in ("vllm-bf16", "llama.cpp-bf16", "llama.cpp-gguf"):
        assert f"{system} is left out" in printed


CONVERTS = """
import pathlib, types

llama_model_quantize_default_params = types.SimpleNamespace


def llama_model_quantize(path, copy, params):
    assert (params.ftype, params.allow_requantize) == (32, True)
    pathlib.Path(copy.decode()).write_bytes(path)
    return 0
"""


def test_llama_cpp_makes_its_own_copy_in_bfloat16(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama_cpp.py").write_text(CONVERTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert bf16_gguf(sys.executable, pathlib.Path("m.gguf"), tmp_path).read_bytes() == b"m.gguf"
