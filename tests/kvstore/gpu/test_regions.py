"""Shared regions: the bookkeeping by property, and real processes that fill, wait, read and are killed."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import pathlib
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.testbed import fake_cuda
from lab.testbed.conditions import WITHIN_S, until
from lab.testbed.fake_cuda import NATIVE, DeviceBytes
from pillion.config import KVNodeFlags
from pillion.errors import ConfigError, Conflict, InvalidRequest, Overloaded, Unavailable
from pillion.kvstore.assemble import start_kvnode
from pillion.kvstore.gpu import cuda_driver, region_server
from pillion.kvstore.gpu.mapped_memory import Region, share_region
from pillion.kvstore.gpu.regions import Action, Dropped, Granted, RegionGrant, Regions
from pillion.kvstore.node.kv_node import KVNode
from pillion.wire.attach import (
    RegionHello,
    hello_from_line,
    region_filled_from_line,
    region_reply_from_line,
)
from pillion.wire.json_lines import line_to_bytes
from tests.support.examples import examples

MIB = 2**20
SIZE = MIB + 4096
KEY, OTHER = hashlib.sha256(b"weights").hexdigest(), hashlib.sha256(b"others").hexdigest()

# Asks for the region, fills it when told to on its standard input, says so, and waits to be killed.
CHILD = """
import sys
from pillion.kvstore.gpu.mapped_memory import share_region
from lab.testbed.fake_cuda import DeviceBytes
from pillion.kvstore.gpu.mapped_memory import share_region
from lab.testbed.fake_cuda import DeviceBytes
region = share_region(sys.argv[1], sys.argv[2], int(sys.argv[3]), 60)
print("fill" if region.must_fill else "ready", flush=True)
sys.stdin.readline()
if region.must_fill:
    if region.device_memory is None:
        region.memory[:7] = b"weights"
    else:
        DeviceBytes(region.device_memory).write(0, b"weights")
    region.filled()
    print("filled", flush=True)
sys.stdin.readline()
"""


def test_the_first_caller_fills_a_region_and_the_others_wait() -> None:
    regions = Regions()
    assert regions.ask(1, "k", 10) == [Granted(1, "k", RegionGrant.FILL)]
    assert regions.ask(2, "k", 10) == []
    assert regions.ask(3, "k", 10) == []
    with pytest.raises(Conflict, match="10 bytes, 11 were"):
        regions.ask(4, "k", 11)
    with pytest.raises(Conflict, match="may not fill"):
        regions.filled(2)
    assert regions.filled(1) == [Granted(2, "k", RegionGrant.READY), Granted(3, "k", RegionGrant.READY)]
    assert regions.ask(5, "k", 10) == [Granted(5, "k", RegionGrant.READY)]
    for user in (1, 2, 3, 5, 5):
        assert regions.remove_user(user) == []
    assert regions.ask(6, "k", 10) == [Granted(6, "k", RegionGrant.READY)], "it stays when nobody uses it"
    assert regions.drop_idle() == []
    assert regions.remove_user(6) == []
    assert regions.drop_idle() == [Dropped("k")]


def test_a_dead_filler_is_replaced_by_the_next_waiter() -> None:
    regions = Regions()
    for user in (1, 2, 3):
        regions.ask(user, "k", 10)
    assert regions.remove_user(1) == [Granted(2, "k", RegionGrant.FILL)]
    assert regions.remove_user(2) == [Granted(3, "k", RegionGrant.FILL)]
    assert regions.remove_user(3) == [Dropped("k")]
    regions.check_integrity()


def test_exceeded_region_limits_are_reported() -> None:
    regions = Regions(max_regions=2, max_waiters=1)
    regions.ask(1, "a", 1)
    regions.ask(2, "a", 1)
    with pytest.raises(Overloaded, match="wait for this region"):
        regions.ask(3, "a", 1)
    regions.ask(4, "b", 1)
    with pytest.raises(Overloaded, match="2 regions"):
        regions.ask(5, "c", 1)
    regions.filled(4)
    regions.remove_user(4)
    assert regions.ask(6, "c", 1) == [Dropped("b"), Granted(6, "c", RegionGrant.FILL)]
    regions.check_integrity()


class RegionsModel:
    """A model of the regions: live processes, who may fill a region, and full regions."""

    def __init__(self) -> None:
        self.living: dict[int, str] = {}
        self.granted: set[int] = set()
        self.fillers: dict[str, int] = {}
        self.full: set[str] = set()

    def hear(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Dropped):
                users = {user for user in self.granted if self.living.get(user) == action.key}
                assert not users, "its memory goes while it is used"
                self.full.discard(action.key)
                continue
            assert self.living[action.user] == action.key
            assert action.user not in self.granted, "granted twice"
            self.granted.add(action.user)
            assert action.key not in self.fillers
            assert (action.key in self.full) == (action.state == RegionGrant.READY)
            if action.state == RegionGrant.FILL:
                self.fillers[action.key] = action.user


@settings(max_examples=examples(300))
@given(st.lists(st.tuples(st.sampled_from(["ask", "filled", "gone", "idle"]), st.integers(0, 30), st.integers(0, 3))))
def test_no_process_sees_a_partly_filled_region(steps: list[tuple[str, int, int]]) -> None:
    regions, model = Regions(max_regions=2, max_waiters=2), RegionsModel()
    for number, (what, pick, name) in enumerate(steps):
        user = list(model.living)[pick % len(model.living)] if model.living else -1
        key = model.living.get(user, "")
        if what == "ask":
            with contextlib.suppress(Overloaded):
                model.living[number] = f"key {name}"
                try:
                    model.hear(regions.ask(number, f"key {name}", 10))
                except Overloaded:
                    del model.living[number]
                    raise
        elif what == "filled":
            may = model.fillers.get(key) == user
            if may:
                del model.fillers[key]
                model.full.add(key)
                model.hear(regions.filled(user))
            else:
                with pytest.raises(Conflict):
                    regions.filled(user)
        elif what == "gone":
            model.living.pop(user, None)
            model.granted.discard(user)
            if model.fillers.get(key) == user:
                del model.fillers[key]
            model.hear(regions.remove_user(user))
        else:
            model.hear(regions.drop_idle())
        regions.check_integrity()
        # A live process without a grant waits for a filler.
        assert all(model.living[user] in model.fillers for user in model.living.keys() - model.granted)


def test_invalid_lines_are_rejected() -> None:
    good = line_to_bytes(RegionHello(component_id="w", region_key=KEY, size_bytes=1))
    assert hello_from_line(good).region_key == KEY
    for bad in (
        good.replace(KEY.encode(), KEY[1:].encode()),
        good.replace(b'"size_bytes":1', b'"size_bytes":0'),
        good.replace(b'"size_bytes":1', b'"size_bytes":"1"'),
        good.replace(b'"component_id":"w",', b""),
        b"[]\n",
    ):
        with pytest.raises(InvalidRequest):
            hello_from_line(bad)
    for reply in (
        b'{"state":"other"}',
        b'{"state":"ready","memory_kind":"rom"}',
        b'{"state":"fill","mapped_bytes":-1}',
    ):
        with pytest.raises(InvalidRequest):
            region_reply_from_line(reply)
    with pytest.raises(InvalidRequest):
        region_filled_from_line(b"{}")


@pytest.fixture(params=["cpu", "cuda"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cuda":
        monkeypatch.setattr(cuda_driver, "LIBRARY", fake_cuda.library())
    return str(request.param)


@asynccontextmanager
async def running(folder: str, kind: str) -> AsyncIterator[KVNode]:
    node = await start_kvnode(
        KVNodeFlags(
            node_listen=f"unix:{folder}/node.sock",
            attach_socket=f"{folder}/attach.sock",
            kv_device=kind,
            kv_pool_bytes=MIB,
            kv_transport="grpc",
        )
    )
    try:
        yield node
        node.regions.regions.check_integrity()
    finally:
        await node.stop(0.1)


class Child:
    """A process that shares the region."""

    def __init__(self, folder: str) -> None:
        command = [sys.executable, "-c", CHILD, f"{folder}/attach.sock", KEY, str(SIZE)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=fake_cuda.environment())

    async def line(self) -> str:
        assert self.process.stdout is not None
        return (await asyncio.to_thread(self.process.stdout.readline)).strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def children(folder: str, count: int) -> Iterator[list[Child]]:
    made: list[Child] = []
    try:
        made.extend(Child(folder) for _ in range(count))
        yield made
    finally:
        for child in made:
            child.kill()
            child.process.communicate()


async def shared(folder: str, key: str = KEY, size: int = SIZE, timeout_s: float = WITHIN_S) -> Region:
    return await asyncio.to_thread(share_region, f"{folder}/attach.sock", key, size, timeout_s)


def seen(region: Region, count: int) -> bytes:
    if region.device_memory is None:
        return bytes(region.memory[:count])
    return DeviceBytes(region.device_memory).read(0, count)


def put(region: Region, data: bytes) -> None:
    if region.device_memory is None:
        region.memory[: len(data)] = data
    else:
        DeviceBytes(region.device_memory).write(0, data)


# In `make test` a filler is killed on a GPU, and processes share host memory in the next test.
@pytest.mark.parametrize("kind", [pytest.param("cpu", marks=pytest.mark.long), "cuda"], indirect=True)
async def test_a_killed_filler_is_replaced(short_folder: str, kind: str) -> None:
    async with running(short_folder, kind) as node:
        with children(short_folder, 1) as (first,):
            assert await first.line() == "fill"
            waiting = {asyncio.create_task(shared(short_folder)) for _ in range(2)}
            await until("three connections", lambda: node.regions.waiting == 3)
            node.regions.regions.check_integrity()
            assert not any(task.done() for task in waiting)
            first.kill()
            done, left = await asyncio.wait(waiting, timeout=WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
            (second,) = [task.result() for task in done]
            assert (second.must_fill, second.size_bytes) == (True, SIZE)
            assert second.address
            put(second, b"second")
            assert not any(task.done() for task in left)
            second.filled()
            second.filled()
            third = await left.pop()
            assert not third.must_fill
            assert seen(third, 6) == b"second"
            second.close()
            second.close()
            third.close()
            await until("all connections to end", lambda: not node.regions.waiting)
        # Who filled it may go; whoever comes later has it at once.
        with children(short_folder, 1) as (late,):
            assert await late.line() == "ready"
            fourth = await shared(short_folder)
            assert seen(fourth, 6) == b"second"
            fourth.close()


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.long)], indirect=True)
async def test_processes_share_what_one_of_them_filled(short_folder: str, kind: str) -> None:
    async with running(short_folder, kind):
        with children(short_folder, 3) as made:
            states = [asyncio.create_task(child.line()) for child in made]
            (filling,) = (await asyncio.wait(states, return_when=asyncio.FIRST_COMPLETED))[0]
            filler = made[states.index(filling)]
            assert filling.result() == "fill"
            filler.go_on()
            assert await filler.line() == "filled"
            assert sorted(await asyncio.gather(*states)) == ["fill", "ready", "ready"]
            mine = await shared(short_folder)
            assert seen(mine, 7) == b"weights"
            other = await shared(short_folder, OTHER)
            assert other.must_fill
            assert other.address != mine.address
            mine.close()
            other.close()


async def test_refusals_are_one_line(short_folder: str, kind: str) -> None:
    async with running(short_folder, kind) as node:
        first = await shared(short_folder)
        for key, size, why in ((KEY, SIZE + 1, "were asked for"), ("short", SIZE, "64 hexa"), (OTHER, 0, "one byte")):
            with pytest.raises(ConfigError, match=why) as caught:
                await shared(short_folder, key, size)
            assert "\n" not in caught.value.message
        with pytest.raises(Unavailable, match="no answer in time"):
            await shared(short_folder, timeout_s=0.3)
        first.close()
        await until("all connections to end", lambda: not node.regions.waiting)
        assert not node.regions.keys, "its memory went with its filler"


async def test_a_malformed_filled_message_is_rejected(short_folder: str) -> None:
    async with running(short_folder, "cpu") as node:
        for answer in (b'{"filled_bytes":1}\n', b"nonsense\n"):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.settimeout(WITHIN_S)
                sock.connect(f"{short_folder}/attach.sock")
                sock.sendall(line_to_bytes(RegionHello(component_id="liar", region_key=KEY, size_bytes=SIZE)))
                assert b'"fill"' in await asyncio.to_thread(sock.recv, 4096)
                sock.sendall(answer)
                assert b'"error"' in await asyncio.to_thread(sock.recv, 4096)
            await until("the memory to be freed", lambda: not node.regions.keys)


async def test_waits_time_out(short_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_server, "FILL_TIMEOUT_S", 0.1)
    async with running(short_folder, "cpu") as node:
        first = await shared(short_folder)
        with pytest.raises(ConfigError, match="not filled within"):
            await shared(short_folder)
        first.close()
        await until("all connections to end", lambda: not node.regions.waiting)


@pytest.mark.skipif(NATIVE, reason="a real GPU is larger")
async def test_idle_regions_are_freed_if_memory_is_short(short_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "LIBRARY", fake_cuda.library())
    monkeypatch.setenv("FAKE_CUDA_TOTAL_BYTES", str(6 * MIB))
    async with running(short_folder, "cuda") as node:
        first = await shared(short_folder, KEY, 4 * MIB)
        with pytest.raises(ConfigError, match="cannot allocate"):
            await shared(short_folder, OTHER, 4 * MIB)
        first.filled()
        await until("the region to be ready", lambda: node.regions.regions.state(KEY) == "ready")
        first.close()
        await until("the region to be idle", lambda: node.regions.regions.state(KEY) == "idle")
        second = await shared(short_folder, OTHER, 4 * MIB)
        assert second.must_fill
        assert node.regions.keys == {OTHER}
        second.close()
        await until("all connections to end", lambda: not node.regions.waiting)


async def test_a_filler_attaches_to_a_restarted_node(short_folder: str, kind: str) -> None:
    """A worker's start that fails this way is retried; one that fails because of its flags ends the cluster."""
    async with running(short_folder, kind):
        region = await shared(short_folder)
        assert region.must_fill
    with pytest.raises(Unavailable, match="the KV node is gone"):
        region.filled()
    region.close()


def test_a_region_needs_a_running_node(tmp_path: pathlib.Path) -> None:
    with pytest.raises(Unavailable, match="no region from the KV node"):
        share_region(str(tmp_path / "none"), KEY, 1, 0.2)
