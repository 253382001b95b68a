"""The deltas of one call with one prompt or several, always all that are there in one batch.

one prompt:       its generation is read directly
several prompts:  a task each reads its generation into one bounded queue; at most MAX_PROMPTS_AT_ONCE run at a time
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from pillion.errors import Internal, PillionError
from pillion.gateway.request.job import PlacedPrefix
from pillion.gateway.request.runner import DEFECT, Generation
from pillion.types import Delta, GenerateRequest, SamplingParams, Usage

log = logging.getLogger("pillion.gateway")

MAX_PROMPTS_AT_ONCE = 32
# Deltas that wait for one client. Further ones are merged in their generations.
MAX_WAITING_DELTAS = 256
# Most deltas of one write.
MAX_BATCH_DELTAS = 256

StartGeneration = Callable[[GenerateRequest], Awaitable[Generation]]
# The index of a prompt, and its delta.
DeltaBatch = list[tuple[int, Delta]]


class DeltaReader:
    """Starts generations with the first ``read``. ``close`` cancels all of them, at any time (I8)."""

    def __init__(self, requests: Sequence[GenerateRequest], start: StartGeneration) -> None:
        self._requests = requests
        self._start = start
        # By number of their prompts, in the order in which they were started.
        self._generations: dict[int, Generation] = {}
        self._pumps: list[asyncio.Task[None]] = []
        self._queue: asyncio.Queue[tuple[int, Delta | PillionError] | None] = asyncio.Queue(MAX_WAITING_DELTAS)
        # The prompt whose error was raised.
        self.failed = 0
        self._running = 0
        # The next deltas, at least one; none at the end. Raises PillionError.
        self.read: Callable[[], Awaitable[DeltaBatch]] = self._read_one if len(requests) == 1 else self._read_several

    @property
    def fingerprint(self) -> str:
        """Names the weights, adapter included, in OpenAI's form; known after the first batch."""
        return next(iter(self._generations.values())).job.system_fingerprint

    def cut_tokens(self) -> int | None:
        """Most tokens of an answer, where the contexts of the prompts leave fewer than were asked for; else None. Known
        after the first batch, for the prompts that run by then."""
        resolved = [generation.job.resolved for generation in self._generations.values()]
        return min((one.max_tokens for one in resolved if one.cut), default=None)

    @property
    def sampling(self) -> SamplingParams:
        """How the first prompt's answers are sampled, the model's defaults included; known after the first batch."""
        return next(iter(self._generations.values())).job.resolved.sampling

    def first_token(self, prompt: int) -> int:
        """The first token of a prompt of which a delta has come."""
        return self._generations[prompt].job.prompt[0]

    def first_prompt(self) -> tuple[tuple[int, ...], PlacedPrefix | None]:
        """The first prompt's ids, and where its blocks are; known after the first batch."""
        generation = self._generations[0]
        return generation.job.prompt, generation.placed_prefix()

    def usage(self) -> Usage:
        """Tokens of all prompts so far."""
        return sum((generation.usage() for generation in self._generations.values()), Usage(0, 0, 0))

    async def _read_several(self) -> DeltaBatch:
        if not self._pumps:
            turns = asyncio.Semaphore(MAX_PROMPTS_AT_ONCE)
            self._running = len(self._requests)
            self._pumps = [asyncio.create_task(self._pump(n, turns)) for n in range(len(self._requests))]
        batch: DeltaBatch = []
        while self._running and not batch:
            batch = self._taken(await self._queue.get(), batch)
        while self._queue.qsize() and len(batch) < MAX_BATCH_DELTAS:
            batch = self._taken(self._queue.get_nowait(), batch)
        return batch

    def close(self) -> None:
        """Cancels what still runs."""
        for pump in self._pumps:
            pump.cancel()
        for generation in self._generations.values():
            generation.cancel()

    async def _read_one(self) -> DeltaBatch:
        if not self._generations:
            self._generations[0] = await self._start(self._requests[0])
        generation = self._generations[0]
        try:
            batch = [(0, await anext(generation))]
        except StopAsyncIteration:
            return []
        while generation.pending and len(batch) < MAX_BATCH_DELTAS:
            batch.append((0, await anext(generation)))
        return batch

    async def _pump(self, number: int, turns: asyncio.Semaphore) -> None:
        async with turns:
            try:
                generation = self._generations[number] = await self._start(self._requests[number])
                async for delta in generation:
                    await self._queue.put((number, delta))
                await self._queue.put(None)
            except PillionError as error:
                await self._queue.put((number, error))
            except Exception:
                # A defect must end the response: the client would wait for ever.
                log.exception("a prompt of a list failed")
                await self._queue.put((number, Internal(DEFECT)))

    def _taken(self, item: tuple[int, Delta | PillionError] | None, batch: DeltaBatch) -> DeltaBatch:
        if item is None:
            self._running -= 1
            return batch
        number, came = item
        if isinstance(came, PillionError):
            self.failed = number
            raise came
        batch.append((number, came))
        return batch
