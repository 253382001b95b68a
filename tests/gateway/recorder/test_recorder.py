"""Selection and contents of recorded requests, without delaying any: a real gateway, fake workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lab.testbed.admitted import admitted_request
from lab.testbed.conditions import until
from lab.testbed.recorded_requests import TEMPLATE
from pillion import Delta, PillionError
from pillion.client.client_requests import prompt_request, to_pb
from pillion.config import GatewayFlags
from pillion.errors import ConfigError
from pillion.gateway.admission.tenants import OPEN
from pillion.gateway.gateway_limits import GatewayLimits
from pillion.gateway.recorder import recorder as recorders
from pillion.gateway.recorder.record_folder import PART_AGE_S, RecordFolder
from pillion.gateway.recorder.record_store import read_named
from pillion.net import rpc
from pillion.observability import metric_catalog as names
from pillion.records.bundle import KEY_FILE, Bundle, encode, hidden, read, read_key
from pillion.supervisor.preflight import check_files
from pillion.types import AnswerSoFar, FinishReason, Resume, SamplingParams
from pillion.v1.gateway_pb2_grpc import GatewayStub
from pillion.wire.public import RECORD_HEADER, origin_from_pb
from tests.pillion.records.test_bundle import bundle_of
from tests.support.fake_components import FakeCluster, running_fake_cluster, script_of
from tests.support.http import call

PROMPT = "What is the capital of France?"
SCRIPT = "Paris, naturally."


@contextlib.asynccontextmanager
async def recording(folder: pathlib.Path, **flags: Any) -> AsyncIterator[FakeCluster]:
    async with running_fake_cluster(SCRIPT, record_path=str(folder), **flags) as fakes:
        yield fakes


def files(folder: pathlib.Path) -> list[pathlib.Path]:
    return list(folder.glob("*.json"))


async def recorded(folder: pathlib.Path, count: int = 1) -> list[Bundle]:
    """Return the bundles of a folder in order of arrival, once it has ``count``. Files written in the same tick of the
    kernel clock have equal mtimes."""
    await until(f"{count} bundles", lambda: len(files(folder)) >= count)
    key = read_key(folder / KEY_FILE)
    found = [read(path, key) for path in files(folder)]
    assert all(verified for _, verified in found)
    return sorted((bundle for bundle, _ in found), key=lambda one: one.created_unix_ms)


async def ask(fakes: FakeCluster, prompt: str = PROMPT, **sampling: Any) -> list[Delta]:
    return [delta async for delta in fakes.client.generate(prompt, **sampling)]


def counts(fakes: FakeCluster) -> dict[str, float]:
    return {reason: value for (reason,), value in fakes.gateway.meters.collect().get(names.RECORDED, {}).items()}


def ids_of(deltas: list[Delta], index: int) -> tuple[int, ...]:
    return tuple(one for delta in deltas if delta.index == index for one in delta.token_ids)


async def test_a_whole_request_is_recorded(tmp_path: pathlib.Path) -> None:
    async with recording(tmp_path, record_share=1.0, record_content="full") as fakes:
        deltas = await ask(fakes, n=2, temperature=0.5, stop=["?!"], logprobs=0)
        (bundle,) = await recorded(tmp_path)
    request, timings = bundle.request, bundle.timings
    assert (bundle.reason, bundle.tenant, bundle.error, bundle.content) == ("share", "", "", "full")
    assert request.token_ids == script_of(PROMPT)[:-1]
    assert (request.prompt_tokens, request.operation, request.label) == (30, "text_completion", deltas[0].request_id)
    assert [answer.token_ids for answer in bundle.answers] == [ids_of(deltas, 0), ids_of(deltas, 1)]
    assert {answer.finish_reason for answer in bundle.answers} == {"stop"}
    assert [len(answer.logprobs) for answer in bundle.answers] == [len(answer.token_ids) for answer in bundle.answers]
    seeds = [fakes.decode.submits[0].sampling.seed, fakes.decode.submits[0].siblings[0].seed]
    assert seeds == [request.sampling.seed, request.sampling.seed + 1]
    assert (request.sampling.temperature, request.sampling.stop, request.sampling.n) == (0.5, ("?!",), 2)
    assert bundle.usage.completion_tokens == sum(answer.tokens for answer in bundle.answers)
    assert (timings.prefill_worker, timings.decode_worker) == ("prefill-0", "decode-0")
    assert {one.component_id: one.role for one in bundle.workers} == {"prefill-0": "prefill", "decode-0": "decode"}
    told = [event.what for event in bundle.story if not event.answer]
    wanted = ["arrived", "ready", "turn", "planned", "memory", "ticket", "prefill", "submitted", "chunk", "adopted"]
    # Acknowledged chunks and tokens may interleave.
    assert sorted(event.at_ms for event in bundle.story) == [event.at_ms for event in bundle.story]
    assert [what for what in wanted if what not in told] == []
    assert told.index("planned") < told.index("ticket") < told.index("chunk") < told.index("tokens")
    plan = next(event for event in bundle.story if event.what == "planned")
    assert [(one.decode, one.prefill, one.chosen) for one in plan.weighed] == [("decode-0", "prefill-0", True)]


async def test_the_recorded_finish_reason_is_the_clients(tmp_path: pathlib.Path) -> None:
    call_of_a_tool = '<tool_call>\n{"name": "near", "arguments": {}}\n</tool_call>'
    flags = {"record_path": str(tmp_path), "record_share": 1.0}
    async with running_fake_cluster(call_of_a_tool, template=TEMPLATE, **flags) as fakes:
        tool = {"type": "function", "function": {"name": "near"}}
        deltas = [one async for one in fakes.client.chat([{"role": "user", "content": "hi"}], tools=[tool])]
        (bundle,) = await recorded(tmp_path)
    assert deltas[-1].finish_reason is FinishReason.TOOL_CALLS
    assert bundle.answers[0].finish_reason == "tool_calls"


async def test_a_resumed_stream_is_recorded_whole(tmp_path: pathlib.Path) -> None:
    """Except for the log probabilities that the other gateway returned."""
    async with recording(tmp_path, record_share=1.0, record_content="full") as fakes:
        sampling = SamplingParams(seed=7, logprobs=0)
        async with rpc.open_channel(fakes.gateway.grpc_address) as channel:
            stub, request = GatewayStub(channel), prompt_request(PROMPT, sampling=sampling)
            messages = [one async for one in stub.Generate(to_pb(request))]
            begun = AnswerSoFar(script_of(SCRIPT)[:5])
            rest = replace(request, resume=Resume(origin_from_pb(messages[0].origin), (begun,)))
            async for _ in stub.Generate(to_pb(rest)):
                pass
        whole, moved = await recorded(tmp_path, 2)
    assert (moved.request.resumed_tokens, moved.answers[0].token_ids) == (5, whole.answers[0].token_ids)
    assert moved.answers[0].logprobs == (None,) * 5 + whole.answers[0].logprobs[5:]


@pytest.mark.parametrize("content", ["hash", "none"])
async def test_omitted_contents_are_not_in_the_file(content: str, tmp_path: pathlib.Path) -> None:
    async with recording(tmp_path, record_share=1.0, record_content=content) as fakes:
        for prompt in (PROMPT, PROMPT, "Another prompt of a client."):
            await ask(fakes, prompt, stop=["secret"], bad_words=["hidden"], logit_bias={77: -1.0})
        bundles = await recorded(tmp_path, 3)
    for path in files(tmp_path):
        raw = path.read_text()
        assert not [word for word in ("capital", "secret", "hidden", "Paris", '"77"', '"token_ids":[') if word in raw]
    hmacs = [(bundle.request.hmacs.get("token_ids"), bundle.answers[0].hmac) for bundle in bundles]
    if content == "none":
        assert hmacs == [(None, "")] * 3
        return
    assert hmacs[0] == hmacs[1]
    assert hmacs[0][0] != hmacs[2][0]
    assert hmacs[0][0] == hidden(read_key(tmp_path / KEY_FILE), "token_ids", script_of(PROMPT)[:-1])


async def test_a_client_requests_a_record_by_a_header(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorders, "TENANT_RECORDS_PER_MINUTE", 1)
    monkeypatch.setattr(recorders, "MINUTE_S", 10**9)
    async with recording(tmp_path, record_slow_ms=0) as fakes:
        asked = {"model": "toy", "prompt": PROMPT, "max_tokens": 3}
        address = fakes.gateway.http_address
        label = {"x-request-id": "../../mine"}
        plain = await call(address, "/v1/completions", asked)
        assert plain.status == 200
        kept = await call(address, "/v1/completions", asked, {RECORD_HEADER: "1", **label})
        (bundle,) = await recorded(tmp_path)
        # The file is named after the server's id, not the client's label.
        assert (bundle.reason, bundle.request.label) == ("asked", kept.headers["x-request-id"])
        assert files(tmp_path) == [tmp_path / f"{read_named('../../mine', str(tmp_path), '')[0].id}.json"]
        await call(address, "/v1/completions", asked, {RECORD_HEADER: "1"})
        fakes.decode.refusals = [(13, False)]
        await call(address, "/v1/completions", asked)
        await until("a count", lambda: counts(fakes) == {"asked": 1, "over": 1})
        assert len(files(tmp_path)) == 1


@pytest.mark.parametrize("retryable", [True, False])
async def test_a_request_that_fails_is_recorded(retryable: bool, tmp_path: pathlib.Path) -> None:
    async with recording(tmp_path, max_attempts=1) as fakes:
        # Code 13 is Internal; code 3 is a client error, not a failure.
        fakes.decode.refusals = [(3, False), (13, retryable)]
        for _ in range(2):
            with pytest.raises(PillionError):
                await ask(fakes)
        (bundle,) = await recorded(tmp_path)
        await fakes.settled()
        await until("a count", lambda: counts(fakes) == {"failed": 1})
    assert (bundle.reason, bundle.answers[0].tokens) == ("failed", 0)
    assert bundle.error == bundle.story[-1].words
    assert "refused by the script" in bundle.error
    assert any(event.what == "decode_lost" and event.worker == "decode-0" for event in bundle.story)


async def test_slow_and_abandoned_requests_are_recorded(tmp_path: pathlib.Path) -> None:
    async with recording(tmp_path, record_slow_ms=1) as fakes:
        fakes.decode.pace_s = 0.01
        await ask(fakes)
        (bundle,) = await recorded(tmp_path)
        assert (bundle.reason, bundle.slow_ms) == ("slow", 1)
        fakes.decode.gate.clear()
        stream = fakes.client.generate(PROMPT)
        waiting = asyncio.ensure_future(anext(stream))
        await until("a submit", lambda: len(fakes.decode.submits) == 2)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        given_up = (await recorded(tmp_path, 2))[1]
        assert (given_up.reason, given_up.answers[0].tokens) == ("slow", 0)
        assert given_up.story[-1].words.startswith("Cancelled")
        fakes.decode.go_on()


def test_batches_are_not_recorded_as_slow(tmp_path: pathlib.Path) -> None:
    recorder = recorders.Recorder(
        GatewayFlags(model="toy", record_path=str(tmp_path)), GatewayLimits(record_slow_ms=1000)
    )
    permit: Any = SimpleNamespace(tenant=OPEN, answers=1)
    for background in (True, False):
        admitted = replace(admitted_request(), background=background)
        recorder.begin(admitted, permit, asked=False).ended(admitted.arrived + 2.0)
    recorder.close()
    assert recorder.counts == {"slow": 1}


async def test_a_stuck_folder_delays_no_request(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorders, "MAX_WAITING_STORIES", 1)
    held, store = threading.Event(), RecordFolder.store
    begun = threading.Event()

    def held_up(folder: RecordFolder, bundle_id: str, raw: bytes) -> None:
        begun.set()
        held.wait()
        store(folder, bundle_id, raw)

    monkeypatch.setattr(RecordFolder, "store", held_up)
    async with recording(tmp_path, record_share=1.0) as fakes:
        await ask(fakes)
        await until("a write", begun.is_set)
        for _ in range(3):
            assert ids_of(await ask(fakes), 0) == script_of(SCRIPT)
        assert counts(fakes) == {"lost": 2}
        held.set()
        await recorded(tmp_path, 2)
        monkeypatch.setattr(RecordFolder, "store", lambda *_: os.stat(tmp_path / "nowhere"))
        assert ids_of(await ask(fakes), 0) == script_of(SCRIPT)
        await until("a count", lambda: counts(fakes) == {"lost": 2, "share": 2, "unwritten": 1})
        (warned,) = [one for one in caplog.records if "are not recorded" in one.message]
        assert warned.message.endswith(": No such file or directory")
        assert warned.exc_info is None


def test_the_oldest_bundles_make_room(tmp_path: pathlib.Path) -> None:
    raw = encode(bundle_of(), b"k" * 32)
    folder = RecordFolder(tmp_path, 3 * len(raw) + 10, 1000.0)
    ids = [f"{number:024x}" for number in range(6)]

    def there() -> list[int]:
        return [number for number, name in enumerate(ids) if (tmp_path / f"{name}.json").exists()]

    for number, name in enumerate(ids[:4]):
        folder.store(name, raw)
        os.utime(tmp_path / f"{name}.json", (at := (tmp_path / f"{name}.json").stat().st_mtime - 900 + number, at))
    assert there() == [1, 2, 3]
    aged = {"new.part": 10, "old.part": PART_AGE_S + 10, f"{ids[1]}.json": 2000, f"{ids[2]}.json": 2000}
    for name, age_s in aged.items():
        path = tmp_path / name
        path.touch()
        os.utime(path, (at := path.stat().st_mtime - age_s, at))
    folder.store(ids[4], raw)
    assert (there(), sorted(path.name for path in tmp_path.glob("*.part"))) == ([3, 4], ["new.part"])
    with pytest.raises(ConfigError, match="more than"):
        RecordFolder(tmp_path, 10, 1000.0).store(ids[5], raw)


def test_the_record_folder_and_its_key_are_created_before_the_start(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "new" / "records"
    check_files(GatewayFlags(model="", record_path=str(folder)))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert recorders.own_key(GatewayFlags(model="", record_path=str(folder))) == read_key(folder / KEY_FILE)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    for path, key_file, complaint in (
        (str(tmp_path / "file"), "", "--record-path"),
        (str(tmp_path), str(tmp_path / "nowhere"), "--record-key-file"),
        ("redis", "", "needs --record-key-file"),
    ):
        flags = {"record_path": path, "record_key_file": key_file, "redis_url": "redis://127.0.0.1:1"}
        with pytest.raises(ConfigError, match=complaint):
            recorders.Recorder(GatewayFlags(model="toy", **flags))
