"""Prefill on another node: its blocks are sent to the decode worker's node, and both tickets end with the attempt."""

from __future__ import annotations

import asyncio

import pytest

from lab.testbed.conditions import until
from lab.testbed.toy_tokenizer import byte_tokenizer
from pillion import DeadlineExceeded
from pillion.errors import Conflict, Internal, NotFound, Overloaded, PillionError, Unavailable
from pillion.gateway.request import events
from pillion.kvstore.hashing import chain_hashes, request_root
from tests.gateway.request.test_faults import PROMPT, SCRIPT, read, whole
from tests.support.fake_components import BLOCK, NAMESPACE, FakeCluster, knows, running_fake_cluster

APART = "kvnode decode far-kvnode far-prefill"
IDS = tuple(byte_tokenizer().encode(PROMPT).ids)
HASHES = chain_hashes(request_root(bytes.fromhex(NAMESPACE)), IDS[:28], BLOCK)


def blocks_of(fetches: list) -> list[int]:
    """Return the end of each fetch."""
    return [len(fetch.block_hashes) // 32 for fetch in fetches]


async def finished(fakes: FakeCluster, deltas: list, replays: int = 0) -> tuple[int, int, int]:
    """Return the three parts of the prompt, after checking the answer and that everything is freed."""
    whole(fakes, deltas, replays)
    await fakes.settled()
    timings = deltas[-1].timings
    return timings.cached_tokens, timings.prefilled_tokens, timings.tail_tokens


async def test_chunks_flow_from_node_to_node() -> None:
    async with running_fake_cluster(SCRIPT, APART) as fakes:
        deltas = await read(fakes.client.generate(PROMPT, priority=3))
        assert await finished(fakes, deltas) == (0, 28, 2)
        timings = deltas[-1].timings
        assert (timings.prefill_worker, timings.prefill_chunks) == ("prefill-1", 4)
        assert timings.plan_reason.startswith("disaggregated: prefill-1 computes 28; ")
        (here,), (there,), (prefill_range,) = fakes.node.opened, fakes.far_node.opened, fakes.far_prefill.prefill_ranges
        assert (here.block_hashes, here.total_blocks) == (HASHES, 8)
        assert (there.block_hashes, there.total_blocks, there.priority, there.resume) == (HASHES, 8, 3, False)
        assert (prefill_range.start_tokens, tuple(prefill_range.token_ids), tuple(prefill_range.chunk_tokens)) == (
            0,
            IDS[:28],
            (8, 8, 8, 4),
        )
        assert prefill_range.text_tokens == len(IDS) + fakes.decode.submits[0].max_tokens
        assert (prefill_range.parent_hash, prefill_range.priority) == (request_root(bytes.fromhex(NAMESPACE)), 3)
        wanted = blocks_of(fakes.node.fetches)
        assert wanted == sorted(wanted)
        assert wanted[-1] == 7
        for fetch in fakes.node.fetches:
            assert list(fetch.source_node_ids) == ["kv-1"]
            assert HASHES.startswith(fetch.block_hashes)
            assert (fetch.epoch, fetch.ticket_id) == (here.epoch, fakes.decode.submits[0].ticket_id)
        assert not fakes.far_node.fetches


async def test_one_fetch_runs_at_a_time_up_to_the_newest_chunk() -> None:
    async with running_fake_cluster(SCRIPT, APART) as fakes:
        fakes.node.fetch_gate.clear()
        reading = asyncio.create_task(read(fakes.client.generate(PROMPT)))
        await until(
            "the remote prefill range to be over",
            lambda: fakes.node.fetches and fakes.far_prefill.prefill_ranges and not fakes.far_prefill.running,
        )
        assert (len(fakes.node.fetches), fakes.node.fetching) == (1, 1)
        fakes.node.fetch_gate.set()
        assert await finished(fakes, await reading) == (0, 28, 2)
        assert blocks_of(fakes.node.fetches)[-1] == 7
        assert len(fakes.node.fetches) <= 2, "what was computed during a fetch is one more"


@pytest.mark.parametrize(
    ("here", "there", "brings", "start", "fetches"),
    [
        (2, 0, [], 8, [2]),
        (2, 0, [1], 4, [2]),
        (2, 0, [Unavailable("gone")], 0, [2]),
        (2, 2, [], 8, []),
        (2, 3, [], 12, []),
        (0, 0, [], 0, []),
        (2, 7, [], 28, []),
    ],
)
async def test_the_cached_prefix_is_shared_with_the_prefill_workers_node(here, there, brings, start, fetches) -> None:
    async with running_fake_cluster(SCRIPT, APART) as fakes:
        fakes.node.pinned, fakes.far_node.pinned, fakes.far_node.brings = here, there, brings
        deltas = await read(fakes.client.generate(PROMPT))
        assert await finished(fakes, deltas) == (4 * here, 28 - 4 * here, 2)
        assert [prefill_range.start_tokens for prefill_range in fakes.far_prefill.prefill_ranges] == (
            [start] if start < 28 else []
        )
        assert blocks_of(fakes.far_node.fetches) == fetches
        assert all(list(fetch.source_node_ids) == ["kv-0"] for fetch in fakes.far_node.fetches)
        assert blocks_of(fakes.node.fetches)[-1] == 7


async def test_a_remote_prefix_is_fetched_first_and_counts_as_cached() -> None:
    async with running_fake_cluster(SCRIPT, APART) as fakes:
        fakes.far_node.pinned = 4
        knows(fakes, kv_1=4)
        assert await finished(fakes, await read(fakes.client.generate(PROMPT))) == (16, 12, 2)
        assert blocks_of(fakes.node.fetches)[0] == 4
        assert [prefill_range.start_tokens for prefill_range in fakes.far_prefill.prefill_ranges] == [16]


@pytest.mark.parametrize(
    ("brings", "prefilled"),
    [([0], 0), ([1, 1], 4), ([1, 2, 2], 8), ([Unavailable("gone")], 0), ([1, Conflict("fenced")], 4),
     ([NotFound("ticket")], 0)],
)  # fmt: skip
async def test_a_short_fetch_makes_a_longer_prompt_tail(brings: list, prefilled: int) -> None:
    async with running_fake_cluster(SCRIPT, APART) as fakes:
        fakes.node.brings = brings
        deltas = await read(fakes.client.generate(PROMPT))
        assert await finished(fakes, deltas) == (0, prefilled, 30 - prefilled)
        assert deltas[-1].timings.plan_reason.endswith(f"the prefill range ended {28 - prefilled} tokens early")
        assert {tuple(fetch.source_node_ids) for fetch in fakes.node.fetches} == {("kv-1",)}


async def test_a_failed_transfer_stops_the_prefill_range() -> None:
    async with running_fake_cluster(SCRIPT, APART) as fakes:
        fakes.node.brings, fakes.far_prefill.hang_at = [1, 1], 1
        assert await finished(fakes, await read(fakes.client.generate(PROMPT))) == (0, 4, 26)


async def test_a_source_lost_between_chunks() -> None:
    """Its worker is lost with it. Fetched blocks count, and the rest is planned again without both."""
    async with running_fake_cluster(SCRIPT, APART) as fakes:
        fakes.node.brings, fakes.far_prefill.hang_at = [2, 2], 1
        reading = asyncio.create_task(read(fakes.client.generate(PROMPT)))
        await until("the fetch to be over", lambda: len(fakes.node.fetches) == 1 and not fakes.node.fetching)
        await fakes.servers["far-kvnode"].stop(0)
        await fakes.servers["far-prefill"].stop(0)
        fakes.node.pinned = 2
        deltas = await reading
        assert await finished(fakes, deltas, replays=1) == (0, 8, 22)
        assert deltas[-1].timings.plan_reason.startswith("disaggregated: co-located, no prefill worker")
        assert [opened.resume for opened in fakes.node.opened] == [False]
        (submit,) = fakes.decode.submits
        assert (submit.ticket_id, submit.attempt) == (0, 2)


@pytest.mark.parametrize("wait", [False, True])
async def test_a_full_remote_node_falls_back_to_the_decode_worker(wait: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests that each hold one node and wait for the other must not deadlock."""
    monkeypatch.setattr(events, "MAX_REMOTE_ADMISSION_WAIT_S", 0.1)
    async with running_fake_cluster(SCRIPT, APART) as fakes:
        if wait:
            fakes.far_node.gate.clear()
        else:
            fakes.far_node.failures = [Overloaded("the line is full")]
        deltas = await read(fakes.client.generate(PROMPT))
        assert await finished(fakes, deltas) == (0, 0, 30)
        assert not fakes.far_prefill.prefill_ranges
        if wait:
            await until("the ticket at kv-1 to be forgotten", lambda: fakes.far_node.forgotten)


@pytest.mark.parametrize(
    ("error", "chunks"),
    [(Unavailable("gone"), 2), (NotFound("no such ticket"), 0), (Overloaded("queue full"), 2), (Internal("bug"), 0)],
)
async def test_a_lost_worker_is_planned_again(error: PillionError, chunks: int) -> None:
    async with running_fake_cluster(SCRIPT, APART) as fakes:
        fakes.far_prefill.failures = [(chunks, error)]
        deltas = await read(fakes.client.generate(PROMPT))
        assert await finished(fakes, deltas, replays=1) == (0, 8 * chunks, 30 - 8 * chunks)
        assert deltas[-1].timings.plan_reason.startswith("disaggregated: co-located, no prefill worker")


async def test_the_second_attempt_goes_to_another_node() -> None:
    async with running_fake_cluster(SCRIPT, f"{APART} prefill") as fakes:
        fakes.prefill.failures = [(1, Unavailable("gone"))]
        deltas = await read(fakes.client.generate(PROMPT))
        assert await finished(fakes, deltas, replays=1) == (0, 28, 2)
        assert (len(fakes.prefill.prefill_ranges), len(fakes.far_prefill.prefill_ranges)) == (1, 1)
        assert fakes.far_node.opened[0].resume


@pytest.mark.parametrize("error", [Unavailable("restarting"), Conflict("no worker has attached"), NotFound("epoch")])
async def test_a_node_that_refuses_the_second_ticket(error: PillionError) -> None:
    async with running_fake_cluster(SCRIPT, APART) as fakes:
        fakes.far_node.failures = [error]
        deltas = await read(fakes.client.generate(PROMPT))
        assert await finished(fakes, deltas, replays=1) == (0, 0, 30)


async def test_a_decode_worker_lost_after_a_remote_prefill_range() -> None:
    async with running_fake_cluster(SCRIPT, APART) as fakes:
        fakes.decode.break_after = 5
        deltas = await read(fakes.client.generate(PROMPT))
        assert (await finished(fakes, deltas, replays=1))[0] == 0
        assert len(fakes.far_node.opened) == len(fakes.node.opened) == 2


@pytest.mark.parametrize(
    ("stage", "end"),
    [
        *((stage, "cancel") for stage in ("far ticket", "far fetch", "prefill range", "fetch")),
        ("prefill range", "deadline"),
        *(pytest.param(stage, "deadline", marks=pytest.mark.long) for stage in ("far ticket", "far fetch", "fetch")),
    ],
)
async def test_both_tickets_end_with_the_request(stage: str, end: str) -> None:
    async with running_fake_cluster(SCRIPT, APART) as fakes:
        fakes.node.pinned = 1
        gate, reached = {
            "far ticket": (fakes.far_node.gate, lambda: fakes.far_node.waiting),
            "far fetch": (fakes.far_node.fetch_gate, lambda: fakes.far_node.fetching),
            "prefill range": (fakes.far_prefill.gate, lambda: fakes.far_prefill.running),
            "fetch": (fakes.node.fetch_gate, lambda: fakes.node.fetching),
        }[stage]
        gate.clear()
        reading = asyncio.create_task(read(fakes.client.generate(PROMPT, timeout_s=0.6 if end == "deadline" else None)))
        # On a stalled machine the deadline may pass earlier.
        await until("the stage to be reached", lambda: reached() or reading.done())
        assert fakes.node.held or reading.done()
        if end == "cancel":
            reading.cancel()
        (outcome,) = await asyncio.gather(reading, return_exceptions=True)
        assert isinstance(outcome, DeadlineExceeded if end == "deadline" else asyncio.CancelledError)
        await fakes.settled()
        assert not fakes.decode.submits
