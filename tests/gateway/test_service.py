"""The gateway over real gRPC and a real Redis, with scripted peers: ordinary requests."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request

import msgspec
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from lab.testbed.conditions import WITHIN_S, until
from lab.testbed.toy_tokenizer import byte_tokenizer
from pillion import Client, Delta, FinishReason, InvalidRequest, Overloaded, SamplingParams, Unavailable
from pillion._version import VERSION
from pillion.errors import NotFound
from pillion.kvstore.hashing import chain_hashes, request_root
from pillion.kvstore.index.index import PrefixHits
from tests.support.fake_components import BLOCK, EOS, FINGERPRINT, NAMESPACE, record, running_fake_cluster
from tests.support.redis_nodes import patient

CODEC = byte_tokenizer()
PROMPT = "What is the capital of France?"


async def read(stream) -> list[Delta]:
    return [delta async for delta in stream]


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


async def test_an_answer_streams_through_all_parts() -> None:
    async with running_fake_cluster("Größe: 北京") as fakes:
        patient(fakes.gateway.cluster.index)
        fakes.node.pinned = 2
        deltas = await read(fakes.client.generate(PROMPT, temperature=0, seed=5, request_id="r-1"))
        assert text_of(deltas) == "Größe: 北京"
        assert all("\ufffd" not in delta.text for delta in deltas)
        last, ids = deltas[-1], [one for delta in deltas for one in delta.token_ids]
        assert ids == list(fakes.decode.script)
        assert {delta.request_id for delta in deltas} == {"r-1"}
        assert last.finish_reason is FinishReason.STOP
        assert [d.finish_reason or d.usage or d.timings for d in deltas[:-1]] == [None] * (len(deltas) - 1)
        prompt = tuple(CODEC.encode(PROMPT).ids)
        assert (last.usage.prompt_tokens, last.usage.cached_tokens, last.usage.completion_tokens) == (30, 8, len(ids))
        timings = last.timings
        assert (timings.cached_tokens, timings.prefilled_tokens, timings.tail_tokens) == (8, 20, 2)
        assert (timings.prefill_chunks, timings.tail_steps, timings.replays) == (3, 1, 0)
        assert (timings.prefill_worker, timings.decode_worker) == ("prefill-0", "decode-0")
        assert timings.plan_reason.startswith("disaggregated: prefill-0 computes 20; decode-0 ")
        assert 0 < timings.time_to_first_token_ms <= timings.total_ms

        root = request_root(bytes.fromhex(NAMESPACE))
        hashes = chain_hashes(root, prompt[:28], BLOCK)
        (opened,), (computed,), (submit,) = fakes.node.opened, fakes.prefill.prefill_ranges, fakes.decode.submits
        assert (opened.block_hashes, opened.total_blocks, opened.resume) == (hashes, 8, False)
        assert (computed.start_tokens, computed.parent_hash) == (8, hashes[32:64])
        assert (tuple(computed.token_ids), tuple(computed.chunk_tokens)) == (prompt[8:28], (8, 8, 4))
        assert (tuple(submit.token_ids), submit.prompt_tokens, submit.root_hash) == (prompt, 30, root)
        assert (tuple(submit.stop_token_ids), submit.max_tokens, submit.timeout_ms) == ((EOS,), 226, 0)
        assert (submit.sampling.temperature, submit.sampling.seed, submit.sampling.top_k) == (0.0, 5, 0)
        assert computed.ticket_id == submit.ticket_id
        await fakes.settled()
        status = await fakes.client.status()
        assert (status.active_requests, status.prompt_tokens, status.cached_tokens) == (0, 30, 8)
        assert status.index_available


async def test_the_salt_changes_every_hash_and_the_seed_is_drawn() -> None:
    async with running_fake_cluster() as fakes:
        for salt in ("", "tenant"):
            await read(fakes.client.generate(PROMPT, cache_salt=salt))
        first, second = fakes.decode.submits
        assert first.root_hash != second.root_hash
        assert second.root_hash == request_root(bytes.fromhex(NAMESPACE), cache_salt="open:tenant")
        assert first.sampling.seed != second.sampling.seed


async def test_priority_reaches_every_part() -> None:
    async with running_fake_cluster() as fakes:
        await read(fakes.client.generate(PROMPT, priority=-7))
        await read(fakes.client.chat([{"role": "user", "content": "x"}], priority=9))
        assert [submit.priority for submit in fakes.decode.submits] == [-7, 9]
        assert [one.priority for one in fakes.prefill.prefill_ranges] == [-7, 9]
        assert [opened.priority for opened in fakes.node.opened] == [-7, 9]
        await fakes.settled()


@pytest.mark.parametrize("policy", ["colocated", "disaggregated"])
async def test_the_longest_known_prefix_reaches_the_ticket(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_fake_cluster(split_policy=policy) as fakes:

        async def hits(*_: object) -> PrefixHits:
            return PrefixHits([], 3)

        monkeypatch.setattr(fakes.gateway.cluster, "hits", hits)
        await read(fakes.client.generate("x" * 99))
        opened = [one.known_blocks for one in fakes.node.opened]
        submits = [one.known_blocks for one in fakes.decode.submits]
        assert (opened, submits) == (([], [3]) if policy == "colocated" else ([3], [0]))
        await fakes.settled()


async def test_without_prefix_caching_only_attempts_share_blocks() -> None:
    async with running_fake_cluster("The answer.", enable_prefix_caching=False) as fakes:
        asked, index = [], fakes.gateway.cluster.index
        longest = index.longest_prefix

        async def spy(hashes: bytes):
            asked.append(hashes)
            return await longest(hashes)

        index.longest_prefix = spy
        for salt in ("", "", "tenant"):
            deltas = await read(fakes.client.generate(PROMPT, cache_salt=salt))
            assert deltas[-1].usage.cached_tokens == 0
        fakes.decode.break_after = 6
        deltas = await read(fakes.client.generate(PROMPT))
        assert (text_of(deltas), deltas[-1].timings.replays) == ("The answer.", 1)
        *_, first, second = fakes.decode.submits
        assert first.root_hash == second.root_hash
        assert len({submit.root_hash for submit in fakes.decode.submits}) == 4
        *_, before, after = fakes.node.opened
        assert after.block_hashes.startswith(before.block_hashes)
        assert asked == [after.block_hashes], "a first attempt has nothing to find"
        await fakes.settled()


async def test_without_chunked_prefill_a_prefill_range_is_one_chunk() -> None:
    async with running_fake_cluster(enable_chunked_prefill=False) as fakes:
        await read(fakes.client.generate("x" * 251))
        assert [tuple(one.chunk_tokens) for one in fakes.prefill.prefill_ranges] == [(248,)]
        await fakes.settled()


async def sized(fakes, blocks: int) -> None:
    """Set the pool size in the node's heartbeat to ``blocks`` blocks."""
    node = next(component for component in fakes.gateway.cluster.view.records() if component.role == "kvnode")
    await fakes.registry.heartbeat(msgspec.structs.replace(node, total_blocks=blocks))
    await until("the pool's size to be known", lambda: fakes.gateway.cluster.pools_tokens("toy") == [blocks * BLOCK])


async def test_a_too_long_prompt_is_refused_and_an_answer_is_cut() -> None:
    async with running_fake_cluster("y" * 300) as fakes:
        await sized(fakes, 16)
        with pytest.raises(
            InvalidRequest,
            match=r"prompt: .* is 64 tokens, however you requested 65 tokens .* no KV pool here holds more",
        ):
            await read(fakes.client.generate("x" * 64))
        assert not fakes.node.opened
        whole = ({}, {"max_tokens": 34}, {"max_tokens": 35}, {"max_tokens": 10**6})
        for prompt, asked in (*((PROMPT, one) for one in whole), ("x" * 63, {})):
            deltas = await read(fakes.client.generate(prompt, **asked))
            usage = deltas[-1].usage
            assert (usage.prompt_tokens + usage.completion_tokens, deltas[-1].finish_reason) == (
                64,
                FinishReason.LENGTH,
            )
        # An unmeasured pool is no limit.
        await sized(fakes, 0)
        assert (await read(fakes.client.generate("x" * 100)))[-1].usage.completion_tokens == 156
        await fakes.settled()


async def test_streams_go_to_nodes_whose_pool_fits_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_fake_cluster() as fakes:
        await sized(fakes, 4)
        cluster = fakes.gateway.cluster
        served = cluster.served("toy", FINGERPRINT)
        assert len(cluster.candidates(served, 16)) == 3
        with pytest.raises(Unavailable, match="no KV node lives whose pool holds 17 tokens of model 'toy'"):
            cluster.candidates(served, 17)
        with pytest.raises(InvalidRequest, match="length is 16 tokens"):
            await read(fakes.client.generate(PROMPT))
        big = record("kv-1", "kvnode", "unix:nowhere", node_id="kv-1", total_blocks=64)
        worker = record("decode-1", "decode", "unix:nowhere", node_id="kv-1")
        view = cluster.view
        view.update([*view.records(), big, worker], time.monotonic())
        assert max(cluster.pools_tokens("toy")) == 256
        monkeypatch.setattr(cluster, "answers", lambda component: True)
        assert {component.node_id for component in cluster.candidates(served, 17)} == {"kv-1"}


@pytest.mark.parametrize(("policy", "split"), [("colocated", 0), ("fraction:0.5", 12), ("disaggregated", 28)])
async def test_split_policies(policy: str, split: int) -> None:
    async with running_fake_cluster(split_policy=policy) as fakes:
        assert text_of(await read(fakes.client.generate(PROMPT))) == "The answer."
        assert [one.start_tokens + len(one.token_ids) for one in fakes.prefill.prefill_ranges] == (
            [split] if split else []
        )


async def test_chat_is_rendered_by_the_models_own_template() -> None:
    async with running_fake_cluster() as fakes:
        await read(fakes.client.chat([{"role": "user", "content": "Hé"}]))
        rendered = "<bos>[user] Hé\n[assistant] "
        assert fakes.decode.submits[0].token_ids == CODEC.encode(rendered).ids


@pytest.mark.parametrize("per_delta", [1, 3, 50])
async def test_stop_strings_end_the_text_and_cancel_the_worker(per_delta: int) -> None:
    async with running_fake_cluster("one two three four") as fakes:
        fakes.decode.per_delta = per_delta
        # The worker's script exceeds the stop, and it pauses there until cancelled.
        fakes.decode.hold_after = 12
        deltas = await read(fakes.client.generate(PROMPT, stop=[" th", "zz"]))
        assert text_of(deltas) == "one two"
        assert [delta.stop_string for delta in deltas] == [""] * (len(deltas) - 1) + [" th"]
        assert deltas[-1].finish_reason is FinishReason.STOP
        assert deltas[-1].usage.completion_tokens == len("one two th") == sum(len(d.token_ids) for d in deltas)
        await fakes.settled()
        assert len(fakes.decode.cancelled) == (per_delta != 50)


async def test_a_single_stop_string_is_not_split_into_letters() -> None:
    async with running_fake_cluster("one two three four") as fakes:
        for options in ({"stop": " th"}, {"sampling": SamplingParams(stop=" th")}):  # type: ignore[arg-type]
            assert text_of(await read(fakes.client.generate(PROMPT, **options))) == "one two"
        await fakes.settled()


async def test_max_tokens_and_stop_ids_end_an_answer() -> None:
    async with running_fake_cluster("one. two.") as fakes:
        deltas = await read(fakes.client.generate(PROMPT, max_tokens=3))
        assert (text_of(deltas), deltas[-1].finish_reason) == ("one", FinishReason.LENGTH)
        dot = CODEC.encode(".").ids[0]
        deltas = await read(fakes.client.generate(PROMPT, stop_token_ids=[dot]))
        assert (text_of(deltas), deltas[-1].finish_reason) == ("one", FinishReason.STOP)
        assert deltas[-1].token_ids[-1] == dot
        deltas = await read(fakes.client.generate((1, 2, 3), sampling=SamplingParams(ignore_eos=True, max_tokens=10)))
        assert not fakes.decode.submits[-1].stop_token_ids
        assert deltas[-1].usage.prompt_tokens == 3
        await fakes.settled()


async def test_bad_requests_reach_no_part() -> None:
    async with running_fake_cluster() as fakes:
        with pytest.raises(InvalidRequest) as failure:
            await read(fakes.client.generate("", temperature=-1, max_tokens=-1, model="toy"))
        assert [v.field for v in failure.value.violations] == ["prompt", "sampling.temperature", "sampling.max_tokens"]
        with pytest.raises(NotFound, match="'other' is not served here; known: toy"):
            await read(fakes.client.generate("x", model="other"))
        with pytest.raises(
            InvalidRequest, match=r"maximum context length is 256 tokens, however you requested 301 tokens"
        ):
            await read(fakes.client.generate("x" * 300))
        with pytest.raises(InvalidRequest) as failure:
            await read(fakes.client.generate([1, 259, 2**32 - 1]))
        assert [v.field for v in failure.value.violations] == ["prompt[1]", "prompt[2]"]
        with pytest.raises(InvalidRequest) as failure:
            fakes.client.generate([1, -1, 1.5, 2**32, "a"])
        assert [v.field for v in failure.value.violations] == [f"prompt[{n}]" for n in range(1, 5)]
        assert "an integer, not float" in failure.value.message
        with pytest.raises(InvalidRequest) as failure:
            fakes.client.chat([])
        assert [v.field for v in failure.value.violations] == ["messages"]
        assert not fakes.node.opened
        await fakes.settled()


async def test_admission_is_bounded() -> None:
    async with running_fake_cluster(max_inflight_requests=2, max_inflight_tokens=70) as fakes:
        fakes.decode.gate.clear()
        first = asyncio.create_task(read(fakes.client.generate(PROMPT)))
        await until("a submit", lambda: fakes.decode.submits)
        with pytest.raises(Overloaded, match="max_inflight_tokens") as failure:
            await read(fakes.client.generate("x" * 41))
        assert failure.value.retry_after_ms == 1000
        second = asyncio.create_task(read(fakes.client.generate("y" * 40)))
        await until("two submits", lambda: len(fakes.decode.submits) == 2)
        with pytest.raises(Overloaded, match=r"max_inflight_requests \(2\)"):
            await read(fakes.client.generate("z"))
        fakes.decode.gate.set()
        assert text_of(await first) == text_of(await second) == "The answer."
        await fakes.settled()


@pytest.mark.parametrize(
    ("roles", "missing"),
    [("kvnode prefill", "no decode worker of model 'toy'"), ("prefill decode", "no KV node lives")],
)
async def test_missing_components_are_named(roles: str, missing: str) -> None:
    async with running_fake_cluster(roles=roles) as fakes:
        with pytest.raises(Unavailable, match=missing):
            await read(fakes.client.generate(PROMPT))
        assert await fakes.client.models() == []
        await fakes.settled()


async def test_no_prefill_worker_falls_back_to_the_decode_worker() -> None:
    async with running_fake_cluster(roles="kvnode decode") as fakes:
        deltas = await read(fakes.client.generate(PROMPT))
        assert deltas[-1].timings.plan_reason.startswith("disaggregated: co-located, no prefill worker")


async def test_the_blocking_client() -> None:
    async with running_fake_cluster() as fakes:

        def use() -> tuple[str, list[str], str]:
            with Client(fakes.gateway.grpc_address) as client:
                text = "".join(delta.text for delta in client.generate(PROMPT))
                stream = client.chat([{"role": "user", "content": "x"}])
                next(stream)
                stream.close()
                with pytest.raises(InvalidRequest):
                    next(client.generate(PROMPT, top_p=7))
                with pytest.raises(TypeError, match="not both"):
                    client.generate(PROMPT, sampling=SamplingParams(), top_k=3)
                return text, [model.name for model in client.models()], client.status().version

        assert await asyncio.to_thread(use) == ("The answer.", ["toy", "models/toy"], VERSION)
        await fakes.settled()


def get(address: str, path: str) -> tuple[int, dict]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=WITHIN_S) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


async def test_http_pages() -> None:
    async with running_fake_cluster() as fakes:
        address = fakes.gateway.http_address
        assert await asyncio.to_thread(get, address, "/health") == (200, {"status": "ok"})
        assert await asyncio.to_thread(get, address, "/version") == (200, {"version": VERSION})
        _, models = await asyncio.to_thread(get, address, "/v1/models")
        assert [(m["id"], m["object"], m["max_model_len"], m["weights"]) for m in models["data"]] == [
            (name, "model", 256, "gptq, 8 bits") for name in ("toy", "models/toy")
        ]
        await fakes.servers["decode"].stop(0)
        await until("the gateway to be not ready", lambda: fakes.gateway.gateway.not_ready())
        assert await asyncio.to_thread(get, address, "/health") == (
            503,
            {"status": "unavailable", "missing": "no decode worker of model 'toy' lives"},
        )


async def test_one_trace_spans_the_client_and_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("pillion.observability.telemetry.tracer", lambda: provider.get_tracer("test"))
    async with running_fake_cluster() as fakes:
        with provider.get_tracer("client").start_as_current_span("client") as client_span:
            await read(fakes.client.generate(PROMPT, request_id="r-9", max_tokens=4))
        await fakes.settled()
        # The client's span ends in a separate task.
        await until(
            "the client's span", lambda: "text_completion" in {span.name for span in exporter.get_finished_spans()}
        )
        spans = {span.name: span for span in exporter.get_finished_spans()}
        root = spans["generate toy"]
        asked = spans["text_completion"]
        assert asked.parent.span_id == client_span.get_span_context().span_id
        assert root.parent.span_id == asked.context.span_id
        for name in ("plan", "kv.pin"):
            assert spans[name].parent.span_id == root.context.span_id
        attributes = root.attributes
        assert (attributes["gen_ai.operation.name"], attributes["gen_ai.request.model"]) == ("text_completion", "toy")
        assert (attributes["gen_ai.response.id"], attributes["gen_ai.request.max_tokens"]) == ("r-9", 4)
        assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == (30, 4)
        assert attributes["gen_ai.response.finish_reasons"] == ("length",)
        assert attributes["gen_ai.request.stream"] is True
        assert "first token" in [event.name for event in root.events]
        sent = [dict(fakes.node.metadata[0])["traceparent"], dict(fakes.prefill.metadata[0])["traceparent"]]
        parents = [*sent, fakes.decode.submits[0].traceparent]
        expected = [spans["kv.pin"], root, root]
        assert [int(p.split("-")[2], 16) for p in parents] == [s.context.span_id for s in expected]
        assert {int(p.split("-")[1], 16) for p in parents} == {root.context.trace_id}
        assert trace.get_current_span() is trace.INVALID_SPAN
