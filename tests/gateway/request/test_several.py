"""Several answers, log probabilities and priority over real gRPC with scripted peers: in order, and after losses."""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace
from typing import Any

import pytest

from lab.testbed.conditions import until
from lab.testbed.toy_tokenizer import byte_tokenizer
from pillion import DeadlineExceeded, Delta, FinishReason, InvalidRequest, Overloaded, Unavailable
from pillion.errors import BrokenGrammar, Internal, NotFound
from pillion.gateway.request import request_runner
from pillion.gateway.request.request_runner import RequestRunner
from pillion.rules.grammar_limits import GRAMMAR_FAULT
from pillion.types import GenerateRequest, SamplingParams, StructuredOutputs
from tests.support.fake_components import FakeCluster, running_fake_cluster, script_of

CODEC = byte_tokenizer()
PROMPT = "What is the capital of France?"
TEXTS = ("Paris, of course, since long ago.", "It is Paris — 巴黎, as far as I know.", "I think: Paris? Yes, Paris.")
SEED = 40


def tell(fakes: FakeCluster, *texts: str) -> None:
    """Return answer ``n`` to a request with SEED, which is text ``n`` on every worker (I6)."""
    fakes.decode.scripts = {SEED + n: script_of(text) for n, text in enumerate(texts)}


async def read(stream) -> list[Delta]:
    return [delta async for delta in stream]


def ask(fakes: FakeCluster, n: int = 3, **more):
    return fakes.client.generate(PROMPT, seed=SEED, n=n, **more)


def texts_of(deltas: list[Delta]) -> list[str]:
    return ["".join(d.text for d in deltas if d.index == index) for index in range(max(d.index for d in deltas) + 1)]


def whole(deltas: list[Delta], *texts: str) -> None:
    """Check that each answer's tokens come once, in order, with one end each, and usage in the very last delta."""
    assert texts_of(deltas) == list(texts)
    for index, text in enumerate(texts):
        mine = [delta for delta in deltas if delta.index == index]
        assert [one for delta in mine for one in delta.token_ids] == list(script_of(text))
        assert [delta.finish_reason for delta in mine] == [None] * (len(mine) - 1) + [FinishReason.STOP]
    last = deltas[-1]
    assert [d.usage or d.timings for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert last.usage.prompt_tokens == 30
    assert last.usage.completion_tokens == sum(len(script_of(text)) for text in texts)
    timings = last.timings
    assert timings.cached_tokens + timings.prefilled_tokens + timings.tail_tokens == 30
    assert timings.total_ms >= timings.time_to_first_token_ms > 0


async def test_one_prefill_serves_three_answer_streams() -> None:
    async with running_fake_cluster() as fakes:
        tell(fakes, *TEXTS)
        deltas = await read(ask(fakes))
        whole(deltas, *TEXTS)
        assert len({delta.index for delta in deltas[:12]}) == 3, "they come mixed"
        (submit,) = fakes.decode.submits
        assert [sample.seed for sample in submit.siblings] == [SEED + 1, SEED + 2]
        assert len({submit.key, *(sample.key for sample in submit.siblings)}) == 3
        assert (len(fakes.node.opened), len(fakes.prefill.prefill_ranges)) == (1, 1)
        assert deltas[-1].timings.replays == 0
        await fakes.settled()
        status = await fakes.client.status()
        assert (status.prompt_tokens, status.completion_tokens) == (30, deltas[-1].usage.completion_tokens)


async def test_one_answer_has_no_parallel_samples() -> None:
    async with running_fake_cluster() as fakes:
        await read(fakes.client.generate(PROMPT))
        await read(fakes.client.generate(PROMPT, n=1, best_of=1))
        assert [len(submit.siblings) for submit in fakes.decode.submits] == [0, 0]
        await fakes.settled()


async def test_answers_with_a_drawn_seed_have_different_seeds() -> None:
    async with running_fake_cluster() as fakes:
        await read(fakes.client.generate(PROMPT, n=4))
        (submit,) = fakes.decode.submits
        assert len({submit.sampling.seed, *(sample.seed for sample in submit.siblings)}) == 4
        await fakes.settled()


async def test_a_stop_string_ends_its_own_answer_only() -> None:
    async with running_fake_cluster() as fakes:
        tell(fakes, *TEXTS)
        deltas = await read(ask(fakes, stop=["?"]))
        assert texts_of(deltas) == [TEXTS[0], TEXTS[1], "I think: Paris"]
        assert deltas[-1].usage.completion_tokens == len(script_of(TEXTS[0])) + len(script_of(TEXTS[1])) + 15
        await fakes.settled()
        assert fakes.decode.cancelled == [fakes.decode.submits[0].siblings[1].key]


async def test_the_first_answer_may_end_first() -> None:
    async with running_fake_cluster() as fakes:
        tell(fakes, "x?y", *TEXTS[:2])
        deltas = await read(ask(fakes, stop=["?"]))
        assert texts_of(deltas) == ["x", *TEXTS[:2]]
        assert deltas[-1].index != 0
        await fakes.settled()
        assert fakes.decode.cancelled == [fakes.decode.submits[0].key]


async def test_each_answer_counts_as_a_request() -> None:
    async with running_fake_cluster(max_inflight_requests=4) as fakes:
        tell(fakes, *TEXTS)
        with pytest.raises(InvalidRequest, match="300 in your prompt"):
            await read(fakes.client.generate("x" * 300, n=3))
        fakes.decode.gate.clear()
        first = asyncio.create_task(read(ask(fakes)))
        await until("a submit", lambda: fakes.decode.submits)
        assert (await fakes.client.status()).active_requests == 3
        with pytest.raises(Overloaded, match="max_inflight_requests"):
            await read(ask(fakes, n=2))
        with pytest.raises(InvalidRequest, match=r"sampling.n: 5 answers; the gateway takes 4"):
            await read(ask(fakes, n=5))
        with pytest.raises(InvalidRequest, match=r"sampling.best_of: 6 answers"):
            await read(ask(fakes, n=1, best_of=6))
        fakes.decode.gate.set()
        whole(await first, *TEXTS)
        await fakes.settled()


async def test_a_loss_before_the_first_token_is_retried_by_the_first_answer() -> None:
    async with running_fake_cluster() as fakes:
        tell(fakes, *TEXTS)
        fakes.decode.break_after = 1
        deltas = await read(ask(fakes))
        whole(deltas, *TEXTS)
        assert deltas[-1].timings.replays == 1
        first, second = fakes.decode.submits
        assert (first.attempt, second.attempt) == (1, 2)
        assert (
            [sample.seed for sample in second.siblings]
            == [sample.seed for sample in first.siblings]
            == [SEED + 1, SEED + 2]
        )
        assert len(fakes.node.opened) == 2
        await fakes.settled()


@pytest.mark.parametrize("after", [1, 4])
async def test_every_submit_carries_the_grammar(after: int) -> None:
    async with running_fake_cluster() as fakes:
        tell(fakes, *TEXTS)
        fakes.decode.break_after = after
        whole(await read(ask(fakes, structured_outputs=StructuredOutputs(choice=TEXTS))), *TEXTS)
        first, *others = fakes.decode.submits
        assert others
        assert all(text in first.grammar for text in map(json.dumps, TEXTS))
        assert {submit.grammar for submit in others} == {first.grammar}
        assert not any(submit.sampling.HasField("structured_outputs") for submit in fakes.decode.submits)
        assert len({submit.root_hash for submit in fakes.decode.submits}) == 1
        await fakes.settled()


async def test_a_workers_grammar_error_names_the_clients_field() -> None:
    async with running_fake_cluster() as fakes:
        tell(fakes, *TEXTS)
        fakes.decode.refusals = [(InvalidRequest.code, False)]
        fakes.decode.refusal = f"{GRAMMAR_FAULT} cannot be followed: too many states"
        with pytest.raises(InvalidRequest) as caught:
            await read(ask(fakes, structured_outputs=StructuredOutputs(choice=TEXTS)))
        (violation,) = caught.value.violations
        assert violation.field == "sampling.structured_outputs.choice"
        assert violation.description == fakes.decode.refusal
        await fakes.settled()


async def test_an_answer_stuck_in_its_grammar_is_an_internal_error() -> None:
    """The grammar was accepted, so it is no client error, and no other worker is tried."""
    async with running_fake_cluster() as fakes:
        tell(fakes, *TEXTS)
        fakes.decode.refusals = [(BrokenGrammar.code, False)]
        fakes.decode.refusal = f"{GRAMMAR_FAULT} cannot be followed: NoExtensionBias"
        with pytest.raises(Internal, match="NoExtensionBias"):
            await read(ask(fakes, structured_outputs=StructuredOutputs(choice=TEXTS)))
        assert len(fakes.decode.submits) == 1
        await fakes.settled()


@pytest.mark.parametrize("after", [2, 3, 4, 9, 60])
async def test_a_loss_after_the_first_token_replays_every_answer(after: int) -> None:
    async with running_fake_cluster() as fakes:
        tell(fakes, *TEXTS)
        fakes.decode.break_after = after
        whole(await read(ask(fakes)), *TEXTS)
        _, *others = fakes.decode.submits
        # Answers without tokens are replayed like the others: from the prompt, each with its own seed.
        assert sorted(submit.sampling.seed for submit in others) == [SEED, SEED + 1, SEED + 2]
        assert {submit.attempt for submit in others} == {2}
        assert not any(submit.siblings for submit in others)
        assert sum(len(submit.token_ids) - 30 for submit in others) == after - 1
        assert all(opened.resume for opened in fakes.node.opened[1:])
        await fakes.settled()


@pytest.mark.parametrize("times", [1, 2])
async def test_a_retried_submit_includes_its_parallel_samples(times: int) -> None:
    async with running_fake_cluster() as fakes:
        tell(fakes, *TEXTS)
        fakes.decode.refusals = [(NotFound.code, True)] * times
        whole(await read(ask(fakes)), *TEXTS)
        assert [len(submit.siblings) for submit in fakes.decode.submits] == [2] * (times + 1)
        await fakes.settled()


async def test_a_lost_prefill_range_costs_one_more_plan() -> None:
    async with running_fake_cluster() as fakes:
        tell(fakes, *TEXTS)
        fakes.prefill.failures = [(1, Unavailable("gone"))]
        whole(await read(ask(fakes)), *TEXTS)
        assert [submit.attempt for submit in fakes.decode.submits] == [1, 2]
        assert len(fakes.decode.cancelled) == 1 + len(fakes.decode.submits[0].siblings)
        await fakes.settled()


async def test_more_answers_than_a_worker_accepts_raise_overloaded() -> None:
    async with running_fake_cluster(max_attempts=2) as fakes:
        fakes.decode.refusals = [(Overloaded.code, True)] * 2
        with pytest.raises(Overloaded, match="given up after 2 attempts"):
            await read(ask(fakes, n=4))
        await fakes.settled()


async def test_one_answer_that_fails_for_good_ends_the_request() -> None:
    async with running_fake_cluster() as fakes:
        tell(fakes, *TEXTS)
        fakes.decode.gate.clear()
        fakes.decode.break_after = 20
        reading = asyncio.create_task(read(ask(fakes)))
        await until("the ticket to be released", lambda: fakes.node.opened and not fakes.node.held)
        fakes.decode.refusals = [(Overloaded.code, False)]
        fakes.decode.gate.set()
        with pytest.raises(Overloaded, match="refused by the script"):
            await reading
        assert 2 <= len(fakes.decode.submits) <= 4
        await fakes.settled()


async def test_a_silent_answer_is_detected_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_runner, "MAX_SILENCE_S", 0.3)
    async with running_fake_cluster("x" * 200) as fakes:
        fakes.decode.pace_s = 0.02
        now_s, handle = time.monotonic(), RequestRunner._handle

        def counted(runner: RequestRunner, index: int | None, event: Any) -> Any:
            """The max silence is ten deltas of the answers, in time."""
            nonlocal now_s
            done = handle(runner, index, event)
            now_s += request_runner.MAX_SILENCE_S / 10
            return done

        monkeypatch.setattr(request_runner, "time", SimpleNamespace(monotonic=lambda: now_s))
        monkeypatch.setattr(RequestRunner, "_handle", counted)
        asked = SamplingParams(seed=SEED, n=2)
        runner = await fakes.gateway.gateway.generate(GenerateRequest(text=PROMPT, sampling=asked))
        while not ((delta := await anext(runner)).index == 1 and delta.token_ids):
            pass
        # The second answer's stream goes silent, as if its worker had forgotten it.
        second = fakes.decode.submits[0].siblings[0].key
        fakes.decode.silent.add(second)
        await until("two submits", lambda: len(fakes.decode.submits) == 2)
        assert fakes.decode.submits[1].sampling.seed == SEED + 1
        assert fakes.decode.cancelled == [second], "the first answer goes on"
        runner.cancel()
        await fakes.settled()


@pytest.mark.parametrize("tokens", [0, 10])
async def test_a_client_that_leaves_frees_all_streams(tokens: int) -> None:
    async with running_fake_cluster("z" * 200) as fakes:
        if tokens:
            fakes.decode.hold_after = tokens
        else:
            fakes.decode.gate.clear()
        stream = ask(fakes, n=4)
        reading = asyncio.ensure_future(anext(stream))
        await until("four streams", lambda: len(fakes.decode.streams) == 4)
        if tokens:
            await reading
            await stream.aclose()
        else:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        await fakes.settled()
        (submit,) = fakes.decode.submits
        assert sorted(fakes.decode.cancelled) == sorted([submit.key, *(sample.key for sample in submit.siblings)])


async def test_a_deadline_frees_all_streams() -> None:
    async with running_fake_cluster() as fakes:
        fakes.decode.gate.clear()
        with pytest.raises(DeadlineExceeded):
            await read(ask(fakes, n=4, timeout_s=0.4))
        await fakes.settled()


@pytest.mark.parametrize("count", [1, 3])
async def test_a_defect_at_an_answers_end_ends_the_request(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    from pillion.gateway.tokens.answer_text import AnswerText

    async with running_fake_cluster() as fakes:
        tell(fakes, *TEXTS)
        flush = AnswerText.flush

        def broken(answer: AnswerText) -> str:
            if answer.completion_tokens == len(script_of(TEXTS[count - 1])):
                raise RuntimeError("a defect")
            return flush(answer)

        monkeypatch.setattr(AnswerText, "flush", broken)
        with pytest.raises(Internal, match="the gateway's log"):
            await read(ask(fakes, count))
        await fakes.settled()


@pytest.mark.parametrize("per_delta", [1, 4, 50])
async def test_log_probabilities_are_those_of_the_tokens(per_delta: int) -> None:
    async with running_fake_cluster("one two three four") as fakes:
        fakes.decode.per_delta = per_delta
        deltas = await read(fakes.client.generate(PROMPT, logprobs=2, stop=[" th"]))
        assert texts_of(deltas) == ["one two"]
        logprobs = [one for delta in deltas for one in delta.logprobs]
        submit = fakes.decode.submits[0]
        ids = CODEC.encode("one two th").ids
        assert logprobs == [fakes.decode.logprob(submit, at, one) for at, one in enumerate(ids)]
        assert all([one.token_id for one in d.logprobs] == list(d.token_ids) for d in deltas)
        assert logprobs[3].top_ids == (ids[3], ids[3] + 1)
        await fakes.settled()


async def test_log_probabilities_continue_after_a_loss() -> None:
    async with running_fake_cluster() as fakes:
        tell(fakes, *TEXTS)
        fakes.decode.break_after = 30
        deltas = await read(ask(fakes, logprobs=0))
        whole(deltas, *TEXTS)
        for index, text in enumerate(TEXTS):
            logprobs = [one for delta in deltas if delta.index == index for one in delta.logprobs]
            assert [one.token_id for one in logprobs] == list(script_of(text))
            assert [one.logprob for one in logprobs] == [-(at + 1) / 64 for at in range(len(logprobs))]
        await fakes.settled()


async def test_log_probabilities_are_sent_only_on_request() -> None:
    async with running_fake_cluster() as fakes:
        deltas = await read(fakes.client.generate(PROMPT))
        assert not any(delta.logprobs for delta in deltas)
        assert not fakes.decode.submits[0].sampling.HasField("logprobs")


async def test_best_of_returns_the_best_answers() -> None:
    async with running_fake_cluster() as fakes:
        tell(fakes, *TEXTS)
        fakes.decode.worth = {SEED: -2.0, SEED + 1: 0.0, SEED + 2: -1.0}
        deltas = await read(fakes.client.generate(PROMPT, seed=SEED, n=2, best_of=3))
        assert texts_of(deltas) == [TEXTS[1], TEXTS[2]]
        assert [(delta.index, delta.finish_reason) for delta in deltas] == [(n, FinishReason.STOP) for n in (0, 1)]
        assert not any(delta.logprobs for delta in deltas), "asked of the worker only to rank"
        assert deltas[0].usage is None
        assert deltas[1].usage.completion_tokens == sum(len(script_of(text)) for text in TEXTS)
        deltas = await read(fakes.client.generate(PROMPT, seed=SEED, best_of=3, logprobs=1))
        assert texts_of(deltas) == [TEXTS[1]]
        assert [one.token_id for one in deltas[0].logprobs] == list(script_of(TEXTS[1]))
        await fakes.settled()


async def test_best_of_survives_a_worker_loss() -> None:
    async with running_fake_cluster() as fakes:
        tell(fakes, *TEXTS)
        fakes.decode.worth = {SEED: -2.0, SEED + 1: -3.0, SEED + 2: -1.0}
        fakes.decode.break_after = 40
        deltas = await read(fakes.client.generate(PROMPT, seed=SEED, n=1, best_of=3))
        assert texts_of(deltas) == [TEXTS[2]]
        await fakes.settled()
