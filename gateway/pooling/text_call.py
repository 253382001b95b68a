"""Texts of one call as requests of the gateway that generate nothing and end with a row of numbers each.

requests --validated, tokenized once, truncated--> ids of all texts --in order, some at a time--> rows, usage

All texts are validated before the first one runs, so a wrong one is refused before anything is computed. A request that
loses its worker is replayed by the gateway like any other; its row comes once, with its end.

A text with the prefix of an earlier one waits until that one has finished, since its blocks are in the pool then. It
waits for the earliest text with the longest common prefix, so texts that follow the same one run concurrently.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from opentelemetry import context as otel_context

from pillion.errors import DeadlineExceeded, FieldViolation, Internal, InvalidRequest, PillionError
from pillion.gateway.admission.quotas import CountedCall
from pillion.gateway.admission.tenants import OPEN, Tenant
from pillion.gateway.gateway import Gateway, ModelEntry
from pillion.gateway.pooling.pooling_files import Vector
from pillion.gateway.pooling.pooling_rows import LAST_ROW, PoolingRows
from pillion.gateway.request.request_runner import RequestRunner
from pillion.gateway.request.validation import too_long
from pillion.gateway.tokens.tokenizer import TOKEN_BYTES
from pillion.rules.weighted_limit import WeightedLimit
from pillion.types import ChatOptions, GenerateRequest, SamplingParams, Usage

# Truncate to the model's limit, as vLLM's truncate_prompt_tokens does.
CUT_TO_MODEL = -1
MAX_TEXTS = 2048
# Max texts of a call in the gateway at once: enough to fill steps, but few compared to other clients' streams.
MAX_TEXTS_AT_ONCE = 32
# Max steps of the workers that the texts in the gateway fill; it bounds the wait of another client's prompt. With one
# step, the workers would idle between two texts.
MAX_STEPS_AT_ONCE = 4
MAX_TOKENIZED_AT_ONCE = 4

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TextRows:
    """A row of numbers and the token ids of each text, in order, and the total usage."""

    rows: list[Vector]
    token_ids: list[tuple[int, ...]]
    usage: Usage


@dataclass(slots=True)
class TextCall:
    """Runner of the texts of one call.

    Attributes:
        max_tokens: max tokens of a text for this checkpoint.
        cut_tokens: number of tokens to truncate texts to; CUT_TO_MODEL means ``max_tokens``, None no truncation.
        deadline: monotonic seconds; None for no limit.
        pooled: rows to compute.
    """

    gateway: Gateway
    model: ModelEntry
    tenant: Tenant | None
    max_tokens: int
    cut_tokens: int | None = None
    deadline: float | None = None
    parent: otel_context.Context | None = None
    pooled: PoolingRows = LAST_ROW

    def __post_init__(self) -> None:
        if self.cut_tokens == CUT_TO_MODEL:
            self.cut_tokens = self.max_tokens
        if self.cut_tokens is not None and not 1 <= self.cut_tokens <= self.max_tokens:
            text = f"{self.cut_tokens} is not in [1, {self.max_tokens}], nor {CUT_TO_MODEL}, which means the maximum"
            raise InvalidRequest.of(FieldViolation("truncate_prompt_tokens", text))

    async def rows(
        self, requests: Sequence[GenerateRequest], names: Sequence[str], seconds: Sequence[int] = ()
    ) -> TextRows:
        """Return the row of each text.

        Args:
            names: fields of the texts, for errors.
            seconds: position of the second text in each pair; empty for texts that are no pairs.

        Raises what Gateway.generate raises, for the first text that fails; the others are cancelled.
        """
        tokenized = await self.read(requests, names)
        ids = [request.token_ids for request in tokenized]
        served = await self.gateway.cluster.served_soon(self.model.limits.name, self.model.fingerprint)
        leader_of: list[int | None] = [None] * len(ids)
        if self.gateway.caches_prefixes and self.pooled.uses_prefixes:
            # On a thread for long texts, since every token is compared.
            size_bytes = TOKEN_BYTES * sum(map(len, ids))
            leader_of = await self.gateway.off_loop(self.tenant, size_bytes, leaders, ids, served.block_size)
        finished = [asyncio.Event() for _ in tokenized]
        text_limit = asyncio.Semaphore(self._max_at_once(ids))
        all_tokens = sum(map(len, ids))
        # No limit if a worker does not report its tokens per step.
        step_tokens = self.gateway.cluster.text_step_tokens(served)
        token_limit = WeightedLimit(MAX_STEPS_AT_ONCE * step_tokens or 1 << 62)
        runners: dict[int, RequestRunner] = {}

        async def run(number: int) -> Vector:
            if (leader := leader_of[number]) is not None:
                await finished[leader].wait()
            async with text_limit, token_limit.taken(len(ids[number])):
                second = seconds[number] if seconds else 0
                runner = runners[number] = await self._start(tokenized[number], second, quota)
                row = await _row_of(runner)
            finished[number].set()
            return row

        async with self.gateway.counted(self.tenant, names, all_tokens) as quota:
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(_named(name, run(number))) for number, name in enumerate(names)]
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
            finally:
                for runner in runners.values():
                    runner.cancel()
        usage = sum((runner.usage() for runner in runners.values()), Usage(0, 0, 0))
        return TextRows([task.result() for task in tasks], ids, usage)

    async def read(self, requests: Sequence[GenerateRequest], names: Sequence[str]) -> list[GenerateRequest]:
        """Return the requests validated, with token ids instead of texts, truncated. Raises InvalidRequest, naming the
        first text that is invalid or too long."""
        prompt_only = SamplingParams(max_tokens=0)
        texts = [replace(request, sampling=prompt_only) for request in requests]
        for name, request in zip(names, texts, strict=True):
            await _named(name, self.gateway.check(request, self.tenant))

        async def read_one(name: str, request: GenerateRequest) -> GenerateRequest:
            ids = await _named(name, self.ids_of(request))
            if len(ids) > self.max_tokens:
                raise too_long(len(ids), name, self.max_tokens, answer_tokens=0)
            return as_ids(request, ids)

        return await run_limited([read_one(name, request) for name, request in zip(names, texts, strict=True)])

    async def ids_of(self, request: GenerateRequest) -> tuple[int, ...]:
        """Return the ids of a text or a conversation, truncated as the call requests."""
        keep, tenant = self.cut_tokens, self.tenant or OPEN
        if keep is None:
            return await self.whole_ids(request)
        if request.messages:
            cut = replace(request.sampling, truncate_prompt_tokens=keep, truncation_side="right")
            return await self.whole_ids(replace(request, sampling=cut))
        if request.token_ids:
            return request.token_ids[:keep]
        encode = self.model.tokenizer.encode_cut
        return await self.gateway.on_thread(tenant, len(request.text), encode, request.text, keep)

    async def whole_ids(self, request: GenerateRequest) -> tuple[int, ...]:
        """Return the ids of a text without truncation."""
        return await self.gateway.prompt_ids(request, self.model, self.tenant or OPEN)

    async def _start(self, request: GenerateRequest, second: int, quota: CountedCall) -> RequestRunner:
        left_s = None if self.deadline is None else self.deadline - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise DeadlineExceeded("the call's deadline passed before all of its texts had started")
        return await self.gateway.generate(
            request,
            tenant=self.tenant,
            timeout_s=left_s,
            parent=self.parent,
            entry=self.model,
            counted=quota,
            pooling=self.pooled.params(request.token_ids, second),
            streamed=False,
        )

    def _max_at_once(self, texts: Sequence[Sequence[int]]) -> int:
        """Return the max number of texts in the gateway at once, within its limits and the tenant's."""
        longest = max(map(len, texts))
        return min(MAX_TEXTS_AT_ONCE, self.gateway.admission.most_at_once(self.tenant or OPEN, longest))


def as_ids(request: GenerateRequest, token_ids: tuple[int, ...]) -> GenerateRequest:
    """Replace a request's text with its token ids."""
    return replace(request, text="", messages=(), chat=ChatOptions(), token_ids=token_ids)


async def run_limited(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines that tokenize texts, at most MAX_TOKENIZED_AT_ONCE at a time; return their results in order.

    Raises the first error, which cancels the others.
    """
    limit = asyncio.Semaphore(MAX_TOKENIZED_AT_ONCE)

    async def run(work: Coroutine[Any, Any, T]) -> T:
        async with limit:
            return await work

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(work)) for work in works]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        # Close those that were never awaited, to avoid Python's warning.
        for work in works:
            work.close()
    return [task.result() for task in tasks]


async def _row_of(runner: RequestRunner) -> Vector:
    """Wait for the end of a request and return its row. Raises PillionError."""
    async for _ in runner:
        pass
    if not runner.vector:
        raise Internal("a worker of an older version returned no vector")
    return np.frombuffer(runner.vector, "<f4").astype(np.float32)


async def _named(name: str, work: Awaitable[T]) -> T:
    """Await work for one text, and add the text's name to its errors."""
    try:
        return await work
    except InvalidRequest as error:
        raise _at(name, error) from None
    except PillionError as error:
        error.add_note(name)
        raise


def _at(name: str, error: InvalidRequest) -> InvalidRequest:
    """Replace a text's own fields in an error by the text's name: ``messages[0]`` becomes ``inputs[2][0]``."""
    named = []
    for one in error.violations:
        own = next((field for field in ("text", "token_ids", "messages") if one.field.startswith(field)), "")
        named.append(replace(one, field=f"{name}{one.field.removeprefix(own)}") if own else one)
    return InvalidRequest.of(*named) if named else error


def leaders(texts: Sequence[Sequence[int]], block_tokens: int) -> list[int | None]:
    """Return, for each text, the index of the earlier text that it waits for: the first one with the longest common
    prefix in whole blocks; None if no earlier text shares a block.

    A prefix excludes a text's last token, which is always computed.
    """
    # Trie: nodes are numbers, the root is 0; a node's owner is the earliest text whose path contains it.
    nodes: dict[tuple[int, tuple[int, ...]], int] = {}
    owners: list[int] = []
    leader_of: list[int | None] = []
    for number, ids in enumerate(texts):
        node, leader = 0, None
        for start in range(0, len(ids) - block_tokens, block_tokens):
            step = node, tuple(ids[start : start + block_tokens])
            if step in nodes:
                leader = owners[nodes[step] - 1]
            else:
                owners.append(number)
                nodes[step] = len(owners)
            node = nodes[step]
        leader_of.append(leader)
    return leader_of
