"""Files and batches over HTTP: the real `openai` client, a real gateway, scripted peers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import json
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Batch

from lab.testbed.conditions import until
from pillion.config import GatewayFlags
from pillion.gateway.admission.api_keys import hash_of
from pillion.gateway.assemble import start_gateway
from pillion.gateway.batches import batch_folder, batch_machine, batch_runner, batches_api
from pillion.gateway.batches.batch_folder import TENANT_UPLOADS, BatchFolder
from pillion.gateway.batches.batches_api import MAX_FORM_BYTES
from pillion.gateway.batches.multipart import FormReader
from pillion.gateway.http_api.http_errors import ApiError
from pillion.observability import metric_catalog as names
from pillion.rules.priority import MAX_PRIORITY
from tests.support.batch_checks import check_batches
from tests.support.examples import examples
from tests.support.fake_components import FakeCluster, running_fake_cluster, toy_model
from tests.support.http import call, connected, parse_reply, request_bytes

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
FINAL = ("completed", "failed", "expired", "cancelled")
KEYS = {name: f"plk-{name}-" + name[0] * 40 for name in ("red", "blue")}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_runner, "POLL_MS", 20)


def client_of(address: str, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key=key, max_retries=0, timeout=60)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the retry delay and the reload of keys."""
    monkeypatch.setattr(batch_machine, "BACKOFF_S", 0.02)
    monkeypatch.setattr("pillion.gateway.gateway_server.WATCH_INTERVAL_S", 0.02)


@contextlib.asynccontextmanager
async def running(path: pathlib.Path, **flags: Any) -> AsyncIterator[tuple[FakeCluster, openai.AsyncOpenAI]]:
    """Run a gateway with a batch folder, and a client; check the folder at the end."""
    async with running_fake_cluster(batch_path=str(path), **flags) as fakes:
        async with client_of(fakes.gateway.http_address, KEYS["red"]) as client:
            yield fakes, client
        await fakes.settled()
    sound(path)


def sound(path: pathlib.Path) -> None:
    check_batches(BatchFolder(path, max_bytes=1, file_bytes=1, keep_s=1))


def kept(path: pathlib.Path) -> list[pathlib.Path]:
    return list(path.glob("files/*"))


def lines(*bodies: Any, url: str = CHAT) -> bytes:
    requests = ({"custom_id": f"c{n}", "method": "POST", "url": url, "body": body} for n, body in enumerate(bodies))
    return b"".join(json.dumps(one).encode() + b"\n" for one in requests)


def chats(count: int, **more: Any) -> bytes:
    return lines(*({"model": "toy", "messages": [{"role": "user", "content": f"{n}"}], **more} for n in range(count)))


async def begun(client: openai.AsyncOpenAI, content: bytes, url: Any = CHAT, **more: Any) -> Batch:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h", **more)


async def ended(client: openai.AsyncOpenAI, batch: Batch, status: str = "completed") -> Batch:
    async def over() -> bool:
        return (await client.batches.retrieve(batch.id)).status in FINAL

    await until("the batch to end", over)
    found = await client.batches.retrieve(batch.id)
    assert found.status == status, found
    return found


async def said(client: openai.AsyncOpenAI, name: str | None) -> dict[str, Any]:
    """Return the lines of an output by custom id, each exactly once."""
    assert name is not None
    found = [json.loads(line) for line in (await client.files.content(name)).text.splitlines()]
    assert len({one["custom_id"] for one in found}) == len({one["id"] for one in found}) == len(found)
    return {one["custom_id"]: one for one in found}


def counted(fakes: FakeCluster, outcome: str) -> float:
    return fakes.gateway.meters.counter(names.BATCH_LINES, outcome).value


async def test_a_batch_is_answered_line_by_line(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path) as (fakes, client):
        good = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "priority": -5}
        bad = ({**good, "model": "other"}, {**good, "top_p": 7}, {**good, "stream": True}, {"messages": 3})
        batch = await begun(client, lines(good, *bad, good), metadata={"team": "a"})
        assert (batch.object, batch.endpoint, batch.completion_window) == ("batch", CHAT, "24h")
        assert batch.metadata == {"team": "a"}
        batch = await ended(client, batch)
        assert batch.request_counts is not None
        assert batch.request_counts.to_dict() == {"total": 6, "completed": 2, "failed": 4}
        stamps = (batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at, batch.expires_at)
        assert list(stamps) == sorted(filter(None, stamps))
        answers, errors = await said(client, batch.output_file_id), await said(client, batch.error_file_id)
        assert set(answers) == {"c0", "c5"}
        response = answers["c0"]["response"]
        assert answers["c0"]["error"] is None
        assert response["status_code"] == 200
        assert response["body"]["choices"][0]["message"]["content"] == "The answer."
        assert response["body"]["object"] == "chat.completion"
        assert response["request_id"] in {submit.request_id for submit in fakes.decode.submits}
        assert [(errors[f"c{n}"]["response"]["status_code"]) for n in range(1, 5)] == [404, 400, 400, 400]
        params = [errors[f"c{n}"]["response"]["body"]["error"]["param"] for n in range(1, 5)]
        assert params == ["model", "top_p", "stream", "messages"]
        assert {submit.priority for submit in fakes.decode.submits} == {MAX_PRIORITY}
        assert (counted(fakes, "completed"), counted(fakes, "failed"), counted(fakes, "retried")) == (2, 4, 0)
        readings = fakes.gateway.meters.collect()[names.BATCH_LINES_NOW]
        assert readings == {("running",): 0, ("queued",): 0}


async def test_a_completions_batch_is_answered_and_lists_are_paginated(tmp_path: pathlib.Path) -> None:
    content = lines({"model": "toy", "prompt": "x"}, url=TEXT)
    async with running(tmp_path) as (_, client):
        first = await ended(client, await begun(client, content, TEXT))
        body = (await said(client, first.output_file_id))["c0"]["response"]["body"]
        assert (body["object"], body["choices"][0]["text"]) == ("text_completion", "The answer.")
        second = await ended(client, await begun(client, chats(1)))
        listed = [one async for one in client.batches.list(limit=1)]
        assert {one.id for one in listed} == {first.id, second.id}
        assert listed[0].created_at >= listed[1].created_at
        assert not (await client.batches.list(after=listed[-1].id)).data
        files = [one async for one in client.files.list(limit=1)]
        assert {one.purpose for one in files} == {"batch", "batch_output"}
        outputs = [one.id async for one in client.files.list(purpose="batch_output")]
        assert set(outputs) == {first.output_file_id, second.output_file_id}
        backwards = [one.id async for one in client.files.list(order="asc")]
        assert backwards == [one.id for one in files[::-1]]
        file = await client.files.retrieve(first.input_file_id)
        assert (file.filename, file.bytes, file.status) == ("in.jsonl", len(content), "processed")
        assert (await client.files.content(file.id)).content == content
        assert (await client.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(file.id)
        with pytest.raises(openai.ConflictError, match="completed"):
            await client.batches.cancel(first.id)


async def test_messages_lines_have_anthropics_answers_and_errors(tmp_path: pathlib.Path) -> None:
    good = {"model": "toy", "max_tokens": 50, "messages": [{"role": "user", "content": "x"}]}
    async with running(tmp_path) as (fakes, client):
        fakes.decode.refusals = [(14, False)]
        batch = await begun(client, lines(good, {**good, "max_tokens": -2}, url="/v1/messages"), "/v1/messages")
        batch = await ended(client, batch)
        body = (await said(client, batch.output_file_id))["c0"]["response"]["body"]
        assert (body["type"], body["content"][0]["text"]) == ("message", "The answer.")
        response = (await said(client, batch.error_file_id))["c1"]["response"]
        assert (response["status_code"], response["body"]["error"]["type"]) == (400, "invalid_request_error")


async def test_a_long_file_is_streamed_both_ways(tmp_path: pathlib.Path) -> None:
    content = bytes(range(256)) * 12_000
    async with running(tmp_path, batch_file_bytes=len(content)) as (fakes, client):
        file = await client.files.create(file=("in.jsonl", content), purpose="batch")
        assert file.bytes == len(content)
        assert (await client.files.content(file.id)).content == content
        with pytest.raises(openai.APIStatusError) as failed:
            await client.files.create(file=("in.jsonl", content + b"x"), purpose="batch")
        assert failed.value.status_code == 413
        head = await call(fakes.gateway.http_address, f"/v1/files/{file.id}/content", method="HEAD")
        assert (head.status, head.body) == (200, b"")
        assert len(kept(tmp_path)) == 2


async def test_an_invalid_input_file_fails_with_its_bad_lines(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path) as (fakes, client):
        good = lines({"model": "toy", "messages": []})
        batch = await ended(client, await begun(client, good + good + b"{\n" + lines({}, url=TEXT)), "failed")
        assert batch.errors is not None
        assert [(error.line, error.code) for error in batch.errors.data or ()] == [
            (2, "duplicate_custom_id"),
            (3, "invalid_json_line"),
            (4, "duplicate_custom_id"),
        ]
        assert batch.failed_at
        assert not fakes.decode.submits


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"endpoint": "/v1/pooling"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"metadata": {"x": 1}}, "metadata[...]"),
        ({"metadata": {"x" * 65: ""}}, "metadata"),
        ({"output_expires_after": {"anchor": "last_active_at", "seconds": 3600}}, "output_expires_after.anchor"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 0}}, "output_expires_after.seconds"),
        ({"priority": 3}, "input_file_id"),
    ],
)
async def test_a_wrong_batch_is_refused(served: str, body: dict[str, Any], param: str) -> None:
    asked = {"input_file_id": "file-" + "0" * 24, "endpoint": CHAT, "completion_window": "24h"}
    reply = await call(served, "/v1/batches", asked | body)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert reply.headers.get("x-pillion-ignored", "") == ("priority" if "priority" in body else "")


def form(*parts: tuple[str, str, bytes], end: bytes = b"--\r\n") -> tuple[bytes, dict[str, str]]:
    """Encode a multipart form (name, further disposition, content of each part); return body and headers."""
    body = b"".join(
        f'--x\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + content + b"\r\n"
        for name, more, content in parts
    )
    return body + b"--x" + end, {"Content-Type": "multipart/form-data; boundary=x"}


FILE = ("file", '; filename="a.jsonl"', b"content")
PURPOSE = ("purpose", "", b"batch")


@pytest.fixture
async def served(tmp_path: pathlib.Path) -> AsyncIterator[str]:
    async with running(tmp_path, batch_file_bytes=1000) as (fakes, _):
        yield fakes.gateway.http_address


async def test_wrong_forms_are_refused_and_leave_nothing(served: str, tmp_path: pathlib.Path) -> None:
    wrong = {
        (400, "purpose"): [form(FILE), form(FILE, ("purpose", "", b"fine-tune")), form(FILE, PURPOSE, PURPOSE)],
        (400, "file"): [form(PURPOSE), form(FILE, FILE, PURPOSE), form(PURPOSE, (*FILE[:2], b""))],
        (400, "expires_after[anchor]"): [form(FILE, PURPOSE, ("expires_after[anchor]", "", b"last_active_at"))],
        (400, "expires_after[seconds]"): [
            form(FILE, PURPOSE, ("expires_after[seconds]", "", seconds)) for seconds in (b"0", b"-1", b"x", b"9" * 10)
        ],
        (413, "file"): [form(PURPOSE, (*FILE[:2], bytes(2000)))],
        (400, None): [form(FILE, PURPOSE, end=b""), (b"nonsense", form(FILE)[1]), (b"", form(FILE)[1])],
        (415, None): [(b"{}", {}), (b"x", {"Content-Type": "multipart/form-data"})],
    }
    for (status, param), forms in wrong.items():
        for body, headers in forms:
            reply = await call(served, "/v1/files", body, headers)
            assert (reply.status, reply.error["param"]) == (status, param), body
    assert not kept(tmp_path)
    for parts in ((FILE, PURPOSE), (PURPOSE, FILE)):
        body, headers = form(*parts)
        assert (await call(served, "/v1/files", body, headers)).json["bytes"] == 7


async def test_files_expire_as_requested(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, batch_keep_days=1) as (_, client):
        wanted: Any = {"anchor": "created_at", "seconds": 7200}
        for expires_after, seconds in ((wanted, 7200), ({**wanted, "seconds": 2_592_000}, 86_400)):
            file = await client.files.create(file=("in.jsonl", chats(1)), purpose="batch", expires_after=expires_after)
            assert file.expires_at == file.created_at + seconds
        batch = await client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h", output_expires_after=wanted
        )
        output = await client.files.retrieve((await ended(client, batch)).output_file_id or "")
        assert output.expires_at == output.created_at + 7200


async def test_unknown_form_fields_are_named(served: str) -> None:
    body, headers = form(FILE, PURPOSE, ("user", "", b"x"))
    reply = await call(served, "/v1/files", body, headers)
    assert (reply.status, reply.headers["x-pillion-ignored"]) == (200, "user")


async def test_concurrent_uploads_per_tenant_are_limited(served: str, tmp_path: pathlib.Path) -> None:
    body, headers = form(PURPOSE, FILE)
    begun_only = request_bytes("POST", "/v1/files", body, headers)[:-20]
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(TENANT_UPLOADS):
            _, writer = await stack.enter_async_context(connected(served))
            writer.write(begun_only)
        await until("the files to be begun", lambda: len(kept(tmp_path)) == TENANT_UPLOADS)
        reply = await call(served, "/v1/files", body, headers)
        assert (reply.status, reply.error["code"]) == (429, "rate_limit_exceeded")
    await until("them to be gone", lambda: not kept(tmp_path))
    assert (await call(served, "/v1/files", body, headers)).status == 200


async def test_a_slow_upload_times_out(served: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches_api, "UPLOAD_GRACE_S", 0.0)
    body, headers = form(PURPOSE, FILE)
    async with connected(served) as (reader, writer):
        writer.write(request_bytes("POST", "/v1/files", body, headers)[:-20])
        said = parse_reply(await reader.read())
    assert (said.status, "less than 16384 bytes/s" in said.error["message"]) == (408, True)
    await until("nothing to stay", lambda: not kept(tmp_path))


async def test_the_size_of_a_form_is_bounded(served: str, tmp_path: pathlib.Path) -> None:
    """Even for an unknown length, and if the long part is not a file."""
    _, headers = form(PURPOSE, FILE)
    headers |= {"Transfer-Encoding": "chunked"}
    head = request_bytes("POST", "/v1/files", b"", headers).replace(b"Content-Length: 0\r\n", b"")
    # One byte above the limit; a server that closes before reading all resets the connection.
    sent = form(PURPOSE, FILE)[0].ljust(1000 + MAX_FORM_BYTES + 1, b"z")
    async with connected(served) as (reader, writer):
        writer.write(head + b"%x\r\n%b" % (len(sent), sent))
        assert parse_reply(await reader.read()).status == 413
    await until("nothing to stay", lambda: not kept(tmp_path))


async def test_invalid_queries_are_refused(served: str) -> None:
    for path, param in (
        ("/v1/files?limit=0", "limit"),
        ("/v1/files?limit=x", "limit"),
        ("/v1/files?order=up", "order"),
        ("/v1/batches?limit=101", "limit"),
        ("/v1/batches?purpose=batch", "purpose"),
        ("/v1/files?limit=1&limit=2", "limit"),
    ):
        reply = await call(served, path)
        assert (reply.status, reply.error["param"]) == (400, param)
    for path in ("/v1/files/none", "/v1/files/none/content", "/v1/batches/none", "/v1/files?after=none"):
        assert (await call(served, path)).status == 404
    reply = await call(served, "/v1/files", method="PUT")
    assert (reply.status, reply.error["message"]) == (405, "/v1/files takes POST or GET")


@given(st.binary(max_size=300), st.lists(st.integers(0, 700), max_size=6))
@settings(max_examples=examples(200))
def test_a_form_parses_alike_in_any_chunks(content: bytes, cuts: list[int]) -> None:
    content = content.replace(b"--x", b"")
    body, headers = form(PURPOSE, ("file", '; filename="ä.jsonl"', content))
    reader, found = FormReader(headers["Content-Type"]), b""
    edges = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    for begin, end in itertools.pairwise(edges):
        found += reader.feed(body[begin:end])
    reader.end()
    assert (found, reader.fields, reader.filename) == (content, {"purpose": "batch"}, "ä.jsonl")


@given(st.binary(max_size=200))
@settings(max_examples=examples(200))
def test_random_bytes_do_not_break_the_form_parser(body: bytes) -> None:
    with contextlib.suppress(ApiError):
        reader = FormReader("multipart/form-data; boundary=x")
        reader.feed(b'--x\r\nContent-Disposition: form-data; name="file"; filename=""\r\n')
        reader.feed(body)
        reader.end()


async def test_without_a_folder_the_error_names_the_flag() -> None:
    async with running_fake_cluster() as fakes, client_of(fakes.gateway.http_address) as client:
        for ask in (client.files.list(), client.batches.list(), begun(client, chats(1))):
            with pytest.raises(openai.NotFoundError, match="--batch-path"):
                await ask


async def test_a_full_folder_is_507(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, batch_bytes=2**20, batch_file_bytes=2**20) as (_, client):
        await client.files.create(file=("in.jsonl", b"{}"), purpose="batch")
        with pytest.raises(openai.APIStatusError, match="bytes") as failed:
            await client.files.create(file=("in.jsonl", bytes(2**20)), purpose="batch")
        assert (failed.value.status_code, failed.value.code) == (507, "insufficient_storage")


async def test_tenants_see_and_pay_for_their_own_batches(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PILLION_API_KEY", KEYS["red"])
    keys = tmp_path / "keys.toml"
    tenants = "[tenant.red]\ntokens_per_minute = 100000\n[tenant.blue]\n"
    rows = [f'[[key]]\ntenant = "{name}"\nhash = "{hash_of(key)}"\n' for name, key in KEYS.items()]
    keys.write_text(tenants + "".join(rows))
    async with running(tmp_path / "b", api_keys=str(keys)) as (fakes, red):
        batch = await ended(red, await begun(red, chats(3)))
        spent: Any = fakes.gateway.gateway.quotas
        tenant = fakes.gateway.gateway.tenant_named("red")
        assert tenant is not None
        assert spent._bucket(tenant, "tokens_per_minute", 0)._level < 100_000
        async with client_of(fakes.gateway.http_address, KEYS["blue"]) as blue:
            assert not (await blue.files.list()).data
            assert not (await blue.batches.list()).data
            for ask in (blue.batches.retrieve, blue.batches.cancel):
                with pytest.raises(openai.NotFoundError):
                    await ask(batch.id)
            for look in (blue.files.retrieve, blue.files.content, blue.files.delete):
                with pytest.raises(openai.NotFoundError):
                    await look(str(batch.output_file_id))
            with pytest.raises(openai.BadRequestError, match="input_file_id"):
                await blue.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
        async with client_of(fakes.gateway.http_address, "wrong") as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.files.list()
        fakes.decode.gate.clear()
        batch = await begun(red, chats(2))
        await until("its lines to run", lambda: len(fakes.decode.streams) == 2)
        keys.write_text(tenants.replace("red", "green") + rows[1] + rows[0].replace("red", "green"))
        folder = BatchFolder(tmp_path / "b", max_bytes=1, file_bytes=1, keep_s=10**6)
        await until("its end", lambda: folder.batch("red", batch.id).status == "failed")
        assert [error.code for error in folder.batch("red", batch.id).errors] == ["unknown_tenant"]
        fakes.decode.gate.set()


async def test_batches_leave_room_for_live_requests(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, max_running_requests=8, max_inflight_requests=20) as (fakes, client):
        fakes.decode.gate.clear()
        batch = await begun(client, chats(40))
        await until("half of the slots to be taken", lambda: len(fakes.decode.streams) == 4)
        admission = fakes.gateway.gateway.admission
        await until("half of the gateway to be taken", lambda: admission.requests == 10)
        live = [
            asyncio.create_task(call(fakes.gateway.http_address, TEXT, {"model": "toy", "prompt": "x"}))
            for _ in range(10)
        ]
        await until("the live ones to go first", lambda: len(fakes.decode.streams) == 8)
        assert sum(submit.priority == 0 for submit in fakes.decode.submits) == 4
        fakes.decode.gate.set()
        assert [reply.status for reply in await asyncio.gather(*live)] == [200] * 10
        await ended(client, batch)
        assert len(await said(client, (await client.batches.retrieve(batch.id)).output_file_id)) == 40


async def test_a_refused_line_is_retried(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First live requests fill the gateway, then the worker refuses, then a quota is used up."""
    monkeypatch.setattr("pillion.gateway.http_api.http_errors.RETRY_AFTER_MS", 10)
    monkeypatch.setattr("pillion.gateway.admission.admission.RETRY_AFTER_MS", 10)
    async with running(tmp_path, max_inflight_requests=4) as (fakes, client):
        fakes.decode.gate.clear()
        live = [
            asyncio.create_task(call(fakes.gateway.http_address, TEXT, {"model": "toy", "prompt": "x"}))
            for _ in range(3)
        ]
        await until("them to run", lambda: len(fakes.decode.streams) == 3)
        batch = await begun(client, chats(3))
        await until("a refusal", lambda: counted(fakes, "retried"))
        assert len(fakes.decode.streams) == 3
        fakes.decode.refusals = [(8, False), (14, False)]
        fakes.decode.gate.set()
        await asyncio.gather(*live)
        batch = await ended(client, batch)
        assert set(await said(client, batch.output_file_id)) == {"c0", "c1", "c2"}
        rejected = fakes.gateway.meters.collect().get(names.REJECTED, {})
        assert rejected == {}, "nobody was turned away"


async def test_a_cancelled_batch_returns_its_finished_lines(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, max_batch_requests=2) as (fakes, client):
        batch = await begun(client, chats(50))
        await until("some to be done", lambda: counted(fakes, "completed") >= 3)
        fakes.decode.gate.clear()
        batch = await client.batches.cancel(batch.id)
        assert batch.status == "cancelling"
        batch = await ended(client, batch, "cancelled")
        await fakes.settled()
        fakes.decode.gate.set()
        assert batch.request_counts is not None
        done = batch.request_counts.completed
        assert 3 <= done < 50
        assert len(await said(client, batch.output_file_id)) == done
        assert batch.error_file_id is None


async def test_an_expired_batch_lists_its_unserved_lines(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_folder, "COMPLETION_WINDOW_S", 0)
    async with running(tmp_path) as (_, client):
        batch = await ended(client, await begun(client, chats(2)), "expired")
        errors = await said(client, batch.error_file_id)
        assert [one["error"]["code"] for one in errors.values()] == ["batch_expired"] * 2
        assert [one["response"] for one in errors.values()] == [None, None]


async def test_another_gateway_continues_a_batch(tmp_path: pathlib.Path) -> None:
    """Only one of two runs the batch; both report its progress; the second continues after the first ends."""
    async with running(tmp_path, max_batch_requests=2) as (fakes, client):
        flags = GatewayFlags(
            redis_url=fakes.redis.url, block_size=4, chunk_size=8, http_port=0, grpc_port=0, batch_path=str(tmp_path)
        )
        one = await start_gateway(flags, prepared=toy_model(fakes.folder / "one"))
        batch = await begun(client, chats(60))
        gateways = {one: one.meters, fakes.gateway: fakes.gateway.meters}

        def done() -> dict[Any, float]:
            return {
                gateway: meters.counter(names.BATCH_LINES, "completed").value for gateway, meters in gateways.items()
            }

        await until("some to be done", lambda: sum(done().values()) >= 5)
        fakes.decode.gate.clear()
        (first,) = [gateway for gateway, count in done().items() if count]
        other = next(gateway for gateway in gateways if gateway is not first)
        async with client_of(other.http_address) as second:
            assert (await second.batches.retrieve(batch.id)).status == "in_progress"
        await first.stop(0)
        fakes.decode.gate.set()
        async with client_of(other.http_address) as second:
            batch = await ended(second, batch)
            assert len(await said(second, batch.output_file_id)) == 60
        assert done()[other] > 0
        await one.stop(0)


async def test_a_full_disk_pauses_a_batch(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_runner, "RETRY_DELAY_MS", 20)
    monkeypatch.setattr(batch_runner, "SWEEP_MS", 20)
    async with running(tmp_path) as (_, client):
        attempts = 0
        append = batch_runner.BatchClaim.append

        def full(held: Any, entries: Any) -> None:
            nonlocal attempts
            attempts += 1
            if attempts < 4:
                raise batch_folder.FolderFull("the disk is full", 10)
            append(held, entries)

        monkeypatch.setattr(batch_runner.BatchClaim, "append", full)
        batch = await ended(client, await begun(client, chats(5)))
        assert attempts >= 4
        assert len(await said(client, batch.output_file_id)) == 5


async def test_a_failing_disk_is_logged_once_until_it_recovers(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Log one line, not tracebacks, for a failing scan or read; continue afterwards."""
    for name in ("POLL_MS", "SWEEP_MS", "RETRY_DELAY_MS"):
        monkeypatch.setattr(batch_runner, name, 20)
    failing = {"sweep": 6, "line": 6}
    sweep, line = batch_folder.BatchFolder.sweep, batch_runner.BatchClaim.line

    def fail(what: str) -> None:
        if failing[what]:
            failing[what] -= 1
            raise OSError(errno.EIO, f"Input/output error in {what}")

    def failing_sweep(folder: Any, now_s: float) -> None:
        fail("sweep")
        sweep(folder, now_s)

    def failing_line(held: Any, number: int) -> Any:
        fail("line")
        return line(held, number)

    monkeypatch.setattr(batch_folder.BatchFolder, "sweep", failing_sweep)
    monkeypatch.setattr(batch_runner.BatchClaim, "line", failing_line)
    async with running(tmp_path) as (_, client):
        batch = await ended(client, await begun(client, chats(5)))
        assert len(await said(client, batch.output_file_id)) == 5
    assert not any(failing.values())
    assert not [record for record in caplog.records if record.exc_info]
    assert sum("Input/output error in sweep" in record.message for record in caplog.records) == 1


async def test_a_full_folder_pauses_all_lines(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_runner, "SWEEP_MS", 20)
    runners: list[batch_runner.BatchRunner] = []
    start = batch_runner.BatchRunner.start

    def noted_start(runner: batch_runner.BatchRunner) -> None:
        runners.append(runner)
        start(runner)

    monkeypatch.setattr(batch_runner.BatchRunner, "start", noted_start)
    async with running(tmp_path, max_batch_requests=2) as (fakes, client):
        fakes.decode.gate.clear()
        batch = await begun(client, chats(20))
        await until("lines to run", lambda: len(fakes.decode.streams) == 2)
        (runner,) = runners
        runner.folder.max_bytes = 1
        await until("the gateway to see it", lambda: runner._full)
        fakes.decode.gate.set()
        await until("the two to end", lambda: counted(fakes, "completed") == 2)
        readings = fakes.gateway.meters.collect()[names.BATCH_LINES_NOW]
        assert readings == {("running",): 0, ("queued",): 18}
        runner.folder.max_bytes = 10**9
        await ended(client, batch)
