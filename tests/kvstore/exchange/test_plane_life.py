"""A node survives dying readers, sources lost at the worst moment, and a NIXL without a path."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping

import pytest

from lab.testbed.conditions import WITHIN_S, until
from lab.testbed.plane_source import NAMESPACE, SourceProcess, block_of, chain_of, running_source
from pillion.kvstore.exchange.peers import Peers
from pillion.kvstore.exchange.plane import BlockShape, DataPlane
from pillion.kvstore.memory.memory import HostMemory
from pillion.kvstore.memory.segment import Segment, map_shared
from pillion.kvstore.transfer.nixl import nixl_plane
from pillion.kvstore.transfer.nixl.nixl_agent import why_nixl_unusable
from pillion.kvstore.transfer.nixl.nixl_plane import NixlPlane
from tests.support.processes import started

BLOCK_BYTES = 2**18
NUM_SLOTS = 64
# How long a read waits for a source that says nothing: a sound one on a loaded machine, and one that was stopped.
PATIENT_S, HASTY_S = 30.0, 0.5
# Real seconds in which the late answer of a source that goes on would show: another process sends it.
QUIET_S = 0.3
# Real seconds of which an idle process's share of a processor is measured.
IDLE_S = 1.0

# Reads everything over and over until it is killed.
READER = """
import asyncio, sys
from tests.kvstore.exchange.test_plane_life import reading_side

async def main():
    async with reading_side(sys.argv[1]) as (peers, plane, memory):
        peer, pinned = await peers_pin(peers)
        while True:
            await peer.read(plane, pinned.ticket_id, pinned.slots, tuple(range(64)))
            print("read", flush=True)

async def peers_pin(peers):
    from lab.testbed.plane_source import chain_of
    peer = await peers.get("source")
    return peer, await peer.pin(b"".join(chain_of(64)[0]), 0, 60.0)

asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def reading_side(
    address: str, stall_timeout_s: float = PATIENT_S
) -> AsyncIterator[tuple[Peers, NixlPlane, memoryview]]:
    """Peers, plane and memory of a node that reads from the one at ``address``."""
    segment = Segment(NUM_SLOTS * BLOCK_BYTES)
    memory = map_shared(segment.fileno(), NUM_SLOTS * BLOCK_BYTES)
    plane = NixlPlane(HostMemory(memory, NUM_SLOTS, BLOCK_BYTES), stall_timeout_s=stall_timeout_s)

    async def directory() -> Mapping[str, str]:
        return {"source": address}

    async def own() -> DataPlane:
        return plane

    peers = Peers("reader", BlockShape(BLOCK_BYTES, NAMESPACE), directory, own)
    try:
        yield peers, plane, memoryview(memory)
    finally:
        await peers.aclose()
        plane.close()
        segment.close()


@pytest.fixture(autouse=True)
def _with_nixl() -> None:
    if trouble := why_nixl_unusable():
        pytest.skip(trouble)


@pytest.fixture(scope="module")
def source() -> Iterator[SourceProcess]:
    """A source with NIXL, for tests that do not damage it."""
    if trouble := why_nixl_unusable():
        pytest.skip(trouble)
    with running_source("nixl", num_slots=NUM_SLOTS, block_bytes=BLOCK_BYTES) as started:
        yield started


async def test_killed_readers_do_not_crash_the_source(source: SourceProcess) -> None:
    """UCX's reads over TCP would: it aborts a source whose reader is gone."""
    for _ in range(2):
        command, pipe = [sys.executable, "-c", READER, source.address], subprocess.PIPE
        with started(command, stdout=pipe, stderr=subprocess.DEVNULL) as reader:
            assert reader.stdout is not None
            assert await asyncio.to_thread(reader.stdout.readline) == b"read\n"
        assert source.process.poll() is None
    async with reading_side(source.address) as (peers, plane, memory):
        peer = await peers.get("source")
        pinned = await peer.pin(b"".join(chain_of(NUM_SLOTS)[0]), 0, WITHIN_S)
        await peer.read(plane, pinned.ticket_id, pinned.slots[:2], (0, 1))
        assert bytes(memory[BLOCK_BYTES : 2 * BLOCK_BYTES]) == block_of(1, pinned.slots[1], BLOCK_BYTES)
        assert source.process.poll() is None


async def test_blocks_are_read_one_sided_if_possible(source: SourceProcess, caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise this file and half of the other would test nothing of NIXL."""
    caplog.set_level("INFO")
    async with reading_side(source.address) as (peers, plane, memory):
        peer = await peers.get("source")
        pinned = await peer.pin(b"".join(chain_of(NUM_SLOTS)[0]), 0, WITHIN_S)
        # The stream would refuse a ticket that does not exist.
        assert NUM_SLOTS * BLOCK_BYTES > 2 * nixl_plane.MAX_PART_BYTES
        await plane.read(peer.pool, peer.read_blocks, 10**6, pinned.slots, tuple(range(NUM_SLOTS)))
        assert bytes(memory) == b"".join(block_of(1, slot, BLOCK_BYTES) for slot in pinned.slots)
        source.signal(signal.SIGSTOP)
        memory[:BLOCK_BYTES] = bytes(BLOCK_BYTES)
        await plane.read(peer.pool, peer.read_blocks, 10**6, pinned.slots, tuple(range(NUM_SLOTS)))
        assert bytes(memory[:BLOCK_BYTES]) == block_of(1, pinned.slots[0], BLOCK_BYTES)
        source.signal(signal.SIGCONT)
    assert "by gRPC" not in caplog.text


async def test_a_source_that_is_stopped_before_its_first_read(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe gets no answer. What it requested arrives later and touches no slot; no source is abandoned."""
    caplog.set_level("INFO")
    with running_source("nixl", num_slots=NUM_SLOTS, block_bytes=BLOCK_BYTES) as source:
        async with reading_side(source.address, HASTY_S) as (peers, plane, memory):
            peer = await peers.get("source")
            pinned = await peer.pin(b"".join(chain_of(NUM_SLOTS)[0]), 0, WITHIN_S)
            source.signal(signal.SIGSTOP)
            monkeypatch.setattr("pillion.kvstore.exchange.peers.STREAM_STALL_S", HASTY_S)
            reading = asyncio.create_task(peer.read(plane, pinned.ticket_id, pinned.slots, tuple(range(NUM_SLOTS))))
            await asyncio.wait([reading], timeout=WITHIN_S)
            assert reading.done()
            assert reading.exception() is not None
            assert "by gRPC" in caplog.text
            source.signal(signal.SIGCONT)
            monkeypatch.setattr("pillion.kvstore.exchange.peers.STREAM_STALL_S", PATIENT_S)
            plane._stall_timeout_s = PATIENT_S
            await asyncio.sleep(QUIET_S)
            assert not any(memory)
            await peer.read(plane, pinned.ticket_id, pinned.slots, tuple(range(NUM_SLOTS)))
            monkeypatch.setattr(nixl_plane, "PROBE_AGAIN_S", 0.0)
            plane.forget("source")
            caplog.clear()
            await plane.read(peer.pool, peer.read_blocks, 10**6, pinned.slots, tuple(range(NUM_SLOTS)))
            assert bytes(memory[:BLOCK_BYTES]) == block_of(1, pinned.slots[0], BLOCK_BYTES)
            assert "by gRPC" not in caplog.text


async def test_a_source_without_nixl_is_streamed_from() -> None:
    with running_source("grpc", num_slots=NUM_SLOTS, block_bytes=BLOCK_BYTES) as source:
        async with reading_side(source.address) as (peers, plane, memory):
            peer = await peers.get("source")
            pinned = await peer.pin(b"".join(chain_of(NUM_SLOTS)[0]), 0, WITHIN_S)
            assert not peer.pool.nixl_metadata
            await peer.read(plane, pinned.ticket_id, pinned.slots[:2], (3, 2))
            assert bytes(memory[2 * BLOCK_BYTES : 3 * BLOCK_BYTES]) == block_of(1, pinned.slots[1], BLOCK_BYTES)


async def test_a_source_unreachable_by_nixl_is_streamed_from(
    source: SourceProcess, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As between two hosts with nothing but TCP: no probe is sent. Later it is retried."""
    caplog.set_level("INFO")

    def no_way(_: object) -> tuple[str, object]:
        raise RuntimeError("NIXL_ERR_BACKEND")

    async with reading_side(source.address) as (peers, plane, memory):
        peer = await peers.get("source")
        pinned = await peer.pin(b"".join(chain_of(NUM_SLOTS)[0]), 0, WITHIN_S)
        with monkeypatch.context() as broken:
            broken.setattr(plane._agent, "add", no_way)
            for _ in range(2):
                memory[:] = bytes(len(memory))
                await peer.read(plane, pinned.ticket_id, pinned.slots, tuple(range(NUM_SLOTS)))
                assert bytes(memory) == b"".join(block_of(1, slot, BLOCK_BYTES) for slot in pinned.slots)
        assert caplog.text.count("come by gRPC, NIXL finds no way to it: RuntimeError('NIXL_ERR_BACKEND')") == 1
        plane.forget("source")
        # The stream would refuse a ticket that does not exist.
        await plane.read(peer.pool, peer.read_blocks, 10**6, pinned.slots, tuple(range(NUM_SLOTS)))


async def test_many_first_reads_share_one_probe(source: SourceProcess) -> None:
    async with reading_side(source.address) as (peers, plane, memory):
        peer = await peers.get("source")
        pinned = await peer.pin(b"".join(chain_of(NUM_SLOTS)[0]), 0, WITHIN_S)
        reads = [peer.read(plane, pinned.ticket_id, (slot,), (own,)) for own, slot in enumerate(pinned.slots[:16])]
        await asyncio.gather(*reads)
        for own, slot in enumerate(pinned.slots[:16]):
            here = memory[own * BLOCK_BYTES : (own + 1) * BLOCK_BYTES]
            assert bytes(here) == block_of(1, slot, BLOCK_BYTES)


async def test_an_idle_node_uses_almost_no_cpu(source: SourceProcess) -> None:
    """NIXL's progress thread would use all of this time."""
    async with reading_side(source.address) as (peers, plane, _):
        peer = await peers.get("source")
        pinned = await peer.pin(b"".join(chain_of(NUM_SLOTS)[0]), 0, WITHIN_S)
        await peer.read(plane, pinned.ticket_id, pinned.slots[:1], (0,))
        pids = (source.process.pid, os.getpid())

        async def idle() -> bool:
            before = [_cpu_s(pid) for pid in pids]
            await asyncio.sleep(IDLE_S)
            return max(_cpu_s(pid) - was for pid, was in zip(pids, before, strict=True)) < 0.15

        # Threads that other tests have left behind may end only now.
        await until("a second in which neither process computes", idle)


def _cpu_s(pid: int) -> float:
    stat = pathlib.Path(f"/proc/{pid}/stat")
    if not stat.exists():
        pytest.skip("needs /proc")
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
