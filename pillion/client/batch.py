"""Batches of the clients: many requests, at most ``concurrency`` at once, results in the order of the prompts.

prompts --> [ concurrency streams at once ] --> results, by index          optional progress bar in the terminal
              Overloaded --wait for retry_after_ms, then retry, up to OVERLOAD_RETRIES times
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from pillion.client.client_requests import sampling_of
from pillion.client.outputs import OutputCollector, RequestOutput
from pillion.errors import Cancelled, Overloaded, PillionError
from pillion.tasks import end_tasks
from pillion.types import Delta, GenerateRequest, SamplingParams, Value

DEFAULT_CONCURRENCY = 32
MAX_CONCURRENCY = 1024
OVERLOAD_RETRIES = 10
MAX_OVERLOAD_WAIT_MS = 10_000

Result = RequestOutput[Value] | PillionError


def check_concurrency(concurrency: int) -> None:
    """Raise ValueError for a concurrency out of range."""
    if not 1 <= concurrency <= MAX_CONCURRENCY:
        raise ValueError(f"concurrency {concurrency} is not in [1, {MAX_CONCURRENCY}]")


def one_each(
    sampling: SamplingParams | Sequence[SamplingParams] | None, fields: Mapping[str, Any], count: int
) -> list[SamplingParams]:
    """Return a list of ``count`` sampling parameters, one per prompt, by :func:`sampling_of`. Raises ValueError if
    ``sampling`` has another number."""
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling_of(sampling, fields)] * count
    if len(sampling) != count:
        raise ValueError(f"{count} prompts and {len(sampling)} sampling parameters: give one, or one for each")
    return [sampling_of(each, fields) for each in sampling]


def run_batch(
    start: Callable[[GenerateRequest], Any],
    read: Callable[[Any], Iterator[Delta]],
    requests: Sequence[GenerateRequest],
    concurrency: int,
    progress: bool,
    raise_errors: bool,
) -> list[Result]:
    """Run the blocking client's batch, with a thread per stream in flight, and return the results in order.

    Args:
        start: starts a request's call, which has ``cancel()``.
        read: returns the deltas of a call; raises PillionError.
        progress: show a bar.
        raise_errors: end the batch at the first PillionError, and raise it; else an error is its request's result.
    """
    ended, lock, calls = threading.Event(), threading.Lock(), set[Any]()

    def answer(request: GenerateRequest) -> RequestOutput:
        for attempt in range(OVERLOAD_RETRIES + 1):
            collector = collector_of(request)
            call = start(request)
            with lock:
                calls.add(call)
                if ended.is_set():
                    call.cancel()
            try:
                for delta in read(call):
                    collector.add(delta)
                return collector.output()
            except Overloaded as error:
                if attempt == OVERLOAD_RETRIES:
                    raise
                if ended.wait(wait_s(error)):
                    break
            finally:
                with lock:
                    calls.discard(call)
        raise Cancelled("the batch has ended")

    results: list[Result | None] = [None] * len(requests)
    with ThreadPoolExecutor(concurrency, "pillion-batch") as pool, progress_bar(len(requests), progress) as advance:
        try:
            works = {pool.submit(answer, request): index for index, request in enumerate(requests)}
            for work in as_completed(works):
                try:
                    results[works[work]] = work.result()
                except PillionError as error:
                    if raise_errors:
                        raise
                    results[works[work]] = error
                advance()
        finally:
            with lock:
                ended.set()
                for call in calls:
                    call.cancel()
            pool.shutdown(cancel_futures=True)
    return [result for result in results if result is not None]


async def run_batch_async(
    start: Callable[[GenerateRequest], Any],
    read: Callable[[Any], AsyncIterator[Delta]],
    requests: Sequence[GenerateRequest],
    concurrency: int,
    progress: bool,
    raise_errors: bool,
) -> list[Result]:
    """Run the asyncio client's batch, with the arguments of :func:`run_batch`. Cancelling it cancels the calls in
    flight."""
    results: list[Result | None] = [None] * len(requests)
    todo = iter(enumerate(requests))

    async def work() -> None:
        for index, request in todo:
            try:
                results[index] = await _answer(start, read, request)
            except PillionError as error:
                if raise_errors:
                    raise
                results[index] = error
            advance()

    with progress_bar(len(requests), progress) as advance:
        tasks = [asyncio.create_task(work()) for _ in range(min(concurrency, len(requests)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            await end_tasks(*tasks)
    return [result for result in results if result is not None]


async def _answer(
    start: Callable[[GenerateRequest], Any], read: Callable[[Any], AsyncIterator[Delta]], request: GenerateRequest
) -> RequestOutput:
    for attempt in range(OVERLOAD_RETRIES + 1):
        collector = collector_of(request)
        try:
            async for delta in read(start(request)):
                collector.add(delta)
            return collector.output()
        except Overloaded as error:
            if attempt == OVERLOAD_RETRIES:
                raise
            await asyncio.sleep(wait_s(error))
    raise AssertionError("the last attempt returns or raises")


def collector_of(request: GenerateRequest) -> OutputCollector:
    """Return an empty collector for the request's deltas."""
    sampling = request.sampling
    return OutputCollector(
        request.text or None,
        request.token_ids or None,
        sampling.logprobs is not None,
        with_prompt_logprobs=sampling.prompt_logprobs is not None,
    )


def wait_s(error: Overloaded) -> float:
    """Return the delay in seconds before a refused request is retried: the server's, within limits."""
    return min(max(error.retry_after_ms, 100), MAX_OVERLOAD_WAIT_MS) / 1000


@contextlib.contextmanager
def progress_bar(total: int, wanted: bool, title: str = "prompts") -> Iterator[Callable[[], None]]:
    """Show a bar on standard error while the block runs; yield the function to call per finished item."""
    if not wanted:
        yield lambda: None
        return
    from rich import progress
    from rich.console import Console

    counts = (progress.TextColumn(title), progress.BarColumn(), progress.MofNCompleteColumn())
    times = (progress.TimeElapsedColumn(), progress.TimeRemainingColumn())
    # Once a second, because drawing shares a core with the streams.
    with progress.Progress(*counts, *times, console=Console(stderr=True), refresh_per_second=1) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)
