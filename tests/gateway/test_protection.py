"""Keys, quotas, salts and turns of a running gateway, on both ports."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import grpc
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lab.testbed.conditions import until
from pillion import AsyncClient, Internal, Overloaded, PermissionDenied, Unauthenticated
from pillion.gateway.admission.api_keys import hash_of
from pillion.gateway.admission.tenants import Tenant, cache_salt
from pillion.gateway.http_api.model_calls import MAX_PROMPTS_AT_ONCE
from pillion.kvstore.hashing import request_root
from pillion.net.rpc import open_channel
from tests.support.fake_components import NAMESPACE, FakeCluster, running_fake_cluster
from tests.support.http import call, request_bytes
from tests.support.standing_quotas import standing_quotas

KEYS = {name: f"plk-{name}-" + name[0] * 40 for name in ("acme", "other", "friend", "small")}
FILE = """
[tenant.acme]
cache_group = "g"
[tenant.friend]
cache_group = "g"
operator = true
[tenant.other]
most_urgent_priority = -1
weight = 2.5
[tenant.small]
requests_per_minute = 3
tokens_per_minute = 40
"""
# Each page with several prompts: its path, the body with these prompts, and the field of the fourth.
LISTS: list[tuple[str, Callable[[list[str]], dict[str, Any]], str]] = [
    ("/v1/completions", lambda texts: {"prompt": texts, "max_tokens": 3}, "prompt[3]"),
    ("/v1/completions", lambda texts: {"prompt": texts, "max_tokens": 3, "stream": True}, "prompt[3]"),
    ("/v1/embeddings", lambda texts: {"input": texts}, "input[3]"),
    ("/classify", lambda texts: {"input": texts}, "input[3]"),
    ("/score", lambda texts: {"text_1": texts[0], "text_2": texts[1:]}, "text_2[2]"),
    ("/rerank", lambda texts: {"query": texts[0], "documents": texts[1:]}, "documents[2]"),
]
IDS = ["completions", "stream", "embeddings", "classify", "score", "rerank"]


def write_keys(path: pathlib.Path, tenants: str, names: list[str]) -> str:
    entries = "".join(f'[[key]]\ntenant = "{name}"\nhash = "{hash_of(KEYS[name])}"\n' for name in names)
    new = path.with_suffix(".new")
    new.write_text(tenants + entries)
    os.replace(new, path)
    return str(path)


@pytest.fixture
def file(tmp_path: pathlib.Path) -> str:
    return write_keys(tmp_path / "keys.toml", FILE, list(KEYS))


def client_of(fakes: FakeCluster, name: str) -> AsyncClient:
    return AsyncClient(fakes.gateway.grpc_address, api_key=KEYS[name] if name else "")


def header(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name]}"}


async def ask(client: AsyncClient, prompt: str = "hello", **options: Any) -> str:
    return "".join([delta.text async for delta in client.generate(prompt, **options)])


@contextlib.asynccontextmanager
async def running_with(file: str, **flags: Any) -> AsyncIterator[FakeCluster]:
    """Wait for a model in ``running_fake_cluster``, which needs a key; set a quota that does not refill."""
    with pytest.MonkeyPatch.context() as patch, standing_quotas():
        patch.setenv("PILLION_API_KEY", KEYS["friend"])
        async with running_fake_cluster("abc", api_keys=file, **flags) as fakes:
            yield fakes


@contextlib.asynccontextmanager
async def no_key_around() -> AsyncIterator[None]:
    """Remove the key from the environment, which clients would use."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PILLION_API_KEY", "")
        yield


async def test_without_a_key_only_health_is_answered(file: str) -> None:
    async with running_with(file) as fakes, no_key_around():
        for key in ("", "plk-" + "x" * 43):
            async with AsyncClient(fakes.gateway.grpc_address, api_key=key) as client:
                for asked in (ask(client), client.models(), client.status()):
                    with pytest.raises(Unauthenticated):
                        await asked
        address = fakes.gateway.http_address
        for headers in ({}, {"Authorization": "Bearer plk-" + "x" * 43}, {"Authorization": "x"}):
            for path, body in (
                ("/v1/completions", {"prompt": "x"}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
                ("/tokenize", {"prompt": "x"}),
                ("/detokenize", {"tokens": [1]}),
                ("/v1/models", None),
                ("/v1/models/toy", None),
            ):
                reply = await call(address, path, body, headers)
                assert (reply.status, reply.error["code"]) == (401, "invalid_api_key"), path
                assert reply.error["type"] == "invalid_request_error"
                assert reply.headers["www-authenticate"] == "Bearer"
        assert (await call(address, "/health")).status == 200
        assert (await call(address, "/version")).status == 200
        async with open_channel(fakes.gateway.grpc_address) as channel:
            reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        assert not fakes.decode.submits


async def test_a_body_is_not_read_without_a_key(file: str) -> None:
    async with running_with(file) as fakes:
        reader, writer = await asyncio.open_connection(*fakes.gateway.http_address.split(":"))
        lines = ("Host: localhost", "Content-Type: application/json", "Content-Length: 8000000", "\r\n")
        writer.write("\r\n".join(("POST /v1/completions HTTP/1.1", *lines)).encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
        writer.close()


async def test_a_key_opens_both_ports(file: str) -> None:
    async with running_with(file) as fakes:
        async with client_of(fakes, "acme") as client:
            assert await ask(client) == "abc"
            assert [model.name for model in await client.models()] == ["toy", "models/toy"]
            with pytest.raises(PermissionDenied, match="operator"):
                await client.status()
        assert (await fakes.client.status()).active_requests == 0
        url = f"http://{fakes.gateway.http_address}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=KEYS["acme"], max_retries=0) as good:
            assert (await good.completions.create(model="toy", prompt="x")).choices[0].text == "abc"
            assert [model.id async for model in await good.models.list()] == ["toy", "models/toy"]
        async with openai.AsyncOpenAI(base_url=url, api_key="wrong", max_retries=0) as wrong:
            with pytest.raises(openai.AuthenticationError) as caught:
                await wrong.completions.create(model="toy", prompt="x")
            assert caught.value.code == "invalid_api_key"
        assert (await call(fakes.gateway.http_address, "/tokenize", {"prompt": "x"}, header("acme"))).status == 200
        await fakes.settled()


async def test_quotas_on_both_ports(file: str) -> None:
    async with running_with(file) as fakes:
        async with client_of(fakes, "small") as client:
            assert await ask(client, "ab") == "abc"
            with pytest.raises(Overloaded) as caught:
                await ask(client, "x" * 41)
            assert [quota.subject for quota in caught.value.quotas] == ["small/tokens_per_minute"]
            assert 0 < caught.value.retry_after_ms <= 60_000
            for _ in range(2):
                assert await ask(client, "ab") == "abc"
            with pytest.raises(Overloaded) as caught:
                await ask(client, "ab")
            assert [quota.subject for quota in caught.value.quotas] == ["small/requests_per_minute"]
        reply = await call(fakes.gateway.http_address, "/v1/completions", {"prompt": "x"}, header("small"))
        assert (reply.status, reply.error["code"]) == (429, "rate_limit_exceeded")
        assert 0 < int(reply.headers["retry-after"]) <= 21
        async with client_of(fakes, "other") as client:
            assert await ask(client) == "abc"
        await fakes.settled()


def model_of(path: str, folder: pathlib.Path) -> dict[str, Any]:
    """Return the flags of a model for the page; a scripted worker's row has four numbers."""
    if path != "/classify":
        return {}
    config = folder / "config.json"
    labels = {str(n): f"label {n}" for n in range(4)}
    named = {"architectures": ["LlamaForSequenceClassification"], "model_type": "llama", "id2label": labels}
    config.write_text(json.dumps(named))
    return {"config": config}


@pytest.mark.parametrize(("path", "body", "fourth"), LISTS, ids=IDS)
async def test_a_call_of_several_prompts_is_admitted_atomically(
    tmp_path: pathlib.Path, path: str, body: Callable[[list[str]], dict[str, Any]], fourth: str
) -> None:
    tenants = "[tenant.small]\nrequests_per_minute = 3\n[tenant.other]\ntokens_per_minute = 20\n[tenant.friend]\n"
    file = write_keys(tmp_path / "keys.toml", tenants, ["small", "other", "friend"])
    async with running_with(file, **model_of(path, tmp_path)) as fakes:
        address = fakes.gateway.http_address
        single = partial(call, address, "/v1/completions", {"prompt": "x", "max_tokens": 3}, header("small"))
        wrong = await call(address, path, body(["a", "b", "c", "d"]), header("small"))
        assert (wrong.status, wrong.error["param"]) == (400, fourth)
        assert "requests_per_minute of tenant 'small' is 3" in wrong.error["message"]
        assert (await single()).status == 200
        full = await call(address, path, body(["a", "b", "c"]), header("small"))
        assert (full.status, full.error["code"]) == (429, "rate_limit_exceeded")
        assert "requests_per_minute" in full.error["message"]
        assert [(await single()).status for _ in range(3)] == [200, 200, 429]

        # Its tokens are counted as one: 16 of these and 7 of the first exceed the quota.
        submits = len(fakes.decode.submits)
        assert (
            await call(address, "/v1/completions", {"prompt": "x" * 5, "max_tokens": 2}, header("other"))
        ).status == 200
        full = await call(address, path, body(["a" * 6, "b" * 6, "c" * 6]), header("other"))
        assert full.status == 429
        assert "tokens_per_minute" in full.error["message"]
        assert len(fakes.decode.submits) == submits + 1
        assert (await call(address, path, body(["a", "b", "c"]), header("other"))).status == 200
        await fakes.settled()


@pytest.mark.parametrize(("path", "body", "fourth"), LISTS, ids=IDS)
async def test_a_call_that_is_refused_after_it_was_counted_costs_nothing(
    tmp_path: pathlib.Path, path: str, body: Callable[[list[str]], dict[str, Any]], fourth: str
) -> None:
    quotas = "requests_per_minute = 4\ntokens_per_minute = 60\nmax_inflight_tokens = 10\n"
    file = write_keys(tmp_path / "keys.toml", f"[tenant.small]\n{quotas}[tenant.friend]\n", ["small", "friend"])
    async with running_with(file, **model_of(path, tmp_path)) as fakes:
        address = fakes.gateway.http_address
        fakes.decode.gate.clear()
        async with client_of(fakes, "small") as client:
            first = asyncio.create_task(ask(client, "ab"))
            await until("a submit", lambda: len(fakes.decode.submits) == 1)
            for _ in range(3):
                full = await call(address, path, body(["a" * 9, "b" * 9, "c" * 9]), header("small"))
                assert full.status == 429
                assert "max_inflight_tokens" in full.error["message"]
            fakes.decode.gate.set()
            assert await first == "abc"
            for _ in range(3):
                assert await ask(client, "x" * 9) == "abc"
            with pytest.raises(Overloaded, match="requests_per_minute"):
                await ask(client, "ab")
        await fakes.settled()


async def test_requests_refused_by_workers_cost_nothing(tmp_path: pathlib.Path) -> None:
    tenants = "[tenant.small]\nrequests_per_minute = 3\ntokens_per_minute = 40\n[tenant.friend]\n"
    async with running_with(write_keys(tmp_path / "keys.toml", tenants, ["small", "friend"])) as fakes:
        for path, asked in (
            ("/v1/completions", {"prompt": "x" * 10}),
            ("/v1/completions", {"prompt": ["x" * 10, "y" * 10]}),
            ("/v1/embeddings", {"input": ["x" * 10, "y" * 10]}),
        ):
            for _ in range(2):
                # All prompts of the call are refused, so no answer begins, and none remains for the next call.
                fakes.decode.refusals = [(Overloaded.code, False)] * 2
                reply = await call(fakes.gateway.http_address, path, asked, header("small"))
                assert (reply.status, "per_minute" in reply.error["message"]) == (429, False)
                await fakes.settled()
                fakes.decode.refusals = []
        async with client_of(fakes, "small") as client:
            for _ in range(3):
                assert await ask(client, "x" * 10) == "abc"
            with pytest.raises(Overloaded, match="requests_per_minute"):
                await ask(client, "x")
        await fakes.settled()


async def test_prompts_that_never_began_cost_no_tokens(tmp_path: pathlib.Path) -> None:
    tenants = "[tenant.small]\ntokens_per_minute = 400\n[tenant.friend]\n"
    async with running_with(write_keys(tmp_path / "keys.toml", tenants, ["small", "friend"])) as fakes:
        fakes.decode.gate.clear()
        _, writer = await asyncio.open_connection(*fakes.gateway.http_address.split(":"))
        asked = {"prompt": ["x" * 10] * (MAX_PROMPTS_AT_ONCE + 8)}
        writer.write(request_bytes("POST", "/v1/completions", asked, header("small")))
        await until("as many prompts as run at once", lambda: len(fakes.decode.submits) == MAX_PROMPTS_AT_ONCE)
        writer.close()
        await until("the call to end", lambda: not fakes.gateway.gateway.active_requests)
        fakes.decode.gate.set()
        await fakes.settled()
        # The bucket is full with 400; eight prompts of ten tokens were refunded.
        fakes.gateway.gateway.quotas.take_prompt(Tenant(name="small", tokens_per_minute=400), 80, time.monotonic())


async def test_requests_refused_by_the_gateway_cost_nothing(file: str) -> None:
    """A full gateway refunds the request, and an unserved prompt its tokens."""
    async with running_with(file, max_inflight_requests=2) as fakes:
        async with client_of(fakes, "small") as client, client_of(fakes, "acme") as acme:
            fakes.decode.gate.clear()
            full = [asyncio.create_task(ask(one)) for one in (acme, fakes.client)]
            await until("two submits", lambda: len(fakes.decode.submits) == 2)
            for _ in range(5):
                with pytest.raises(Overloaded) as caught:
                    await ask(client, "ab")
                assert [quota.subject for quota in caught.value.quotas] == ["max_inflight_requests"]
            fakes.decode.gate.set()
            await asyncio.gather(*full)
            assert await ask(client, "ab") == "abc"
            fakes.decode.refusals = [(Internal.code, False)] * 2
            for _ in range(2):
                with pytest.raises(Internal):
                    await ask(client, "x" * 30)
        await fakes.settled()
        quotas = fakes.gateway.gateway.quotas
        await quotas.confirm(Tenant(name="small", tokens_per_minute=40), 30, time.monotonic())


async def test_tokenize_and_detokenize_are_counted(file: str) -> None:
    async with running_with(file) as fakes:
        address, core = fakes.gateway.http_address, fakes.gateway.gateway
        asked = [("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})] * 3
        replies = [await call(address, page, body, header("small")) for page, body in asked]
        assert [reply.status for reply in replies] == [200, 200, 200, 429, 429, 429]
        assert core.active_requests == 0
        echo = {"prompt": "hi", "echo": True}
        assert (await call(address, "/v1/completions", echo, header("other"))).json["choices"][0]["text"] == "hiabc"
        await fakes.settled()


async def test_block_hashes_are_salted_per_tenant(file: str) -> None:
    async with running_with(file) as fakes:
        for name in ("acme", "friend", "other"):
            for salt in ("", "mine"):
                async with client_of(fakes, name) as client:
                    await ask(client, cache_salt=salt)
        reply = await call(
            fakes.gateway.http_address, "/v1/completions", {"prompt": "hello", "cache_salt": "mine"}, header("other")
        )
        assert reply.status == 200
        roots = [submit.root_hash for submit in fakes.decode.submits]
        acme, acme_mine, friend, friend_mine, other, other_mine, by_http = roots
        assert (acme, acme_mine) == (friend, friend_mine)
        assert other_mine == by_http
        assert len({acme, acme_mine, other, other_mine}) == 4
        expected = cache_salt(Tenant(name="other"), "mine")
        assert by_http == request_root(bytes.fromhex(NAMESPACE), cache_salt=expected)


async def test_a_tenants_priority_is_capped(file: str) -> None:
    """Only a tenant with the permission precedes others, on either port."""
    async with running_with(file) as fakes:
        for name in ("other", "acme"):
            async with client_of(fakes, name) as client:
                for priority in (-50, 7):
                    await ask(client, priority=priority)
        body = {"prompt": "x", "priority": -50}
        assert (await call(fakes.gateway.http_address, "/v1/completions", body, header("acme"))).status == 200
        assert [submit.priority for submit in fakes.decode.submits] == [-1, 7, 0, 7, 0]


async def test_workers_get_each_tenants_key_and_weight(file: str) -> None:
    """On either port, without the tenant's name. Without tenants a worker gets no key."""
    async with running_with(file) as fakes:
        bodies: dict[str, dict[str, Any]] = {
            "/v1/completions": {"prompt": "x" * 40},
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "x" * 40}]},
            "/v1/responses": {"input": "x" * 40},
            "/v1/messages": {"messages": [{"role": "user", "content": "x" * 40}], "max_tokens": 3},
            "/v1/embeddings": {"input": "x" * 40},
        }
        seen = {}
        for name in ("other", "acme", "friend"):
            done, prefilled = len(fakes.decode.submits), len(fakes.prefill.prefill_ranges)
            opened = len(fakes.decode.node.opened)
            async with client_of(fakes, name) as client:
                await ask(client)
            for path, body in bodies.items():
                assert (
                    await call(fakes.gateway.http_address, path, {"model": "toy", **body}, header(name))
                ).status == 200
            flows = [submit.flow for submit in fakes.decode.submits[done:]]
            assert len(flows) == 1 + len(bodies)
            flows += [one.flow for one in fakes.prefill.prefill_ranges[prefilled:]]
            assert len(flows) > 1 + len(bodies), "no prefill worker was asked"
            flows += [one.flow for one in fakes.decode.node.opened[opened:]]
            assert len(flows) > 2 * (1 + len(bodies)), "the node was not asked for memory"
            ((seen[name], weight),) = {(flow.key, flow.weight) for flow in flows}
            assert weight == (2.5 if name == "other" else 1.0)
            assert name.encode() not in seen[name]
        assert len(set(seen.values())) == 3
    async with running_fake_cluster() as fakes:
        await ask(fakes.client)
        assert not fakes.decode.submits[0].HasField("flow")


async def test_keys_are_reloaded(file: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("pillion.gateway.gateway_server.WATCH_INTERVAL_S", 0.02)
    async with running_with(file) as fakes:
        fakes.decode.gate.clear()
        async with client_of(fakes, "other") as client, client_of(fakes, "acme") as acme:
            running = asyncio.create_task(ask(client))
            await until("a submit", lambda: fakes.decode.submits)
            write_keys(pathlib.Path(file), FILE, ["acme"])

            async def is_out() -> bool:
                try:
                    await client.models()
                except Unauthenticated:
                    return True
                return False

            await until("the key to be refused", is_out)
            assert await acme.models()
            fakes.decode.gate.set()
            assert await running == "abc"
            write_keys(pathlib.Path(file), "nonsense", [])
            await until("the complaint about the file", lambda: "the previous content stays in use" in caplog.text)
            assert await acme.models()
        await fakes.settled()


async def test_a_flood_waits_and_another_tenant_is_next(file: str) -> None:
    async with running_with(file, max_running_requests=1) as fakes:
        core = fakes.gateway.gateway
        fakes.decode.gate.clear()
        async with client_of(fakes, "acme") as flood, client_of(fakes, "other") as other:
            tasks = [asyncio.create_task(ask(flood, request_id=f"acme-{n}")) for n in range(6)]
            await until("five waiting requests", lambda: core.admission.waiting == 5)
            # With nothing at the workers it goes there at once, and its next request waits.
            first = asyncio.create_task(ask(other, request_id="other-0"))
            await until("two running requests", lambda: len(fakes.decode.submits) == 2)
            late = asyncio.create_task(ask(other, request_id="other-1"))
            await until("six waiting requests", lambda: core.admission.waiting == 6)
            gone = asyncio.create_task(ask(other, request_id="other-2"))
            await until("seven waiting requests", lambda: core.admission.waiting == 7)
            gone.cancel()
            await until("six waiting requests", lambda: core.admission.waiting == 6)
            fakes.decode.gate.set()
            assert await asyncio.gather(first, late, *tasks) == ["abc"] * 8
        order = [submit.request_id for submit in fakes.decode.submits]
        assert order[1] == "other-0"
        assert "other-1" in order[2:4]
        assert len(order) == 8
        await fakes.settled()


async def test_invalid_grpc_metadata(file: str) -> None:
    """A binary header, an empty one and a repeated one."""
    async with running_with(file) as fakes, open_channel(fakes.gateway.grpc_address) as channel:
        method = channel.unary_unary("/pillion.v1.Gateway/ListModels")
        for metadata in (
            (("authorization", ""),),
            (("authorization-bin", KEYS["acme"].encode()),),
            (("authorization", "Bearer nobody"), ("authorization", f"Bearer {KEYS['acme']}")),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await method(b"", metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
