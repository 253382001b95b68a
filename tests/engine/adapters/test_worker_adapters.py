"""Adapters on real workers with a real KV node: local and remote files, loading and failures."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import signal
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file

from lab.testbed.conditions import WITHIN_S, until
from pillion.config import KVNodeFlags
from pillion.engine.adapters import adapter_loader
from pillion.engine.adapters.adapter_files import AdapterFiles
from pillion.errors import Internal, InvalidRequest, NotFound, PillionError, Unavailable
from pillion.host.adapter_folders import ADAPTERS, MIN_FREE_BYTES
from pillion.host.cores import BACKGROUND_NICENESS
from pillion.kvstore import assemble as kvstore_assemble
from pillion.kvstore.adapters.adapter_pieces import open_files, pieces_of
from pillion.kvstore.adapters.node_adapters import Addresses, NodeAdapters
from pillion.kvstore.assemble import start_kvnode
from pillion.kvstore.client.node_client import call_unary
from pillion.v1 import kvnode_pb2_grpc
from pillion.v1.kvnode_pb2 import AdapterPiece, OpenTicketReply
from tests.support.fake_backend import greedy
from tests.support.workers import Answer, Connection, Workers, connected, running_workers, submit_of

PROMPT = list(range(21))
LORA = {"enable_lora": True, "max_loras": 2}


@pytest.fixture
def node_adapters(monkeypatch: pytest.MonkeyPatch) -> dict[str, NodeAdapters]:
    """The adapters of each node that starts, by its name."""
    found: dict[str, NodeAdapters] = {}

    def started(flags: KVNodeFlags, addresses: Addresses) -> NodeAdapters:
        return found.setdefault(flags.node_id, NodeAdapters(flags, addresses))

    monkeypatch.setattr(kvstore_assemble, "NodeAdapters", started)
    return found


@pytest.fixture
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv("PILLION_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def store(root: pathlib.Path, number: int) -> str:
    """Store adapter ``number`` in a model cache; return its digest."""
    draft = root / "draft"
    draft.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
    (draft / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    pair = {name.format("A"): torch.full((1, 4), float(number)), name.format("B"): torch.ones(4, 1)}
    save_file(pair, draft / "adapter_model.safetensors")
    digest = AdapterFiles(draft).digest()
    (root / ADAPTERS).mkdir(exist_ok=True)
    draft.rename(root / ADAPTERS / digest)
    return digest


class AdapterLine:
    """Connection to running workers; holds its requests' tickets until the end."""

    def __init__(self, workers: Workers, connection: Connection) -> None:
        self.workers = workers
        self.connection = connection
        self._tickets: list[OpenTicketReply] = []

    async def ask(self, key: int, adapter: str) -> Answer:
        ticket = await self.workers.ticket(PROMPT, hits=False)
        self._tickets.append(ticket)
        return await self.connection.submit(submit_of(key, ticket, PROMPT, 6, adapter=adapter))

    async def quiet(self) -> None:
        await self.workers.release(*self._tickets)
        await self.workers.quiet()


@contextlib.asynccontextmanager
async def line(flags: dict[str, Any] = LORA) -> AsyncIterator[AdapterLine]:
    async with running_workers(decode=flags, prefill=flags) as workers, connected(workers) as connection:
        yield AdapterLine(workers, connection)


async def check(answer: Answer, adapter: str) -> None:
    await answer.ended()
    assert answer.last is not None
    assert answer.last.error is None, answer.last.error
    assert answer.token_ids == greedy(PROMPT, 6, adapter)


async def failure(answer: Answer) -> tuple[type[Exception] | int, bool, str]:
    await answer.ended()
    assert answer.last is not None
    assert answer.last.error is not None
    return answer.last.error.code, answer.last.error.retryable, answer.last.error.message


async def test_streams_with_more_adapters_than_slots_and_plain_streams(cache: pathlib.Path) -> None:
    digests = ["", *(store(cache, number) for number in range(3))]
    async with line() as here:
        answers = [await here.ask(key, digests[key % 4]) for key in range(12)]
        for key, answer in enumerate(answers):
            await check(answer, digests[key % 4])
        record = here.workers.decode.worker.describe()
        assert record.start_s > 0, "gateways wait for a lost worker by how long its start took"
        assert record.max_loras == 2
        assert len(record.adapters) == 2
        assert set(record.adapters) < set(digests[1:])
        assert record.adapter_waits == 0
        await here.quiet()


async def test_a_prefill_range_and_its_tail_use_the_same_adapter(cache: pathlib.Path) -> None:
    digest = store(cache, 1)
    async with line() as here:
        ticket = await here.workers.ticket(PROMPT)
        prefill_range = here.workers.prefill_range(ticket, PROMPT, [8, 12], adapter=digest)
        messages = [one async for one in here.workers.prefill_stub.RunPrefill(prefill_range, timeout=WITHIN_S)]
        acks = [one.end_tokens for one in messages if not one.HasField("queued")]
        assert acks == [8, 20]
        assert here.workers.prefill.worker.describe().adapters == (digest,)
        answer = await here.connection.submit(submit_of(1, ticket, PROMPT, 6, adapter=digest))
        await check(answer, digest)
        await here.workers.release(ticket)
        await here.quiet()


async def test_adapter_files_are_fetched_from_the_node_once(
    cache: pathlib.Path, tmp_path: pathlib.Path, node_adapters: dict[str, NodeAdapters]
) -> None:
    digest = store(tmp_path / "elsewhere", 1)
    async with line() as here:
        node_adapters["kvnode-0"].root = tmp_path / "elsewhere"
        answers = [await here.ask(key, digest) for key in range(3)]
        for answer in answers:
            await check(answer, digest)
        assert here.workers.decode_backend.packed == [digest]
        assert [path.name for path in (cache / ADAPTERS).iterdir()] == [digest]
        await until("the end of the reads", lambda: node_adapters["kvnode-0"].reading == 0)
        await here.quiet()


async def test_a_missing_adapter_is_a_retryable_error_by_name(cache: pathlib.Path) -> None:
    digest = "ab" * 32
    async with line() as here:
        code, retryable, message = await failure(await here.ask(1, digest))
        assert (code, retryable) == (NotFound.code, True)
        assert digest[:12] in message
        ticket = await here.workers.ticket(PROMPT)
        with pytest.raises(Exception, match=digest[:12]):
            async for _ in here.workers.prefill_stub.RunPrefill(
                here.workers.prefill_range(ticket, PROMPT, [20], adapter=digest)
            ):
                pass
        await here.workers.release(ticket)
        await here.quiet()


async def test_an_exception_while_loading_an_adapter_fails_its_stream(
    cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("a defect")

    async with line() as here:
        worker = here.workers.decode.worker
        monkeypatch.setattr(worker.node, "read_adapter", fail)
        code, retryable, message = await failure(await here.ask(1, "ab" * 32))
        assert (code, retryable) == (Unavailable.code, True)
        assert "log" in message
        monkeypatch.setattr(worker, "_bring_adapter", fail)
        assert (await failure(await here.ask(2, "ab" * 32)))[0] == Internal.code
        await here.quiet()


async def test_files_with_another_digest_are_not_kept(
    cache: pathlib.Path, tmp_path: pathlib.Path, node_adapters: dict[str, NodeAdapters]
) -> None:
    """A copy damaged on this machine is dropped, so the next request gets a good one."""
    elsewhere = tmp_path / "elsewhere"
    digest, other = store(elsewhere, 1), store(elsewhere, 2)
    good, bad = elsewhere / ADAPTERS / digest, elsewhere / ADAPTERS / other
    good.rename(elsewhere / "good")
    shutil.copytree(bad, good)
    async with line() as here:
        node_adapters["kvnode-0"].root = elsewhere
        code, retryable, _ = await failure(await here.ask(1, digest))
        assert (code, retryable) == (Unavailable.code, True)
        assert list((cache / ADAPTERS).iterdir()) == []
        shutil.copytree(bad, cache / ADAPTERS / digest)
        code, retryable, message = await failure(await here.ask(2, digest))
        assert (code, retryable) == (Unavailable.code, True)
        assert "damaged" in message
        shutil.rmtree(good)
        (elsewhere / "good").rename(good)
        answer = await here.ask(3, digest)
        await check(answer, digest)
        await here.quiet()


async def test_loading_blocks_no_stream_and_may_be_cancelled(cache: pathlib.Path) -> None:
    digest = store(cache, 1)
    async with line() as here:
        here.workers.decode_backend.packing.clear()
        gone, kept = [await here.ask(key, digest) for key in (1, 2)]
        plain = await here.ask(3, "")
        await check(plain, "")
        await here.connection.cancel(1)
        assert not kept.token_ids
        here.workers.decode_backend.packing.set()
        await check(kept, digest)
        assert not gone.token_ids
        await here.quiet()


async def test_adapters_are_packed_by_one_process_that_yields_to_steps(cache: pathlib.Path) -> None:
    digests = [store(cache, number) for number in range(2)]
    async with line() as here:
        backend = here.workers.decode_backend
        for key, digest in enumerate(digests):
            await check(await here.ask(key, digest), digest)
        assert len(set(backend.packers)) == 1
        pid, niceness = backend.packers[0]
        assert pid != os.getpid()
        assert niceness == min(19, os.getpriority(os.PRIO_PROCESS, 0) + BACKGROUND_NICENESS)
        await here.quiet()
    assert not psutil.pid_exists(pid)


async def test_a_killed_packing_process_fails_its_adapter_and_is_restarted(cache: pathlib.Path) -> None:
    first, second, third = (store(cache, number) for number in range(3))
    async with line() as here:
        backend = here.workers.decode_backend
        await check(await here.ask(1, first), first)
        os.kill(backend.packers[0][0], signal.SIGSTOP)
        waiting, plain = await here.ask(2, second), await here.ask(3, "")
        await check(plain, "")
        os.kill(backend.packers[0][0], signal.SIGKILL)
        code, retryable, message = await failure(waiting)
        assert (code, retryable) == (Unavailable.code, True)
        assert "process" in message
        await check(await here.ask(4, third), third)
        assert backend.packers[0] != backend.packers[1]
        await here.quiet()


async def test_packing_timeouts_are_errors_by_name(cache: pathlib.Path) -> None:
    first, second = (store(cache, number) for number in range(2))
    async with line() as here:
        backend = here.workers.decode_backend
        await check(await here.ask(1, first), first)
        os.kill(backend.packers[0][0], signal.SIGSTOP)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(adapter_loader, "READ_TIMEOUT_S", 0.01)
            code, retryable, message = await failure(await here.ask(2, second))
        assert (code, retryable) == (Unavailable.code, True)
        assert second[:12] in message
        await check(await here.ask(3, second), second)
        await here.quiet()


async def test_a_worker_without_adapters_and_a_name_that_is_no_digest() -> None:
    async with line({}) as here:
        code, retryable, message = await failure(await here.ask(1, "ab" * 32))
        assert (code, retryable) == (Unavailable.code, True)
        assert "--enable-lora" in message
        code, retryable, message = await failure(await here.ask(2, "sql"))
        assert (code, retryable) == (InvalidRequest.code, False)
        assert "adapter" in message
        await here.quiet()


async def test_a_node_stores_adapters_that_its_machine_lacks(cache: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Files sent by gateways; invalid or incomplete ones leave nothing."""
    digest, other = store(tmp_path / "gateway", 1), store(tmp_path / "gateway", 2)
    folder = tmp_path / "gateway" / ADAPTERS
    async with line() as here:
        node = here.workers.node
        assert await node.missing_adapters([digest, other]) == (digest, other)
        await node.keep_adapter(pieces_of(open_files(folder / digest), digest), WITHIN_S)
        assert await node.missing_adapters([digest, other]) == (other,)
        await check(await here.ask(1, digest), digest)
        # A second copy changes nothing.
        await node.keep_adapter(pieces_of(open_files(folder / digest), digest), WITHIN_S)
        for wrong in ("sql", "../" + "a" * 61) * 20:
            # A call refused while it still sends has no clearer error.
            with pytest.raises(PillionError):
                await node.keep_adapter(pieces_of(open_files(folder / other), wrong), WITHIN_S)
            with pytest.raises(InvalidRequest):
                await node.missing_adapters([wrong])

        async def broken_off() -> AsyncIterator[AdapterPiece]:
            async for piece in pieces_of(open_files(folder / other), other):
                yield piece
                if piece.data:
                    return

        with pytest.raises(InvalidRequest, match="too early"):
            await call_unary(kvnode_pb2_grpc.KVNodeStub(node.channel).KeepAdapter, broken_off())
        assert [path.name for path in (cache / ADAPTERS).iterdir()] == [digest]
        await here.quiet()


async def test_a_full_disk_evicts_only_unused_adapters(cache: pathlib.Path, tmp_path: pathlib.Path) -> None:
    digest, other = store(tmp_path / "gateway", 1), store(tmp_path / "gateway", 2)
    used, unused = store(cache, 3), store(cache, 4)
    folder, copies = tmp_path / "gateway" / ADAPTERS, cache / ADAPTERS
    abandoned = copies / "0.tmp"
    abandoned.mkdir()
    for old in (copies / unused, abandoned):
        os.utime(old, (0, 0))
    disk, size = shutil.disk_usage(cache), sum(file.stat().st_size for file in (folder / digest).iterdir())

    def usage(path: object) -> Any:
        """A disk with room for three adapters."""
        return disk._replace(free=MIN_FREE_BYTES + size * (3 - len(set(copies.iterdir()) - set(copies.glob("*.tmp")))))

    async with line() as here:
        node = here.workers.node
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shutil, "disk_usage", usage)
            await node.keep_adapter(pieces_of(open_files(folder / other), other), WITHIN_S)
            assert {path.name for path in copies.iterdir()} == {used, unused, other}
            await node.keep_adapter(pieces_of(open_files(folder / digest), digest), WITHIN_S)
            assert {path.name for path in copies.iterdir()} == {used, digest, other}
        await here.quiet()


async def test_files_are_fetched_from_another_node(
    cache: pathlib.Path, tmp_path: pathlib.Path, node_adapters: dict[str, NodeAdapters]
) -> None:
    digest = store(tmp_path / "elsewhere", 1)
    async with line() as here:
        folder, kvnode = here.workers.folder, here.workers.kvnode
        sockets = {"attach_socket": f"{folder}/a2.sock", "node_listen": f"unix:{folder}/k2.sock"}
        other = await start_kvnode(KVNodeFlags(node_id="kvnode-1", kv_pool_bytes=2**20, **sockets))
        try:
            node_adapters["kvnode-1"].root = tmp_path / "elsewhere"

            async def addresses() -> dict[str, str]:
                return {"kvnode-0": kvnode.address, "gone": f"unix:{folder}/no.sock", "kvnode-1": other.address}

            node_adapters["kvnode-0"].addresses = addresses
            await check(await here.ask(1, digest), digest)
            code, retryable, message = await failure(await here.ask(2, "cd" * 32))
            assert (code, retryable) == (NotFound.code, True)
            assert "cdcdcd" in message
            await here.quiet()
        finally:
            await other.stop(0.0)
