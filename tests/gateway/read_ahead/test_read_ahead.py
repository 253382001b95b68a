"""Read-ahead in real components: a queued request finds its KV in the pool, and nothing else changes."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import pytest

from lab.testbed.conditions import until
from lab.testbed.tiny_model import byte_prompt, save_model
from pillion import Delta
from pillion.gateway.read_ahead import read_ahead
from pillion.kvstore.transfer import fetch
from pillion.v1.kvnode_pb2 import PrefetchReply
from tests.support.components import Components, running_components

# Half of the slots that the watermarks leave free hold a whole prompt.
SLOTS = 128
TOKENS = 325
BLOCKS = 20
ASKED: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}


@contextlib.asynccontextmanager
async def line(tmp_path: pathlib.Path, **gateway: Any) -> AsyncIterator[Components]:
    """Run one line with a disk below a pool of SLOTS blocks; the gateway sends its workers one request at a time."""
    model = {"model": str(save_model(tmp_path / "tiny")), "dtype": "float32", "max_model_len": 512}
    block_bytes = 16 * 2 * 2 * 2 * 16 * 4
    node = {
        "kv_pool_bytes": SLOTS * block_bytes,
        "disk_path": str(tmp_path / "disk"),
        "disk_bytes": 64 * 2**20,
        # The next prompts then need no slot of a block that is not on disk yet.
        "low_watermark_percent": 50,
        "high_watermark_percent": 60,
        # A stalled machine must not end a fetch.
        "fetch_timeout_s": 60.0,
    }
    options = {"split_policy": "colocated", "max_running_requests": 1, **gateway}
    with tempfile.TemporaryDirectory(prefix="pil-") as short:
        async with running_components(pathlib.Path(short), model=model, node=node, gateway=options) as components:
            assert components.kvnode.pool.ledger.num_slots == SLOTS
            yield components


async def ask(components: Components, tokens: list[int], **options: Any) -> Delta:
    return [delta async for delta in components.client.generate(tokens, **ASKED | options)][-1]


async def evicted(components: Components) -> list[int]:
    """Compute a prompt, and others until it has left the pool for the disk; return it."""
    pool, first = components.kvnode.pool, byte_prompt(1, TOKENS)
    await ask(components, first)
    # A worker batches commits that nothing waits for, so blocks may follow the answer's end.
    await until("the prompt's blocks", lambda: len(pool.ledger.tree.by_hash) >= BLOCKS)
    hashes = list(pool.ledger.tree.by_hash)
    for number in range(2, 12):
        await ask(components, byte_prompt(number, TOKENS))
        await until("free slots", lambda: len(pool.ledger.free) * 2 >= SLOTS)
        if not any(block in pool.ledger.tree.by_hash for block in hashes[:BLOCKS]):
            break
    # Otherwise read-ahead competes with blocks still held by tickets.
    await components.proven()
    view = components.gateway.gateway.cluster.view
    await until("the gateway to know of the disk", lambda: view.of("kvnode")[0].disk_blocks)
    return first


@contextlib.asynccontextmanager
async def busy(components: Components) -> AsyncIterator[None]:
    """Occupy the only slot at the workers until the block exits."""
    admission = components.gateway.gateway.admission
    (model,) = {entry.name for entry in components.gateway.gateway._models.values()}
    permit = admission.enter()
    await admission.turn(permit, model)
    try:
        yield
    finally:
        admission.leave(permit)


@pytest.mark.parametrize("most", [0, 2])
async def test_a_queued_prompt_is_in_the_pool_at_its_turn(most: int, tmp_path: pathlib.Path) -> None:
    async with line(tmp_path, max_read_ahead=most) as components:
        first, pool = await evicted(components), components.kvnode.pool
        before = pool.fetcher.counts.restored_blocks
        async with busy(components):
            waiting = asyncio.create_task(ask(components, [*first, 7]))
            await until("a request that waits", lambda: components.gateway.gateway.admission.waiting == 1)
            if most:
                await until("its blocks", lambda: pool.fetcher.counts.restored_blocks - before >= BLOCKS)
                await until("no pin", lambda: not pool.ledger.tickets)
        last = await waiting
        assert last.timings.cached_tokens == BLOCKS * 16
        assert last.timings.restored_tokens == last.usage.restored_tokens == (0 if most else BLOCKS * 16)
        assert last.usage.cached_by_tier()["pool_tokens"] == (BLOCKS * 16 if most else 0)
        await components.proven()


async def test_an_immediate_turn_reads_nothing_ahead(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with line(tmp_path) as components:
        first = await evicted(components)
        monkeypatch.setattr(components.gateway.gateway._read_ahead, "waits", lambda admitted: pytest.fail("it waits"))
        assert (await ask(components, first)).timings.restored_tokens == BLOCKS * 16


async def test_reading_ahead_loses_nothing_and_is_bounded(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with line(tmp_path, max_read_ahead=1) as components:
        first, pool = await evicted(components), components.kvnode.pool
        ledger = pool.ledger
        there, free, fetch_blocks = set(ledger.tree.by_hash), [], pool.fetcher.fetch_blocks

        async def counted(*args: Any, **options: Any) -> PrefetchReply:
            # Blocks on disk may have left the pool in the meantime.
            free.append(len(ledger.free))
            brought: PrefetchReply = await fetch_blocks(*args, **options)
            return brought

        monkeypatch.setattr(pool.fetcher, "fetch_blocks", counted)
        before = pool.fetcher.counts.restored_blocks
        monkeypatch.setattr(fetch, "MAX_AHEAD_PERCENT", 20)
        monkeypatch.setattr(read_ahead, "MAX_QUEUED", 2)
        part = components.gateway.gateway._read_ahead
        async with busy(components):
            waiting = [asyncio.create_task(ask(components, first))]
            await until("a block", lambda: pool.fetcher.counts.restored_blocks > before)
            await until("no pin", lambda: not ledger.tickets)
            assert pool.fetcher.counts.restored_blocks - before <= free[0] // 5
            await until(
                "all blocks in the pool or on the disk",
                lambda: there <= {*ledger.tree.by_hash, *(name for name, _ in components.kvnode._hashes())},
            )
            part._max_at_once = 0
            waiting += [asyncio.create_task(ask(components, first)) for _ in range(3)]
            await until("all to wait", lambda: components.gateway.gateway.admission.waiting == 4)
            assert len(part._queue) == 2
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            await until("nobody to wait", lambda: not components.gateway.gateway.admission.waiting)
            assert not part._queue
        await components.proven()
