"""Log probabilities of prompts over a real node and real gRPC: every token once, whatever happens to the stream."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pillion.engine.scheduling import scheduler as scheduling
from pillion.types import MAX_PROMPT_LOGPROBS, FinishReason, SamplingParams, TokenLogprob
from pillion.v1.decode_pb2 import Sibling
from tests.support.ahead_backend import AheadBackend
from tests.support.fake_backend import VOCAB_SIZE, FakeBackend, greedy, kv_of, logits_of
from tests.support.workers import Answer, Connection, Workers, connected, running_workers, submit_of

PROMPT = [(position * 7 + 3) % VOCAB_SIZE for position in range(41)]
PLAIN = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, seed=11)
SCORED = replace(PLAIN, prompt_logprobs=3)


def expected(tokens: list[int], alternatives: int = 3) -> list[TokenLogprob]:
    """Return torch's log probabilities of each prompt token but the first, computed without a pool."""
    found = []
    for end in range(1, len(tokens)):
        row = torch.log_softmax(torch.from_numpy(logits_of(kv_of(tokens[:end], np.arange(end)))).double(), 0)
        own = row[tokens[end]]
        tops = row.topk(alternatives)
        found.append(
            TokenLogprob(
                tokens[end],
                float(own),
                tuple(tops.indices.tolist()),
                tuple(tops.values.tolist()),
                int((row > own).sum()) + 1,
            )
        )
    return found


def check(found: list[TokenLogprob], wanted: list[TokenLogprob]) -> None:
    assert [(one.token_id, one.top_ids, one.rank) for one in found] == [
        (one.token_id, one.top_ids, one.rank) for one in wanted
    ]
    for one, other in zip(found, wanted, strict=True):
        assert (one.logprob, *one.top_logprobs) == pytest.approx((other.logprob, *other.top_logprobs), abs=1e-4)


async def score(workers: Workers, connection: Connection, key: int, hits: bool = False, **other: Any) -> Answer:
    """Score a prompt under a ticket that pins nothing, or the cached blocks; return the answer once its blocks are
    committed."""
    ticket = await workers.ticket(PROMPT, hits=hits)
    answer = await connection.submit(submit_of(key, ticket, PROMPT, **{"sampling": SCORED, "max_tokens": 6, **other}))
    await answer.ended()
    await workers.release(ticket)
    await workers.quiet()
    return answer


@pytest.mark.parametrize("backend", [FakeBackend, AheadBackend])
async def test_every_token_of_the_prompt_is_scored_once(backend: type[FakeBackend]) -> None:
    async with (
        running_workers(decode={"max_num_batched_tokens": 16, "max_num_seqs": 4}, backend=backend) as workers,
        connected(workers) as connection,
    ):
        answer = await score(workers, connection, 1)
        check(answer.prompt_logprobs, expected(PROMPT))
        assert answer.token_ids == greedy(PROMPT, 6)
        plain = await score(workers, connection, 2, hits=True, sampling=PLAIN)
        assert (plain.token_ids, plain.prompt_logprobs) == (answer.token_ids, [])
        assert plain.last is not None
        assert plain.last.timings is not None
        assert plain.last.timings.tail_tokens < 8
        again = await score(workers, connection, 3)
        assert again.prompt_logprobs == answer.prompt_logprobs
        await workers.quiet()


async def test_a_scored_prompt_with_a_cached_prefix_is_refused() -> None:
    async with running_workers() as workers, connected(workers) as connection:
        await score(workers, connection, 1)
        refused = await score(workers, connection, 2, hits=True)
        assert refused.last is not None
        assert refused.last.error is not None
        assert refused.last.error.retryable
        rest = await score(workers, connection, 3, hits=True, scored_tokens=40)
        assert (rest.prompt_logprobs, rest.token_ids) == ([], greedy(PROMPT, 6))
        await workers.quiet()


async def test_a_retry_scores_only_the_missing_tokens() -> None:
    async with running_workers() as workers, connected(workers) as connection:
        check((await score(workers, connection, 1, scored_tokens=13)).prompt_logprobs, expected(PROMPT)[13:])
        await workers.quiet()


async def test_a_prompt_is_scored_without_generating_a_token() -> None:
    async with running_workers() as workers, connected(workers) as connection:
        answer = await score(workers, connection, 1, max_tokens=0, siblings=(Sibling(key=5, seed=1),))
        check(answer.prompt_logprobs, expected(PROMPT))
        assert answer.last is not None
        assert (answer.token_ids, answer.last.finish_reason) == ([], FinishReason.LENGTH)
        unscored = await score(workers, connection, 2, max_tokens=0, sampling=PLAIN)
        assert unscored.last is not None
        assert (unscored.prompt_logprobs, unscored.last.finish_reason) == ([], FinishReason.LENGTH)
        await workers.quiet()


async def test_parallel_samples_share_the_scores_of_their_prompt() -> None:
    free = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, seed=11, prompt_logprobs=3, logprobs=1)
    async with running_workers() as workers, connected(workers) as connection:
        others = [connection.answers.setdefault(key, Answer()) for key in (5, 6)]
        parallel_samples = (Sibling(key=5, seed=12), Sibling(key=6, seed=13))
        answer = await score(workers, connection, 1, sampling=free, siblings=parallel_samples)
        await asyncio.gather(*(other.ended() for other in others))
        check(answer.prompt_logprobs, expected(PROMPT))
        assert [other.prompt_logprobs for other in others] == [[], []]
        assert all(len(one.token_ids) == len(one.logprobs) == 6 for one in (answer, *others))
        await workers.quiet()


async def test_scored_rows_of_a_step_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    # Bytes of five rows of logits.
    monkeypatch.setattr(scheduling, "MAX_SCORED_BYTES", 5 * 4 * VOCAB_SIZE)
    async with running_workers() as workers, connected(workers) as connection:
        answer = await score(workers, connection, 1)
        check(answer.prompt_logprobs, expected(PROMPT))
        assert workers.decode_backend.steps[:9] == [5] * 8 + [1]
        await workers.quiet()


async def test_nan_logits_fail_only_their_scored_prompt() -> None:
    async with running_workers() as workers, connected(workers) as connection:
        workers.decode_backend.broken = PROMPT[20]
        answer = await score(workers, connection, 1, max_tokens=0)
        assert answer.last is not None
        assert answer.last.error is not None
        assert not answer.last.error.retryable
        assert "not finite" in answer.last.error.message
        workers.decode_backend.broken = -1
        check((await score(workers, connection, 2)).prompt_logprobs, expected(PROMPT))
        await workers.quiet()


async def test_bad_scores_are_refused() -> None:
    async with running_workers() as workers, connected(workers) as connection:
        for key, other in enumerate(
            [
                {"scored_tokens": 41},
                {"sampling": replace(PLAIN, prompt_logprobs=21)},
                {"max_tokens": 0, "prompt_tokens": 40},
            ]
        ):
            answer = await score(workers, connection, key, **other)
            assert answer.last is not None
            assert answer.last.error is not None, other
            assert not answer.last.error.retryable
        await workers.quiet()
    assert MAX_PROMPT_LOGPROBS >= 4096 * (1 + 20)
