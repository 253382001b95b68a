"""Streams that follow a grammar, over a real node, real gRPC and the real grammar library."""

from __future__ import annotations

import asyncio
import json
import pathlib
from typing import Any

import jsonschema
import pytest

from pillion.errors import Internal
from pillion.rules.grammar_limits import GRAMMAR_FAULT, PARSER_LIMITS
from pillion.types import FinishReason
from pillion.v1 import decode_pb2
from tests.support.fake_backend import EOS
from tests.support.grammars import GrammarOracle, text_of, write_tokenizer
from tests.support.workers import Answer, Connection, Workers, connected, running_workers, submit_of

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "first_name_of_the_person": {"enum": ["Ada", "Alan", "Grace"]},
        "ages": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 99},
            "minItems": 2,
            "maxItems": 3,
        },
        "married": {"type": "boolean"},
    },
    "required": ["first_name_of_the_person", "ages", "married"],
    "additionalProperties": False,
}
JSON = "start: %json " + json.dumps(SCHEMA | {"x-guidance": {"whitespace_flexible": False}})
INVALID = 3


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 13 + position * 7) % 95 for position in range(length)]


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> str:
    return write_tokenizer(tmp_path)


async def begin(
    workers: Workers, connection: Connection, key: int, tokens: list[int], count: int, **other: Any
) -> Answer:
    ticket = await workers.ticket(tokens)
    other = {"grammar": JSON, "stop_token_ids": (EOS,), **other}
    answer = await connection.submit(submit_of(key, ticket, tokens, count, **other))
    await answer.ended()
    await workers.release(ticket)
    assert answer.last is not None
    return answer


async def test_grammar_answers_match_the_oracle_and_the_schema(folder: str) -> None:
    oracle = GrammarOracle(folder)
    async with running_workers(tokenizer=folder) as workers, connected(workers) as connection:
        prompts = [prompt(seed, 9 + seed) for seed in range(6)]
        answers = await asyncio.gather(*(begin(workers, connection, n, p, 200) for n, p in enumerate(prompts)))
        for tokens, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == oracle.greedy(tokens, JSON, 200)
            assert answer.last is not None
            assert answer.last.finish_reason is FinishReason.STOP, answer.last
            jsonschema.validate(json.loads(text_of(answer.token_ids)), SCHEMA)
        await workers.quiet()


async def test_a_replayed_answer_continues_its_grammar(folder: str) -> None:
    """From each of its tokens on, also within a forced run; a complete one ends at once."""
    async with running_workers(tokenizer=folder) as workers, connected(workers) as connection:
        whole = await begin(workers, connection, 1, prompt(1, 9), 200)
        for key, cut in enumerate(range(1, len(whole.token_ids) + 1, 5), 2):
            ticket = await workers.ticket([*prompt(1, 9), *whole.token_ids[:cut]])
            submit = submit_of(key, ticket, [*prompt(1, 9), *whole.token_ids[:cut]], 200, grammar=JSON, prompt_tokens=9)
            answer = await connection.submit(submit)
            await answer.ended()
            await workers.release(ticket)
            assert whole.token_ids[:cut] + answer.token_ids == whole.token_ids
            assert answer.last is not None
            assert answer.last.finish_reason is FinishReason.STOP
        await workers.quiet()


async def test_max_tokens_cuts_an_answer(folder: str) -> None:
    async with running_workers(tokenizer=folder) as workers, connected(workers) as connection:
        answer = await begin(workers, connection, 1, prompt(1, 9), 40)
        assert answer.last is not None
        assert answer.last.finish_reason is FinishReason.LENGTH
        assert len(answer.token_ids) == 40
        whole = await begin(workers, connection, 2, prompt(1, 9), 200)
        assert whole.token_ids[:40] == answer.token_ids
        exact = await begin(workers, connection, 3, prompt(1, 9), len(whole.token_ids))
        assert exact.last is not None
        assert exact.last.finish_reason is FinishReason.STOP
        await workers.quiet()


async def test_each_parallel_sample_follows_the_grammar_from_its_start(folder: str) -> None:
    oracle = GrammarOracle(folder)
    async with running_workers(tokenizer=folder) as workers, connected(workers) as connection:
        ticket = await workers.ticket(prompt(2, 10))
        parallel_samples = [decode_pb2.Sibling(key=key, seed=key) for key in (2, 3)]
        submit = submit_of(1, ticket, prompt(2, 10), 200, grammar=JSON, siblings=parallel_samples)
        answers = [await connection.submit(submit)]
        answers += [connection.answers.setdefault(sample.key, Answer()) for sample in parallel_samples]
        for answer in answers:
            await answer.ended()
            assert answer.token_ids == oracle.greedy(prompt(2, 10), JSON, 200)
        await workers.release(ticket)
        await workers.quiet()


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("start: (", "does not compile"),
        ('start: "a" other', "does not compile"),
        ("x" * (2**20 + 1), "grammar: more than 1048576 bytes"),
    ],
)
async def test_a_grammar_that_does_not_compile_fails_its_request(folder: str, grammar: str, reason: str) -> None:
    async with running_workers(tokenizer=folder) as workers, connected(workers) as connection:
        answer = await begin(workers, connection, 1, prompt(1, 9), 40, grammar=grammar)
        assert answer.last is not None
        assert answer.last.error is not None
        assert answer.last.error.code == INVALID
        assert not answer.last.error.retryable
        assert reason in answer.last.error.message
        assert len(answer.last.error.message) < 400
        await workers.quiet()


async def test_tokens_rejected_by_the_grammar_fail_their_request(folder: str) -> None:
    async with running_workers(tokenizer=folder) as workers, connected(workers) as connection:
        answer = await begin(workers, connection, 1, [*prompt(1, 9), 5, 6], 40, prompt_tokens=9)
        assert answer.last is not None
        assert answer.last.error is not None
        assert answer.last.error.code == INVALID
        assert "token 0 of the answer" in answer.last.error.message
        await workers.quiet()


async def test_reaching_a_grammar_limit_fails_the_answer(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not end as if complete, nor does a later answer."""
    text = "start: %json " + json.dumps({"type": "string", "minLength": 900, "maxLength": 1000})
    monkeypatch.setitem(PARSER_LIMITS, "max_lexer_states", 400)
    async with running_workers(tokenizer=folder) as workers, connected(workers) as connection:
        for key in range(1, 4):
            answer = await begin(workers, connection, key, prompt(key, 9), 1100, grammar=text)
            assert answer.last is not None
            assert answer.last.finish_reason is None
            assert answer.last.error is not None
            assert answer.last.error.code == Internal.code
            assert not answer.last.error.retryable
            assert answer.last.error.message.startswith(GRAMMAR_FAULT)
            assert "too many states" in answer.last.error.message
            assert EOS not in answer.token_ids
        other = await begin(workers, connection, 9, prompt(1, 9), 200)
        assert other.last is not None
        assert other.last.finish_reason is FinishReason.STOP
        await workers.quiet()


async def test_a_model_without_a_tokenizer_refuses_grammars() -> None:
    async with running_workers() as workers, connected(workers) as connection:
        answer = await begin(workers, connection, 1, prompt(1, 9), 40)
        assert answer.last is not None
        assert answer.last.error is not None
        assert "not supported by decode-0" in answer.last.error.message
        await workers.quiet()
