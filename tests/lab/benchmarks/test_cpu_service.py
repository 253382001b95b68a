"""The service benchmark: tokens, gaps and rates as its clients see them."""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys
from collections.abc import AsyncGenerator
from typing import Any

import psutil
import pytest

from lab.benchmarks import cpu_service
from lab.benchmarks.closed_loop import ClosedLoad, figures, measure
from lab.benchmarks.peers import about_kernels, llama_system, pillion_system, stop_session, vllm_environment
from lab.testbed.conditions import WITHIN_S, loop_turns, wait_for
from pillion.kernels.cpu.language.isa import host_features
from pillion.loadgen.figures import Record, Run
from pillion.loadgen.target import AnswerMessage, AnswerRequest, TargetError, TokenCounts

LOAD = ClosedLoad(input_tokens=6, output_tokens=5, concurrency=3, requests=8)


class CountingTarget:
    """Answers with messages of ``tokens`` tokens each; counts concurrent streams."""

    def __init__(self, *tokens: int, error: str = "") -> None:
        self.tokens = tokens
        self.error = error
        self.prompts: list[tuple[int, ...]] = []
        self.open = self.most = 0
        self.closed = False

    async def stream(self, request: AnswerRequest) -> AsyncGenerator[AnswerMessage, None]:
        self.prompts.append(tuple(request.ids))
        self.open += 1
        self.most = max(self.most, self.open)
        if self.error:
            raise TargetError("HTTP 404", self.error)
        for tokens in self.tokens:
            await loop_turns(1)
            yield AnswerMessage("x", tokens)
        yield AnswerMessage("", 0, TokenCounts(len(request.ids), 0, sum(self.tokens)))
        self.open -= 1

    async def describe(self) -> dict[str, Any]:
        return {}

    async def aclose(self) -> None:
        self.closed = True


def record(due_s: float, messages: tuple[tuple[float, int], ...]) -> Record:
    tokens = sum(count for _, count in messages)
    return Record(
        number=0,
        session=0,
        turn=0,
        due_s=due_s,
        held_s=0.0,
        sent_s=due_s,
        ended_s=messages[-1][0],
        messages=messages,
        output_tokens=tokens,
        asked_tokens=tokens,
    )


def test_figures_of_a_run() -> None:
    load = ClosedLoad(input_tokens=100, output_tokens=3, concurrency=1, requests=2)
    records = (record(0.0, ((0.1, 1), (0.2, 1), (0.4, 1))), record(1.0, ((1.3, 1), (1.4, 2))))
    found = figures(load, Run(records, duration_s=2.0, cpu_s=0.1, stalls_s=()))
    assert found["output_tokens_per_s"] == pytest.approx(3.0)
    assert found["ttft_p50_ms"] == pytest.approx(200)
    assert found["ttft_p99_ms"] == pytest.approx(298)
    assert found["itl_p50_ms"] == pytest.approx(100)
    assert found["itl_max_ms"] == pytest.approx(200)
    assert found["stream_decode_tokens_per_s"] == pytest.approx((2 / 0.3 + 2 / 0.1) / 2)
    assert found["tokens_per_message"] == pytest.approx(6 / 5)
    assert found["driver_cpu_share"] == pytest.approx(0.05)
    assert found["prefill_tokens_per_s"] == pytest.approx(500)


def test_pillion_is_served_with_its_own_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test bed's default policy must not be measured as the product's."""
    started: list[tuple[list[str], dict[str, str]]] = []

    def start(command: list[str], *, env: dict[str, str], **_: Any) -> None:
        started.append((command, env))
        raise OSError("nothing is started here")

    monkeypatch.delenv("PILLION_SPLIT_POLICY", raising=False)
    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(OSError, match="nothing"), pillion_system("pillion", "demo", ("--dtype", "bfloat16")).running():
        pass
    ((command, environment),) = started
    assert command[-2:] == ["--dtype", "bfloat16"]
    assert [word for word in (*command, *environment) if "split" in word.lower()] == []


def prompts(load: ClosedLoad, seed: int) -> list[tuple[int, ...]]:
    return [tuple(turn.ids) for session in load.sessions(seed) for turn in session.turns]


def test_prompts_repeat_only_for_the_same_seed() -> None:
    assert prompts(LOAD, 1) == prompts(LOAD, 1)
    longer = ClosedLoad(input_tokens=12, output_tokens=5, concurrency=3, requests=8)
    heads = [ids[:6] for load, seed in ((LOAD, 1), (LOAD, 2), (longer, 1)) for ids in prompts(load, seed)]
    assert len(set(heads)) == 24


async def test_the_load_is_a_closed_loop() -> None:
    """At most as many streams as clients, no fewer while prompts are left, and each prompt once."""
    target = CountingTarget(2, 3)
    run = await measure(target, LOAD.sessions(3), LOAD.concurrency)
    assert target.most == LOAD.concurrency
    assert target.closed
    assert sorted(target.prompts) == sorted(prompts(LOAD, 3))
    assert [[tokens for _, tokens in each.messages] for each in run.records] == [[2, 3]] * LOAD.requests


async def test_an_answer_of_another_length_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="4 tokens"):
        await measure(CountingTarget(4), LOAD.sessions(3), LOAD.concurrency)


async def test_a_refusal_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"404.*no such model"):
        await measure(CountingTarget(error="no such model"), LOAD.sessions(3), LOAD.concurrency)


def test_rows_pair_the_rounds() -> None:
    found = {
        (LOAD.name, "pillion"): [
            {"output_tokens_per_s": 20.0, "itl_p99_ms": 5.0},
            {"output_tokens_per_s": 30.0, "itl_p99_ms": 10.0},
        ],
        (LOAD.name, "vllm"): [
            {"output_tokens_per_s": 10.0, "itl_p99_ms": 20.0},
            {"output_tokens_per_s": 20.0, "itl_p99_ms": 20.0},
        ],
    }
    other = ClosedLoad(input_tokens=60, output_tokens=5, concurrency=3, requests=8)
    rows = cpu_service.rows_of(found, [LOAD, other], ["pillion", "vllm", "llama.cpp"])
    assert [(row["load"], row["system"]) for row in rows] == [(LOAD.name, "pillion"), (LOAD.name, "vllm")]
    assert rows[0]["ratio"] == {"min": 1.5, "median": 1.75, "max": 2.0}
    assert rows[0]["itl_p99_ratio"] == {"min": 0.25, "median": 0.375, "max": 0.5}
    alone = cpu_service.rows_of({(LOAD.name, "pillion"): found[LOAD.name, "pillion"]}, [LOAD], ["pillion"])
    assert "ratio" not in alone[0]


def test_a_missing_peer_is_left_out_and_reported(capsys: pytest.CaptureFixture[str]) -> None:
    args = argparse.Namespace(
        pillion=["a=--cpu-threads 2", "b"],
        pillion_alone=["c=--quantization int8"],
        model="",
        vllm="/no/such/vllm",
        vllm_flags="",
        peer_isa="",
        llama_python=None,
        only=None,
    )
    found = cpu_service.systems(args, pathlib.Path("folder"), "bfloat16", pathlib.Path("file"))
    common = ("--dtype", "bfloat16")
    assert [(system.name, system.flags) for system in found] == [
        ("a", (*common, "--cpu-threads", "2")),
        ("b", common),
        ("c", (*common, "--quantization", "int8")),
    ]
    one, eight = (ClosedLoad(256, 128, streams, streams) for streams in (1, 8))
    assert [(system.takes(one), system.takes(eight)) for system in found] == [(True, True), (True, True), (True, False)]
    printed = capsys.readouterr().out
    assert "vllm is left out" in printed
    assert "llama.cpp is left out" in printed


@pytest.mark.skipif("avx2" not in host_features(), reason="this processor has no AVX2")
def test_a_peer_limited_to_avx2_detects_no_newer_instructions() -> None:
    """vLLM asks torch which of its libraries to load."""
    asked = "[torch.cpu._is_avx2_supported(), torch.cpu._is_avx512_supported(), torch.cpu._is_amx_tile_supported()]"
    program = f"import torch; print({asked}, torch.backends.cpu.get_cpu_capability())"
    done = subprocess.run(
        [sys.executable, "-c", program], env=vllm_environment("avx2"), capture_output=True, text=True, check=True
    )
    assert done.stdout == "[True, False, False] AVX2\n"


def test_the_kernels_of_a_run_are_reported() -> None:
    log = "decode-0   | 14:50 INFO    pillion.worker: all operators run on torch, 2 threads: asked for\nother\n"
    assert about_kernels(log + log) == "all operators run on torch, 2 threads: asked for"
    assert about_kernels("other") == ""


def test_a_paused_session_ends_with_its_children() -> None:
    process = subprocess.Popen(["sh", "-c", "trap '' INT; sleep 60 & wait; exit 0"], start_new_session=True)
    top = psutil.Process(process.pid)
    children = wait_for("the session's child", top.children)
    top.suspend()
    stop_session(process, timeout_s=0.1)
    assert process.returncode is not None
    psutil.wait_procs(children, timeout=WITHIN_S)
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)


FAKE_LLAMA = '''
"""As much of llama_cpp as the driver calls: it checks that the whole prompt and then each token arrive, in order."""
import types

__version__ = "fake"
seen = []




class _Ids(type):
    def __mul__(cls, count):
        return lambda *ids: list(ids)


class llama_token(metaclass=_Ids): ...


llama_backend_init = lambda: None
llama_model_default_params = lambda: None
llama_model_load_from_file = lambda path, params: path == b"m.gguf"
llama_context_default_params = lambda: types.SimpleNamespace(n_batch=4)
llama_init_from_model = lambda model, params: params
llama_sampler_init_greedy = lambda: None
llama_get_memory = lambda context: None
llama_memory_clear = lambda memory, data: seen.clear()
llama_batch_get_one = lambda tokens, count: (tokens, count)


def llama_decode(context, batch):
    tokens, count = batch
    assert len(tokens) == count <= 4
    seen.extend(tokens)
    return 0


def llama_sampler_sample(sampler, context, index):
    assert len(seen) >= 6
    return len(seen)
'''


def test_llama_cpp_reads_one_request_per_line(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama_cpp.py").write_text(FAKE_LLAMA)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    system = llama_system("llama.cpp", sys.executable, pathlib.Path("m.gguf"))
    alone = ClosedLoad(input_tokens=6, output_tokens=5, concurrency=1, requests=2)
    assert system.takes(alone)
    assert not system.takes(LOAD)
    with system.running() as running:
        assert running.version == "fake"
        run = running.measure(alone, 1)
    assert [len(record.messages) for record in run.records] == [5, 5]
    assert all(gap >= 0 for record in run.records for gap in record.itl_s)
