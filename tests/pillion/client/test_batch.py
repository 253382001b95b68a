"""Many requests at once: order, limits, errors in their places, and nothing that continues after an end."""

from __future__ import annotations

import asyncio
import io
import sys
import threading
from typing import Any

import pytest

from lab.testbed.conditions import until
from pillion import AsyncClient, Client, InvalidRequest, Overloaded, PillionError, RequestOutput, SamplingParams
from pillion.client.batch import MAX_CONCURRENCY, one_each
from tests.support.fake_components import FakeCluster, running_fake_cluster


async def batch(
    fakes: FakeCluster, blocking: bool, *arguments: Any, **options: Any
) -> list[RequestOutput | PillionError]:
    if not blocking:
        return await fakes.client.batch(*arguments, **options)
    with Client(fakes.gateway.grpc_address) as client:
        return await asyncio.to_thread(client.batch, *arguments, **options)


def texts(results: list[RequestOutput | PillionError]) -> list[str]:
    return [
        result.outputs[0].text if isinstance(result, RequestOutput) else type(result).__name__ for result in results
    ]


@pytest.fixture(params=[True, False], ids=["Client", "AsyncClient"])
def blocking(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


async def test_batch_results_are_in_prompt_order(blocking: bool) -> None:
    async with running_fake_cluster("The answer.") as fakes:
        prompts = ["Once", [5, 6, 7], [{"role": "user", "content": "x"}]] * 4
        sampling = [SamplingParams(max_tokens=1 + n, seed=n) for n in range(12)]
        results = await batch(fakes, blocking, prompts, sampling=sampling, concurrency=5, priority=3, cache_salt="s")
        assert texts(results) == ["The answer."[: 1 + n] for n in range(12)]
        for result, prompt in zip(results, prompts, strict=True):
            assert isinstance(result, RequestOutput)
            assert result.finished
            assert result.prompt == (prompt if isinstance(prompt, str) else None)
            assert result.prompt_token_ids == (prompt if prompt == [5, 6, 7] else None)
            assert result.usage is not None
            assert result.outputs[0].finish_reason in ("length", "stop")
        assert {submit.priority for submit in fakes.decode.submits} == {3}
        await fakes.settled()


async def test_batch_concurrency_is_bounded(blocking: bool) -> None:
    async with running_fake_cluster("The answer.") as fakes:
        fakes.decode.gate.clear()
        work = asyncio.create_task(batch(fakes, blocking, ["x"] * 9, concurrency=3))
        await until("three submits", lambda: len(fakes.decode.submits) == 3)
        assert fakes.gateway.gateway.active_requests == 3
        fakes.decode.gate.set()
        assert texts(await work) == ["The answer."] * 9
        assert fakes.decode.most_streams == 3


async def test_errors_replace_results_or_end_the_batch(blocking: bool) -> None:
    async with running_fake_cluster("The answer.") as fakes:
        prompts = ["a", "y" * 300, "b"]
        results = await batch(fakes, blocking, prompts, raise_errors=False)
        assert texts(results) == ["The answer.", "InvalidRequest", "The answer."]
        fakes.decode.gate.clear()
        with pytest.raises(InvalidRequest, match="300 in your prompt"):
            await batch(fakes, blocking, prompts)
        fakes.decode.gate.set()
        await fakes.settled()


async def test_overloaded_requests_are_retried(blocking: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pillion.gateway.admission.admission.RETRY_AFTER_MS", 10)
    async with running_fake_cluster("The answer.", max_inflight_requests=2) as fakes:
        fakes.decode.gate.clear()
        work = asyncio.create_task(batch(fakes, blocking, ["x"] * 4, concurrency=4))
        await until("two submits", lambda: len(fakes.decode.submits) == 2)
        fakes.decode.gate.set()
        assert texts(await work) == ["The answer."] * 4


async def test_cancelling_the_async_batch_cancels_its_requests() -> None:
    async with running_fake_cluster("The answer.") as fakes:
        fakes.decode.gate.clear()
        work = asyncio.create_task(batch(fakes, False, ["x"] * 9, concurrency=3))
        await until("three submits", lambda: len(fakes.decode.submits) == 3)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        await fakes.settled()


async def test_an_interrupted_batch_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C arrives while the caller's thread waits for the next result."""
    async with running_fake_cluster("The answer.") as fakes:
        fakes.decode.gate.clear()
        loop = asyncio.get_running_loop()

        def ask() -> None:
            with Client(fakes.gateway.grpc_address) as client:
                from pillion.client import batch as module

                def interrupted(*_: Any) -> Any:
                    asked = until("three submits", lambda: len(fakes.decode.submits) == 3)
                    asyncio.run_coroutine_threadsafe(asked, loop).result()
                    raise KeyboardInterrupt

                monkeypatch.setattr(module, "as_completed", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    client.batch(["x"] * 9, concurrency=3)

        await asyncio.to_thread(ask)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("pillion-batch")]
        await fakes.settled()


async def test_the_progress_bar_is_written_to_stderr(blocking: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_fake_cluster("The answer.") as fakes:
        shown = io.StringIO()
        monkeypatch.setattr(sys, "stderr", shown)
        await batch(fakes, blocking, ["x"] * 3, progress=True)
        assert "3/3" in shown.getvalue()
        assert await batch(fakes, blocking, []) == []


def test_invalid_arguments_are_rejected() -> None:
    with Client("127.0.0.1:1") as client:
        for concurrency in (0, MAX_CONCURRENCY + 1):
            with pytest.raises(ValueError, match="concurrency"):
                client.batch(["x"], concurrency=concurrency)
        with pytest.raises(ValueError, match="2 prompts and 1 sampling"):
            client.batch(["x", "y"], sampling=[SamplingParams()])
        with pytest.raises(TypeError, match="not both"):
            client.batch(["x"], sampling=SamplingParams(), n=2)
    assert one_each(None, {}, 2) == [SamplingParams()] * 2


async def test_persistent_overload_is_an_error() -> None:
    """After OVERLOAD_RETRIES; each wait is the time that the gateway names."""
    from pillion.client import batch as module

    waits = []

    async def stream(request: Any) -> Any:
        waits.append(1)
        raise Overloaded("full", 1)
        yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "wait_s", lambda error: 0.0)
        (result,) = await module.run_batch_async(
            lambda request: request, stream, [module.GenerateRequest(text="x")], 1, False, False
        )
    assert isinstance(result, Overloaded)
    assert len(waits) == module.OVERLOAD_RETRIES + 1
    assert module.wait_s(Overloaded("", 10**9)) == module.MAX_OVERLOAD_WAIT_MS / 1000
    assert isinstance(AsyncClient("127.0.0.1:1"), AsyncClient)
