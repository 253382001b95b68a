"""The service benchmark counts what its clients saw: tokens, gaps and rates, whoever answers."""

from __future__ import annotations

import argparse
import asyncio
import json
import pathlib
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence

import psutil
import pytest

from benchmarks import cpu_service
from benchmarks.closed_loop import Answer, Load, Run, drive, figures
from benchmarks.openai_stream import OpenAIStream, UsageCounter
from benchmarks.peers import about_kernels, llama_system, stop_session
from benchmarks.report import percentile

LOAD = Load(input_tokens=6, output_tokens=5, concurrency=3, requests=8)


def message(completion_tokens: int, text: str = "x") -> bytes:
    """A line as vLLM sends it."""
    said = {"choices": [{"index": 0, "text": text}], "usage": {"completion_tokens": completion_tokens}}
    return b"data: " + json.dumps(said).encode()


def test_percentile_is_nearest_rank() -> None:
    assert percentile([5.0], 99) == 5.0
    assert percentile(list(range(200)), 50) == 100
    assert percentile(list(range(200)), 99) == 198
    assert percentile(list(range(10)), 99) == 9


def test_tokens_are_counted_by_usage_and_not_by_messages() -> None:
    counter = UsageCounter()
    # Several tokens in one message; a token without text; the closing message that repeats the usage.
    lines = [message(1), b"", message(4), b": comment", message(5, text=""), message(5), b"data: [DONE]", b"\r"]
    assert [counter.line(line) for line in lines] == [1, 0, 3, 0, 1, 0, 0, 0]
    assert counter.tokens == 5


def test_a_stream_that_cannot_be_counted_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="continuous_usage_stats"):
        UsageCounter().line(b'data: {"choices": [{"text": "x"}]}')
    with pytest.raises(RuntimeError, match="too long"):
        UsageCounter().line(b'data: {"error": {"message": "too long"}}')


def test_figures_of_an_answer() -> None:
    answer = Answer(10.0, ((10.5, 2), (10.6, 1), (11.0, 4)))
    assert answer.tokens == 7
    assert answer.ttft_ms == pytest.approx(500)
    assert answer.itl_ms == pytest.approx([100, 400])
    assert answer.decode_tokens_per_s == pytest.approx(5 / 0.5)
    assert Answer(10.0, ((10.5, 7),)).decode_tokens_per_s == 0


def test_figures_of_a_run() -> None:
    load = Load(input_tokens=100, output_tokens=3, concurrency=1, requests=2)
    answers = (Answer(0.0, ((0.1, 1), (0.2, 1), (0.4, 1))), Answer(1.0, ((1.3, 1), (1.4, 2))))
    said = figures(load, Run(answers, seconds=2.0, driver_cpu_s=0.1))
    assert said["output_tokens_per_s"] == pytest.approx(3.0)
    assert said["ttft_p50_ms"] == pytest.approx(200)
    assert said["ttft_p99_ms"] == pytest.approx(300)
    assert said["itl_p50_ms"] == pytest.approx(100)
    assert said["itl_max_ms"] == pytest.approx(200)
    assert said["tokens_per_message"] == pytest.approx(6 / 5)
    assert said["driver_cpu_share"] == pytest.approx(0.05)
    assert said["prefill_tokens_per_s"] == pytest.approx(500)


def test_prompts_repeat_for_a_seed_and_for_nothing_else() -> None:
    assert LOAD.prompts(1) == LOAD.prompts(1)
    longer = Load(input_tokens=12, output_tokens=5, concurrency=3, requests=8)
    heads = [tuple(ids[:6]) for load, seed in ((LOAD, 1), (LOAD, 2), (longer, 1)) for ids in load.prompts(seed)]
    assert len(set(heads)) == 24


async def test_the_loop_is_closed() -> None:
    """Never more streams than clients, always as many while prompts are left, and each prompt once."""
    asked: list[tuple[int, ...]] = []
    now, most = 0, 0

    async def stream(prompt: Sequence[int], max_tokens: int) -> AsyncIterator[int]:
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        asked.append(tuple(prompt))
        for tokens in (0, 2, max_tokens - 2):
            await asyncio.sleep(0)
            yield tokens
        now -= 1

    run = await drive(stream, LOAD, seed=3)
    assert most == LOAD.concurrency
    assert sorted(asked) == sorted(tuple(ids) for ids in LOAD.prompts(3))
    assert [[tokens for _, tokens in answer.messages] for answer in run.answers] == [[2, 3]] * LOAD.requests


async def test_an_answer_of_another_length_does_not_count() -> None:
    async def stream(prompt: Sequence[int], max_tokens: int) -> AsyncIterator[int]:
        yield max_tokens - 1

    with pytest.raises(ExceptionGroup) as caught:
        await drive(stream, LOAD, seed=3)
    assert "4 tokens" in str(caught.value.exceptions[0])


async def answer_once(body: bytes, cuts: Sequence[int], status: str = "200 OK") -> tuple[list[int], dict[str, object]]:
    """What a client reads from a server that sends ``body`` in chunks cut at ``cuts``, and what it asked."""
    asked: dict[str, object] = {}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split()[0])
        asked.update(json.loads(await reader.readexactly(length)))
        writer.write(f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for begin, end in zip((0, *cuts), (*cuts, len(body)), strict=True):
            writer.write(f"{end - begin:x}\r\n".encode() + body[begin:end] + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        found = [tokens async for tokens in OpenAIStream("127.0.0.1", port, "m")([7, 8], 5)]
    return found, asked


async def test_chunks_may_cut_messages_anywhere() -> None:
    body = b"\n\n".join((message(1), message(3), message(5), message(5), b"data: [DONE]", b""))
    for cuts in ((), (3,), (len(message(1)) + 1, 90, 91), tuple(range(1, len(body)))):
        found, asked = await answer_once(body, cuts)
        assert found == [1, 2, 2]
    assert asked["prompt"] == [7, 8]
    assert asked["max_tokens"] == 5
    assert asked["ignore_eos"] is True


async def test_a_refusal_is_told() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)404.*no such model"):
        await answer_once(b"no such model", (), status="404 Not Found")


def test_rows_pair_the_rounds() -> None:
    found = {
        (LOAD.name, "pillion"): [{"output_tokens_per_s": 20.0}, {"output_tokens_per_s": 30.0}],
        (LOAD.name, "vllm"): [{"output_tokens_per_s": 10.0}, {"output_tokens_per_s": 20.0}],
    }
    other = Load(input_tokens=60, output_tokens=5, concurrency=3, requests=8)
    rows = cpu_service.rows_of(found, [LOAD, other], ["pillion", "vllm", "llama.cpp"])
    assert [(row["load"], row["system"]) for row in rows] == [(LOAD.name, "pillion"), (LOAD.name, "vllm")]
    assert rows[0]["ratio"] == {"min": 1.5, "median": 1.75, "max": 2.0}
    alone = cpu_service.rows_of({(LOAD.name, "pillion"): found[LOAD.name, "pillion"]}, [LOAD], ["pillion"])
    assert "ratio" not in alone[0]


def test_a_peer_that_is_absent_is_left_out_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    args = argparse.Namespace(
        pillion=["a=--cpu-threads 2", "b"], vllm="/no/such/vllm", vllm_flags="", llama_python=None, only=None
    )
    found = cpu_service.systems(args, pathlib.Path("folder"), "bfloat16", pathlib.Path("file"))
    assert [(system.name, system.flags) for system in found] == [("a", ("--cpu-threads", "2")), ("b", ())]
    said = capsys.readouterr().out
    assert "vllm is left out" in said
    assert "llama.cpp is left out" in said


def test_the_kernels_of_a_run_are_told() -> None:
    log = "decode-0   | 14:50 INFO    pillion.worker: all operators run on torch, 2 threads: asked for\nother\n"
    assert about_kernels(log + log) == "all operators run on torch, 2 threads: asked for"
    assert about_kernels("other") == ""


def test_a_paused_session_ends_with_its_children() -> None:
    process = subprocess.Popen(["sh", "-c", "trap '' INT; sleep 60 & wait; exit 0"], start_new_session=True)
    top = psutil.Process(process.pid)
    while not (children := top.children()):
        assert process.poll() is None
    top.suspend()
    stop_session(process, timeout_s=0.1)
    assert process.returncode is not None
    psutil.wait_procs(children, timeout=5)
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


def test_llama_cpp_is_asked_line_by_line(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama_cpp.py").write_text(FAKE_LLAMA)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    system = llama_system("llama.cpp", sys.executable, pathlib.Path("m.gguf"))
    alone = Load(input_tokens=6, output_tokens=5, concurrency=1, requests=2)
    assert system.takes(alone)
    assert not system.takes(LOAD)
    with system.running() as running:
        assert running.version == "fake"
        run = running.measure(alone, 1)
    assert [len(answer.messages) for answer in run.answers] == [5, 5]
    assert all(gap >= 0 for answer in run.answers for gap in answer.itl_ms)
