"""Server-sent events over real sockets, with scripted peers: framing, usage, late errors, disconnects."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from lab.testbed.conditions import WITHIN_S, until
from pillion.errors import Overloaded, Unavailable
from pillion.v1.decode_pb2 import DecodeTimings
from tests.support.fake_components import running_fake_cluster
from tests.support.http import call, connected, request_bytes

CHAT = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "stream": True}
TEXT = {"model": "toy", "prompt": "hi", "stream": True, "max_tokens": 100}
ANSWER = "Größe: 北京"


async def test_completion_events() -> None:
    async with running_fake_cluster(ANSWER) as fakes:
        reply = await call(fakes.gateway.http_address, "/v1/completions", TEXT)
        assert reply.status == 200
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert (reply.headers["cache-control"], reply.headers["x-accel-buffering"]) == ("no-cache", "no")
        events = reply.events
        assert "".join(event["choices"][0]["text"] for event in events) == ANSWER
        reasons = [event["choices"][0]["finish_reason"] for event in events]
        assert reasons == [None] * (len(events) - 1) + ["stop"]
        first = {**events[0], "choices": []}
        assert all({**event, "choices": []} == first for event in events)
        assert (first["object"], first["model"]) == ("text_completion", "toy")
        assert re.fullmatch("cmpl-[0-9a-f]{24}", first["id"])
        assert all(set(e["choices"][0]) == {"index", "text", "logprobs", "finish_reason"} for e in events)
        # Pending deltas are merged; how many depends on the machine's load.
        assert 1 < len(events) <= len(fakes.decode.script)
        await fakes.settled()


async def test_the_matched_stop_string_is_reported() -> None:
    async with running_fake_cluster(ANSWER) as fakes:
        for more, reason in (({"stop": ["x", ": "]}, ": "), ({"stop": ["x"]}, None)):
            address, body = fakes.gateway.http_address, {**TEXT, **more}
            *events, last = (await call(address, "/v1/completions", body)).events
            assert not any("stop_reason" in event["choices"][0] for event in events)
            (whole,) = (await call(address, "/v1/completions", {**body, "stream": False})).json["choices"]
            assert last["choices"][0].get("stop_reason") == whole.get("stop_reason") == reason
            assert whole["finish_reason"] == "stop"
        await fakes.settled()


async def test_usage_counts_draft_tokens_also_where_a_stop_string_ends_the_answer() -> None:
    async with running_fake_cluster(ANSWER) as fakes:
        fakes.decode.timings = DecodeTimings(guessed_tokens=9, accepted_tokens=5)
        expected = {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 4}
        for more in ({}, {"stop": ["x", ": "]}):
            asked = {**TEXT, **more, "stream_options": {"include_usage": True}}
            last = (await call(fakes.gateway.http_address, "/v1/completions", asked)).events[-1]
            assert last["usage"]["completion_tokens_details"] == expected
        await fakes.settled()


async def test_chat_events() -> None:
    async with running_fake_cluster(ANSWER) as fakes:
        events = (await call(fakes.gateway.http_address, "/v1/chat/completions", {**CHAT, "n": 2})).events
        for index in (0, 1):
            mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
            assert mine[0]["delta"] == {"role": "assistant", "content": ""}
            assert all(set(choice["delta"]) <= {"content"} for choice in mine[1:])
            assert "".join(choice["delta"].get("content", "") for choice in mine) == ANSWER
            assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["stop"]
        assert {event["object"] for event in events} == {"chat.completion.chunk"}
        assert all("usage" not in event for event in events)
        await fakes.settled()


@pytest.mark.parametrize(
    "more", [{}, {"logprobs": True, "return_token_ids": True}, {"max_tokens": 3}, {"stop": ["x", ": "]}], ids=str
)
async def test_the_finish_reason_of_a_chat_has_an_empty_delta(more: dict[str, Any]) -> None:
    async with running_fake_cluster(ANSWER) as fakes:
        events = (await call(fakes.gateway.http_address, "/v1/chat/completions", {**CHAT, **more})).events
        *choices, last = [event["choices"][0] for event in events]
        assert (last["delta"], last["logprobs"]) == ({}, None)
        assert last["finish_reason"] == ("length" if "max_tokens" in more else "stop")
        assert last.get("stop_reason") == (": " if "stop" in more else None)
        assert not last.get("token_ids")
        assert all(one["finish_reason"] is None and one["delta"] and "stop_reason" not in one for one in choices)
        if "logprobs" in more:
            ids = [token for one in choices for token in one.get("token_ids", [])]
            assert ids == list(fakes.decode.script)
            assert sum(len(one["logprobs"]["content"]) for one in choices if one["logprobs"]) == len(ids)
        await fakes.settled()


async def test_usage_is_sent_on_request() -> None:
    async with running_fake_cluster(ANSWER) as fakes:
        address = fakes.gateway.http_address
        fakes.node.pinned = 2
        asked = {**TEXT, "prompt": "What is the capital?", "stream_options": {"include_usage": True}}
        *events, last = (await call(address, "/v1/completions", asked)).events
        assert all(event["usage"] is None for event in events)
        assert last["choices"] == []
        count = len(fakes.decode.script)
        assert last["usage"] == {
            "prompt_tokens": 20,
            "completion_tokens": count,
            "total_tokens": 20 + count,
            "prompt_tokens_details": {
                "cached_tokens": 8,
                "cached_tokens_details": {
                    "pool_tokens": 8,
                    "fetched_tokens": 0,
                    "restored_tokens": 0,
                    "bucket_tokens": 0,
                },
            },
        }
        asked["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        *events, last = (await call(address, "/v1/completions", asked)).events
        assert _rises([event["usage"]["completion_tokens"] for event in events], count)
        assert last["usage"]["completion_tokens"] == count
        chat = {**CHAT, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        *events, last = (await call(address, "/v1/chat/completions", chat)).events
        first, *rest = [event["usage"]["completion_tokens"] for event in events]
        assert first == 0
        assert _rises(rest, count)


def _rises(counts: list[int], last: int) -> bool:
    """Check that the count rises with each event, by more than one if pending deltas were merged."""
    return counts == sorted(set(counts)) and counts[-1] == last


async def test_several_prompts_with_several_answers_are_echoed() -> None:
    async with running_fake_cluster("ab") as fakes:
        asked = {**TEXT, "prompt": ["one", "two"], "n": 2, "echo": True, "stream_options": {"include_usage": True}}
        *events, last = (await call(fakes.gateway.http_address, "/v1/completions", asked)).events
        texts = dict.fromkeys(range(4), "")
        for event in events:
            (choice,) = event["choices"]
            texts[choice["index"]] += choice["text"]
        assert texts == {0: "oneab", 1: "oneab", 2: "twoab", 3: "twoab"}
        assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (6, 12)
        await fakes.settled()


async def test_many_prompts_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pillion.gateway.http_api.model_calls.MAX_PROMPTS_AT_ONCE", 2)
    async with running_fake_cluster("ab", max_inflight_requests=2) as fakes:
        prompts = [f"p{n}" for n in range(7)]
        asked = {"model": "toy", "prompt": prompts, "echo": True}
        body = (await call(fakes.gateway.http_address, "/v1/completions", asked)).json
        assert [choice["text"] for choice in body["choices"]] == [f"p{n}ab" for n in range(7)]
        assert [choice["index"] for choice in body["choices"]] == list(range(7))
        await fakes.settled()


async def test_a_failing_stream_ends_with_an_error_event() -> None:
    async with running_fake_cluster("a long answer", max_attempts=1) as fakes:
        fakes.decode.hold_after, fakes.decode.break_after = 3, 4
        answer = asyncio.create_task(call(fakes.gateway.http_address, "/v1/completions", TEXT))
        await until("its first tokens", lambda: fakes.decode.holds)
        fakes.decode.refusals = [(Unavailable.code, False)]
        fakes.decode.go_on()
        raw = await answer
        assert raw.status == 200
        *_, last = raw.body.decode().strip().split("\n\n")
        error = json.loads(last.removeprefix("data: "))["error"]
        assert (error["type"], error["code"]) == ("server_error", "unavailable")
        assert b"[DONE]" not in raw.body
        await fakes.settled()


async def test_a_stream_that_never_began_has_a_status() -> None:
    async with running_fake_cluster(max_attempts=1) as fakes:
        fakes.node.failures.append(Overloaded("no room", 2000))
        reply = await call(fakes.gateway.http_address, "/v1/chat/completions", CHAT)
        assert (reply.status, reply.headers["retry-after"]) == (429, "2")
        assert reply.error["code"] == "rate_limit_exceeded"
        await fakes.settled()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("where", ["node", "prefill", "decode"])
async def test_a_disconnect_before_the_first_token_frees_everything(where: str, stream: bool) -> None:
    async with running_fake_cluster() as fakes:
        part = getattr(fakes, where)
        part.gate.clear()
        asked = {**TEXT, "prompt": "What is the capital of France?", "stream": stream}
        seen = {"node": lambda: fakes.node.waiting, "prefill": lambda: fakes.prefill.running}
        async with connected(fakes.gateway.http_address) as (_, writer):
            writer.write(request_bytes("POST", "/v1/completions", asked))
            await until("the request to be where its client leaves", seen.get(where, lambda: fakes.decode.submits))
        await fakes.settled()
        part.gate.set()
        assert (await call(fakes.gateway.http_address, "/v1/completions", TEXT)).status == 200


@pytest.mark.parametrize(("more", "streams"), [({}, 1), ({"n": 3}, 3), ({"prompt": ["a", "b", "c"]}, 3)], ids=str)
async def test_a_disconnect_mid_stream_cancels_all_answers(more: dict, streams: int) -> None:
    async with running_fake_cluster("x" * 200) as fakes:
        fakes.decode.hold_after = 3
        async with connected(fakes.gateway.http_address) as (reader, writer):
            writer.write(request_bytes("POST", "/v1/completions", {**TEXT, **more, "ignore_eos": True}))
            await reader.readuntil(b'"text":"x')
            await until("the streams of all answers", lambda: len(fakes.decode.streams) == streams)
        await fakes.settled()
        assert len(fakes.decode.cancelled) == streams


async def test_a_disconnect_drops_prompts_that_are_still_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pillion.gateway.http_api.model_calls.MAX_PROMPTS_AT_ONCE", 1)
    async with running_fake_cluster() as fakes:
        fakes.decode.gate.clear()
        async with connected(fakes.gateway.http_address) as (_, writer):
            writer.write(request_bytes("POST", "/v1/completions", {**TEXT, "prompt": ["a", "b", "c"]}))
            await until("a submit", lambda: fakes.decode.submits)
        await fakes.settled()
        assert len(fakes.decode.submits) == 1


async def test_a_slow_reader_blocks_only_its_stream() -> None:
    async with running_fake_cluster("y" * 100) as fakes:
        fakes.decode.pace_s = 0
        asked = {**TEXT, "logprobs": 20, "n": 4}
        async with connected(fakes.gateway.http_address) as (reader, writer):
            writer.write(request_bytes("POST", "/v1/completions", asked))
            await until("a submit", lambda: fakes.decode.submits)
            await until("the worker to have sent everything", lambda: not fakes.decode.streams)
            assert (await call(fakes.gateway.http_address, "/v1/completions", {**TEXT, "prompt": "b"})).status == 200
            assert b"data: [DONE]" in await reader.read()
        await fakes.settled()


async def test_events_are_merged_above_the_write_rate_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pillion.gateway.http_api.model_calls.MAX_WRITES_PER_S", 2)
    async with running_fake_cluster("z" * 100) as fakes:
        fakes.decode.pace_s = 0
        reply = await call(fakes.gateway.http_address, "/v1/completions", TEXT)
        assert "".join(event["choices"][0]["text"] for event in reply.events) == "z" * 100
        assert len(reply.events) < 50
        await fakes.settled()


async def test_a_stop_finishes_streams_under_way() -> None:
    async with running_fake_cluster("x" * 20) as fakes:
        fakes.decode.hold_after = 3
        async with connected(fakes.gateway.http_address) as (reader, writer):
            writer.write(request_bytes("POST", "/v1/completions", TEXT))
            await reader.readuntil(b'"text":"x')
            stopping = asyncio.create_task(fakes.gateway.stop(WITHIN_S))
            await until("the gateway to take no new requests", fakes.gateway.gateway.not_ready)
            fakes.decode.go_on()
            rest = await reader.read()
            assert b"data: [DONE]" in rest
            await stopping
