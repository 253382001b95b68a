"""Adapter names at a real gateway with scripted peers, over HTTP, gRPC and a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import threading
import time
from dataclasses import replace as replace_fields

import grpc
import psutil
import pytest
from msgspec.structs import replace

from lab.testbed.conditions import WITHIN_S, until
from pillion.cli.checks import check_flags
from pillion.client.client_requests import prompt_request, to_pb
from pillion.config import GatewayFlags
from pillion.engine.adapters.adapter_files import AdapterFiles
from pillion.errors import ConfigError, Conflict, InvalidRequest, NotFound, PermissionDenied
from pillion.gateway.adapters import adapter_names
from pillion.gateway.adapters.adapter_names import AdapterNames, parse_lora_modules
from pillion.gateway.adapters.name_table import NamedAdapter
from pillion.gateway.admission.api_keys import hash_of
from pillion.gateway.assemble import start_gateway
from pillion.gateway.batches import batch_runner
from pillion.kvstore.hashing import request_root
from pillion.kvstore.index.shared_names import SharedNames
from pillion.net import rpc
from pillion.types import AnswerSoFar, Resume, SamplingParams, StreamOrigin
from pillion.v1 import gateway_pb2_grpc
from tests.gateway.batches.test_batches import begun, client_of, ended, lines, said
from tests.support.adapters import make_adapter
from tests.support.fake_components import FINGERPRINT, record, running_fake_cluster, toy_model
from tests.support.families import FAMILIES, make_model
from tests.support.http import call

pytestmark = pytest.mark.usefixtures("own_cache")

TEXT = {"prompt": "hi"}
KEYS = {name: f"plk-{name}-" + name[0] * 40 for name in ("boss", "narrow", "alias", "free")}
TENANTS = (
    '[tenant.boss]\noperator = true\n[tenant.narrow]\nmodels = ["sql"]\n[tenant.alias]\nmodels = ["models/toy"]\n'
    "[tenant.free]\n"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Write a model's folder and three adapters."""
    root = tmp_path_factory.mktemp("made")
    folder = make_model(root / "model", FAMILIES["llama-gqa-tied"])[0]
    return folder, [
        make_adapter(folder, root / str(n), seed=n, r=4, target_modules=["q_proj", "down_proj"]) for n in range(3)
    ]


@pytest.fixture
def folder(made, tmp_path):
    """Return the only folder from which adapters may be loaded."""
    for number, source in enumerate(made[1]):
        shutil.copytree(source, tmp_path / "adapters" / f"v{number}")
    return tmp_path / "adapters"


@pytest.fixture
def flags(made, folder):
    return {
        "enable_lora": True,
        "allow_runtime_lora_updating": True,
        "lora_path": (str(folder),),
        "heartbeat_ms": 50,
    }


def running(made, **flags):
    """Run a fake cluster whose workers support adapters, with a real config.json."""
    return running_fake_cluster(config=made[0] / "config.json", **flags)


def digest_of(made, number):
    return AdapterFiles(made[1][number]).digest()


async def load(fakes, name, path, key="", **more):
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"lora_name": name, "lora_path": str(path), **more}
    return await call(fakes.gateway.http_address, "/v1/load_lora_adapter", body, headers)


async def test_a_request_is_computed_with_the_adapter_that_it_names(made, flags, folder):
    modules = (f"sql={made[1][0]}", json.dumps({"name": "chat", "path": str(made[1][1])}))
    async with running(made, lora_modules=modules, **flags) as fakes:
        address, digest = fakes.gateway.http_address, digest_of(made, 0)
        listed = {one["id"]: one for one in (await call(address, "/v1/models")).json["data"]}
        assert [*listed] == ["toy", "models/toy", "chat", "sql"]
        assert (listed["sql"]["parent"], listed["sql"]["root"], listed["sql"]["digest"]) == ("toy", "toy", digest)
        assert listed["toy"]["parent"] is None
        assert (await call(address, "/v1/models/sql")).json == listed["sql"]
        said = (await call(address, "/v1/completions", TEXT | {"model": "sql"})).json
        assert (said["model"], said["choices"][0]["text"]) == ("sql", "The answer.")
        assert said["system_fingerprint"] == f"fp_{FINGERPRINT[:10]}_{digest[:10]}"
        with_adapter = fakes.decode.submits[-1]
        plain = (await call(address, "/v1/completions", TEXT | {"model": "toy"})).json
        assert plain["system_fingerprint"] == f"fp_{FINGERPRINT[:10]}"
        without = fakes.decode.submits[-1]
        assert (with_adapter.adapter, without.adapter) == (digest, "")
        namespace = bytes.fromhex(record("x", "decode", "").namespace)
        assert with_adapter.root_hash == request_root(namespace, digest) != without.root_hash
        chat = {"messages": [{"role": "user", "content": "hi"}], "model": "chat", "max_tokens": 4}
        for path, body in (
            ("/v1/chat/completions", chat),
            ("/v1/messages", chat),
            ("/v1/responses", {"model": "chat", "input": "hi"}),
        ):
            said = (await call(address, path, body)).json
            assert said["model"] == "chat"
            assert said["system_fingerprint"] == f"fp_{FINGERPRINT[:10]}_{digest_of(made, 1)[:10]}"
            assert fakes.decode.submits[-1].adapter == digest_of(made, 1)
            streamed = (await call(address, path, body | {"stream": True})).body.partition(b"\n\n")[0]
            assert said["system_fingerprint"].encode() in streamed
        for name, fingerprint in (("sql", f"_{digest[:10]}"), ("toy", "")):
            async with contextlib.aclosing(fakes.client.generate("hi", model=name)) as stream:
                deltas = [delta async for delta in stream]
            assert "".join(delta.text for delta in deltas) == "The answer."
            assert deltas[-1].timings.system_fingerprint == f"fp_{FINGERPRINT[:10]}{fingerprint}"
        assert [submit.adapter for submit in fakes.decode.submits[-2:]] == [digest, ""]
        infos = {info.name: info for info in await fakes.client.models()}
        assert (infos["sql"].parent, infos["sql"].adapter, infos["toy"].parent) == ("toy", digest, "")
        await fakes.settled()


async def test_adapters_are_loaded_swapped_and_unloaded(made, flags, folder):
    async with running(made, **flags) as fakes:
        address, body = fakes.gateway.http_address, TEXT | {"model": "sql"}
        missing = await call(address, "/v1/completions", body)
        assert (missing.status, missing.error["code"]) == (404, "model_not_found")
        loaded = await load(fakes, "sql", folder / "v0")
        assert (loaded.status, loaded.body) == (200, b"Success: LoRA adapter 'sql' added successfully.")
        first = (await call(address, "/v1/completions", body)).json["system_fingerprint"]
        again = await load(fakes, "sql", folder / "v1")
        assert again.status == 400
        assert "has already been loaded" in again.error["message"]
        # Loading the same content again is allowed: a client may have missed the first success.
        assert (await load(fakes, "sql", folder / "v0", base_model_name="models/toy")).status == 200
        shutil.copytree(folder / "v1", folder / "v0", dirs_exist_ok=True)
        assert (await call(address, "/v1/completions", body)).json["system_fingerprint"] == first
        assert (await load(fakes, "sql", "v0", load_inplace=True)).status == 200
        both = (await call(address, "/v1/completions", {"prompt": ["hi", "ho"], "model": "sql"})).json
        assert both["system_fingerprint"].endswith(digest_of(made, 1)[:10])
        assert {submit.adapter for submit in fakes.decode.submits[-2:]} == {digest_of(made, 1)}
        gone = await call(address, "/v1/unload_lora_adapter", {"lora_name": "sql", "lora_int_id": 5, "foreign": 1})
        assert gone.headers["x-pillion-ignored"] == "foreign, lora_int_id"
        assert (gone.status, gone.body) == (200, b"Success: LoRA adapter 'sql' removed successfully.")
        assert (await call(address, "/v1/completions", body)).status == 404
        assert (await call(address, "/v1/unload_lora_adapter", {"lora_name": "sql"})).status == 404
        info = await fakes.client.load_adapter("sql", "v2")
        assert (info.name, info.parent, info.adapter) == ("sql", "toy", digest_of(made, 2))
        with pytest.raises(InvalidRequest, match="has already been loaded"):
            await fakes.client.load_adapter("sql", "v1")
        await fakes.client.load_adapter("sql", "v1", in_place=True)
        await fakes.client.unload_adapter("sql")
        with pytest.raises(NotFound):
            await fakes.client.unload_adapter("sql")
        await fakes.settled()


async def test_batches_name_adapters(made, flags, folder, tmp_path, monkeypatch):
    """Resolve an adapter name when its line's turn comes."""
    monkeypatch.setattr(batch_runner, "POLL_MS", 20)
    async with running(made, lora_modules=(f"sql={made[1][0]}",), batch_path=str(tmp_path / "b"), **flags) as fakes:
        async with client_of(fakes.gateway.http_address) as client:
            chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
            batch = await begun(client, lines(*(chat | {"model": name} for name in ("sql", "toy", "gone"))))
            batch = await ended(client, batch)
            answers, errors = await said(client, batch.output_file_id), await said(client, batch.error_file_id)
        bodies = [answers[name]["response"]["body"] for name in ("c0", "c1")]
        assert [body["model"] for body in bodies] == ["sql", "toy"]
        digest = digest_of(made, 0)
        assert [body["system_fingerprint"].endswith(digest[:10]) for body in bodies] == [True, False]
        assert errors["c2"]["response"]["status_code"] == 404
        assert sorted(submit.adapter for submit in fakes.decode.submits) == ["", digest]
        await fakes.settled()


async def test_a_resumed_stream_keeps_its_adapter_version_or_fails(made, flags):
    async with running(made, **flags) as fakes, rpc.open_channel(fakes.gateway.grpc_address) as channel:
        stub = gateway_pb2_grpc.GatewayStub(channel)
        request = prompt_request("hi", model="sql", sampling=SamplingParams(temperature=0.0))
        info = await fakes.client.load_adapter("sql", "v0")
        whole = [message async for message in stub.Generate(to_pb(request))]
        tokens = [token for message in whole for token in message.token_ids]
        first = whole[0].origin
        origin = StreamOrigin(first.seed, first.digest, first.cached_tokens)

        async def go_on():
            """Return the rest of the stream after its first three tokens."""
            sent = replace_fields(request, resume=Resume(origin, (AnswerSoFar(tuple(tokens[:3])),)))
            try:
                return [token async for message in stub.Generate(to_pb(sent)) for token in message.token_ids]
            except grpc.aio.AioRpcError as error:
                raise rpc.from_rpc_error(error) from None

        assert await go_on() == tokens[3:]
        await fakes.client.load_adapter("sql", "v1", in_place=True)
        submits = len(fakes.decode.submits)
        with pytest.raises(Conflict, match="weights of 'sql' here differ"):
            await go_on()
        await fakes.client.unload_adapter("sql")
        with pytest.raises(NotFound, match="sql"):
            await go_on()
        assert len(fakes.decode.submits) == submits, "a stream went on with another adapter"
        await fakes.client.load_adapter("sql", "v0")
        assert await go_on() == tokens[3:]
        assert fakes.decode.submits[-1].adapter == info.adapter
        await fakes.settled()


async def test_workers_that_cannot_load_the_adapter_are_excluded(made, flags, monkeypatch):
    """Exclude a worker that failed to load, and one whose rank is too small."""
    monkeypatch.setattr("pillion.gateway.links.cluster.MIN_RETURN_WAIT_S", 0.0)
    monkeypatch.setattr("pillion.gateway.planning.route_planner.SENT_COUNTS_S", WITHIN_S)
    async with running(made, lora_modules=(f"sql={made[1][0]}",), **flags) as fakes:
        address, cluster = fakes.gateway.http_address, fakes.gateway.gateway.cluster

        def sent():
            return set(cluster.routes.sent_adapters.workers(digest_of(made, 0), time.monotonic()))

        fakes.decode.refusals = [(grpc.StatusCode.INTERNAL.value[0], False)]
        assert (await call(address, "/v1/completions", TEXT | {"model": "sql"})).status == 500
        assert "decode-0" not in sent()
        assert (await call(address, "/v1/completions", TEXT | {"model": "sql"})).status == 200
        assert "decode-0" in sent()
        old = next(one for one in cluster.view.of("decode", "toy"))
        await fakes.registry.heartbeat(replace(old, max_lora_rank=2))
        await until("the rank to be known", lambda: cluster.view.of("decode", "toy")[0].max_lora_rank == 2)
        refused = await call(address, "/v1/completions", TEXT | {"model": "sql"})
        assert (refused.status, "adapters of rank 4 " in refused.error["message"]) == (503, True), refused.error
        assert (await call(address, "/v1/completions", TEXT | {"model": "toy"})).status == 200


async def test_a_disallowed_adapter_is_refused_with_its_field(made, flags, folder, tmp_path):
    outside = tmp_path / "outside"
    shutil.copytree(folder / "v0", outside)
    (folder / "link").symlink_to(outside)
    (folder / "wide").mkdir()
    shutil.copytree(folder / "v0", folder / "astray")
    (folder / "astray" / "adapter_model.safetensors").unlink()
    (folder / "astray" / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    shutil.copytree(folder / "v0", folder / "qalora")
    config = folder / "qalora" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_qalora": True}))
    async with running(made, lora_modules=(f"fixed={made[1][0]}",), **flags | {"max_lora_rank": 4}) as fakes:
        for name, path, status, words in (
            ("x", outside, 403, "is in none of the folders of --lora-path"),
            ("x", folder / "link", 403, "is in none of the folders of --lora-path"),
            ("x", folder / ".." / "outside", 403, "is in none of the folders of --lora-path"),
            ("x", "/etc/no-such-folder", 403, "is in none of the folders of --lora-path"),
            ("x", "astray", 403, "is a link to somewhere else"),
            ("x", "nowhere", 404, "lora_path: there is no folder 'nowhere'"),
            ("x", "a\0b", 400, "lora_path"),
            ("x", "wide", 400, "it has no adapter_config.json"),
            ("x", "qalora", 400, "use_qalora = True is not supported"),
            ("", "v0", 400, "lora_name"),
            ("a b", "v0", 400, "lora_name"),
            ("toy", "v0", 409, "'toy' is the name of a model"),
            ("models/toy", "v0", 409, "is the name of a model"),
            ("fixed", "v0", 409, "is one of --lora-modules"),
        ):
            reply = await load(fakes, name, path)
            assert (reply.status, words in reply.error["message"]) == (status, True), reply.error["message"]
        other = await load(fakes, "x", "v0", base_model_name="another")
        assert (other.status, "'another' is not served here" in other.error["message"]) == (400, True)
        unknown = await call(fakes.gateway.http_address, "/v1/completions", {"model": "another", "prompt": "x"})
        assert unknown.status == 404
        assert "known: toy; adapters: fixed" in unknown.error["message"]
        with pytest.raises(Conflict, match="is one of --lora-modules"):
            await fakes.client.unload_adapter("fixed")
        address = fakes.gateway.http_address
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            for body in ({}, [], {"lora_name": 3}, {"lora_name": "x", "lora_int_i": 1, "load_inplce": 1}):
                assert (await call(address, path, body)).status == 400
        assert [info.name for info in await fakes.client.models()] == ["toy", "models/toy", "fixed"]


async def test_api_keys_control_loading_and_use_of_adapters(made, flags, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("pillion.gateway.gateway_server.WATCH_INTERVAL_S", 0.02)
    keys = tmp_path / "keys.toml"
    entries = "".join(f'[[key]]\ntenant = "{name}"\nhash = "{hash_of(key)}"\n' for name, key in KEYS.items())
    keys.write_text(TENANTS + entries)
    async with running(made, api_keys=str(keys), **flags) as fakes:
        address = fakes.gateway.http_address
        assert (await load(fakes, "sql", "v0")).status == 401
        refused = await load(fakes, "sql", "v0", KEYS["free"])
        assert (refused.status, "operator = true" in refused.error["message"]) == (403, True)
        assert (await load(fakes, "sql", "v0", KEYS["boss"])).status == 200
        assert (await load(fakes, "poetry", "v1", KEYS["boss"])).status == 200
        seen, told = {}, {}
        for name, key in KEYS.items():
            headers = {"Authorization": f"Bearer {key}"}
            listed = (await call(address, "/v1/models", headers=headers)).json["data"]
            seen[name] = [one["id"] for one in listed]
            for model in ("toy", "sql", "poetry", ""):
                reply = await call(address, "/v1/completions", TEXT | {"model": model}, headers)
                assert reply.status == (200 if model in ("", *seen[name]) else 404)
                tokenized = await call(address, "/tokenize", TEXT | {"model": model}, headers)
                assert tokenized.status == reply.status
            unknown = await call(address, "/v1/completions", TEXT | {"model": "gpt"}, headers)
            told[name] = unknown.error["message"].partition("known: ")[2]
        assert seen == {
            "boss": ["toy", "models/toy", "poetry", "sql"],
            "narrow": ["sql"],
            "alias": ["toy", "models/toy"],
            "free": ["toy", "models/toy", "poetry", "sql"],
        }
        # The error for an unknown name lists only the names that the tenant may use.
        everything = "toy; adapters: poetry, sql"
        assert told == {"boss": everything, "narrow": "sql", "alias": "toy", "free": everything}
        with_key = {"Authorization": f"Bearer {KEYS['narrow']}"}
        assert (await call(address, "/v1/models/poetry", headers=with_key)).status == 404
        assert (await call(address, "/v1/completions", TEXT | {"model": "sql"}, with_key)).status == 200


async def test_gateways_share_adapter_names(made, flags, folder):
    async with running(made, **flags) as fakes:
        more = {"redis_url": fakes.redis.url, "block_size": 4, "chunk_size": 8, "http_port": 0, "grpc_port": 0} | flags
        model = toy_model(fakes.folder / "model2")
        shutil.copy(made[0] / "config.json", model.folder)
        other = await start_gateway(GatewayFlags(**more), prepared=model)
        try:
            await fakes.client.load_adapter("sql", "v0")
            await until("the other gateway to be ready", lambda: not other.gateway.not_ready())

            async def answer():
                reply = await call(other.http_address, "/v1/completions", TEXT | {"model": "sql"})
                return reply.json if reply.status == 200 else None

            said = await until("the other gateway to know the name", answer)
            assert said["system_fingerprint"].endswith(digest_of(made, 0)[:10])
            names = other.gateway.adapters

            def means(number):
                return lambda: names.find("sql") is not None and names.find("sql").digest == digest_of(made, number)

            await fakes.client.load_adapter("sql", "v1", in_place=True)
            await until("the swap to be known", means(1))
            fakes.redis.command("FLUSHALL")
            third = await start_gateway(GatewayFlags(**more), prepared=model)
            try:
                names = third.gateway.adapters
                await until("a new gateway to learn the name after Redis was emptied", means(1))
            finally:
                await third.stop()
            names = other.gateway.adapters
            await fakes.client.unload_adapter("sql")
            await until("the name to be gone", lambda: names.find("sql") is None)
            fakes.gateway.gateway.adapters.table.check_integrity()
            names.table.check_integrity()
        finally:
            await other.stop()


async def test_concurrent_requests_find_an_adapter_of_another_gateway(made, flags, folder):
    async with running(made, **flags | {"heartbeat_ms": 60_000, "heartbeat_timeout_ms": 600_000}) as fakes:
        here = fakes.gateway.gateway.adapters
        updating = GatewayFlags(model="toy", max_lora_rank=8, allow_runtime_lora_updating=True)
        other = AdapterNames({"toy": None}, {}, updating, list, SharedNames(fakes.redis.url, 10, 10**9))
        await other.share()
        adapter = NamedAdapter(name="far", parent="toy", digest="ab" * 32, rank=4, path="/far")
        await here.look("nobody")
        other.table.put(adapter, 10)
        await other.share()
        await asyncio.gather(*(here.look("far") for _ in range(5)))
        assert here.find("far") == adapter
        replies = await asyncio.gather(
            *(call(fakes.gateway.http_address, "/v1/completions", TEXT | {"model": "far"}) for _ in range(3))
        )
        assert [reply.status for reply in replies] == [200] * 3
        await other.aclose()


async def test_an_adapter_load_continues_after_its_caller_is_cancelled(made, flags, folder, monkeypatch):
    async with running(made, **flags) as fakes:
        names, began, go_on = fakes.gateway.gateway.adapters, asyncio.Event(), threading.Event()
        real, loop = names._load, asyncio.get_running_loop()

        def slow(*arguments):
            loop.call_soon_threadsafe(began.set)
            go_on.wait(WITHIN_S)
            return real(*arguments)

        monkeypatch.setattr(names, "_load", slow)
        caller = asyncio.create_task(names.load("sql", "v0"))
        await began.wait()
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        go_on.set()
        await until("the adapter to have its name", lambda: names.find("sql"))


async def test_a_hung_adapter_reader_blocks_no_request_and_exits_with_the_gateway(made, flags, folder):
    """Even if the process that reads an adapter hangs."""
    async with running(made, **flags) as fakes:
        assert (await load(fakes, "sql", "v0")).status == 200
        process = psutil.Process(fakes.gateway.gateway.adapters._process._process.pid)
        assert "pillion.engine.adapters.adapter_process_main" in process.cmdline()
        process.suspend()
        loading = asyncio.create_task(load(fakes, "chat", "v1"))
        await until("the load to be under way", lambda: fakes.gateway.gateway.adapters._process._job_lock.locked())
        reply = await call(fakes.gateway.http_address, "/v1/completions", TEXT | {"model": "sql"})
        assert (reply.status, loading.done()) == (200, False)
        process.resume()
        assert (await loading).status == 200
    await until("the end of the process", lambda: not process.is_running())


async def test_an_adapter_that_takes_too_long_is_refused(made, flags, folder, monkeypatch):
    monkeypatch.setattr(adapter_names, "LOAD_TIMEOUT_S", 0.0)
    async with running(made, **flags) as fakes:
        late = await load(fakes, "sql", "v0")
        assert (late.status, "more than 0 s" in late.error["message"]) == (503, True)
        monkeypatch.setattr(adapter_names, "LOAD_TIMEOUT_S", 60.0)
        assert (await load(fakes, "sql", "v0")).status == 200


async def test_a_full_store_is_a_quota_error(made, flags, folder, monkeypatch):
    monkeypatch.setattr(adapter_names, "STORE_BYTES", 10)
    async with running(made, **flags) as fakes:
        refused = await load(fakes, "sql", "v0")
        assert (refused.status, "at most 10 are allowed" in refused.error["message"]) == (429, True)


async def test_concurrent_adapter_loads_are_bounded(made, flags, monkeypatch):
    monkeypatch.setattr(adapter_names, "MAX_CHANGES_AT_ONCE", 1)
    async with running(made, **flags) as fakes:
        async with fakes.gateway.gateway.adapters._turn():
            refused = await load(fakes, "sql", "v0")
            said = "1 adapters are being loaded. Please try again in 1s."
            assert (refused.status, refused.error["message"]) == (429, said)
            assert (await call(fakes.gateway.http_address, "/v1/unload_lora_adapter", {"lora_name": "x"})).status == 429
        assert (await load(fakes, "sql", "v0")).status == 200


async def test_runtime_adapter_changes_are_denied_without_the_flag(made):
    async with running(made, enable_lora=True, lora_modules=(f"sql={made[1][0]}",)) as fakes:
        with pytest.raises(PermissionDenied, match="--allow-runtime-lora-updating"):
            await fakes.client.load_adapter("x", "v0")
        reply = await call(fakes.gateway.http_address, "/v1/unload_lora_adapter", {"lora_name": "sql"})
        assert (reply.status, reply.error["code"]) == (403, "permission_denied")
    async with running_fake_cluster() as fakes:
        with pytest.raises(PermissionDenied, match="--enable-lora"):
            await fakes.client.load_adapter("x", "v0")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"lora_modules": ("a=b",)}, "--lora-modules needs --enable-lora"),
        ({"lora_path": ("a",)}, "--lora-path needs --enable-lora"),
        ({"enable_lora": True, "lora_path": ("a",)}, "need each other"),
        ({"enable_lora": True, "allow_runtime_lora_updating": True}, "need each other"),
        (
            {"enable_lora": True, "allow_runtime_lora_updating": True, "lora_path": ("a",), "host": "0.0.0.0"},
            "needs --api-keys",
        ),
        (
            {"enable_lora": True, "lora_modules": ("a=nowhere",)},
            "--lora-modules a: lora_path: nowhere is not an adapter",
        ),
        ({"enable_lora": True, "lora_modules": ("toy=nowhere",)}, "'toy' is the name of a model"),
        ({"enable_lora": True, "lora_modules": ("a=b", "a=c")}, "two adapters are called 'a'"),
        ({"enable_lora": True, "lora_modules": ("nothing",)}, "write NAME=PATH"),
    ],
)
async def test_invalid_flag_combinations_are_rejected(flags, words, made, tmp_path):
    model = toy_model(tmp_path / "model")
    shutil.copy(made[0] / "config.json", model.folder)
    given = {"redis_url": "redis://127.0.0.1:1", "block_size": 4, "chunk_size": 8, "http_port": 0, "grpc_port": 0}

    async def begin() -> None:
        check_flags(GatewayFlags(**given | flags))
        await start_gateway(GatewayFlags(**given | flags), prepared=model)

    with pytest.raises(ConfigError) as error:
        await begin()
    assert words in error.value.message


def test_lora_modules():
    (plain, listed) = parse_lora_modules(["a=/b=c", '{"name": "d", "path": "e", "base_model_name": "f"}'])
    assert (plain.name, plain.path, plain.model) == ("a", "/b=c", "")
    assert (listed.name, listed.path, listed.model) == ("d", "e", "f")
    for wrong in ("", "a=", "=b", "a b=c", "{", "{}", '{"name": 3, "path": "e"}', "[]"):
        with pytest.raises(ConfigError):
            parse_lora_modules([wrong])
