"""States in the index: a ledger's events go into a real Redis, and look-ups return each node's last state."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from lab.testbed.redis import RedisServer
from lab.testbed.redis_kinds import PortServer, running_cluster
from pillion.errors import Unavailable
from pillion.kvstore.hashing import SEGMENT_BLOCKS, state_page
from pillion.kvstore.index.index import HotPrefixes, Index, PrefixHit, PrefixHits
from pillion.kvstore.ledger.ledger import Ledger
from pillion.v1.kvnode_pb2 import CommitRun
from tests.support.redis_nodes import Chain, FakeNode, fake_nodes

pytestmark = pytest.mark.usefixtures("patient")

BLOCKS = 2 * SEGMENT_BLOCKS + 6
CHAIN = Chain(range(BLOCKS))


async def commits(node: FakeNode, blocks: int, places: list[int], pages: int) -> None:
    """Announce what a ledger has after committing this many blocks, with states after some of them."""
    ledger = Ledger(itertools.count(1).__next__, 0)
    ledger.shape(blocks + len(places) * pages + 1)
    worker = ledger.attach("worker", "decode")
    ticket = ledger.admit(worker, 1, [], blocks + len(places) * pages)
    assert ticket is not None
    runs = [(CHAIN.hashes[:blocks], b"")]
    runs += [([state_page(CHAIN.hashes[at - 1], page) for page in range(pages)], CHAIN.hashes[at - 1]) for at in places]
    for hashes, after in runs:
        slots = ledger.adopt(worker, ticket.ticket_id, len(hashes)).leased_slots
        run = CommitRun(ticket_id=ticket.ticket_id, slots=slots, block_hashes=b"".join(hashes), after=after)
        (result,) = ledger.commit(worker, [run])
        assert not result.refusal
    await node.writer.announce(node.entry, ledger.drain_events())


async def check_last_states(nodes: list[FakeNode], index: Index, places: dict[str, list[int]]) -> None:
    for node in nodes:
        await commits(node, BLOCKS, places[node.record.node_id], 3)
    for asked in (1, 31, 32, 33, 63, 64, 65, BLOCKS):
        last = {name: max((at for at in there if at <= asked), default=0) for name, there in places.items()}
        hits = [PrefixHit(name, blocks) for name, blocks in last.items() if blocks]
        expected = PrefixHits(sorted(hits, key=lambda hit: (-hit.blocks, hit.node_id)), asked)
        assert await index.longest_state(CHAIN.head(asked)) == expected, asked


async def test_the_last_state_of_each_node_is_found_at_every_place_of_a_segment(
    redis: RedisServer, index: Index
) -> None:
    rng = random.Random(3)
    names = [f"n{number}" for number in range(6)]
    # A state's first page is in the chain's segment, but for the places after a segment's last block.
    places = {name: sorted(rng.sample(range(1, BLOCKS + 1), 6)) for name in names}
    places |= {"n0": [31], "n1": [32], "n2": [33, 64], "n3": []}
    await check_last_states(await fake_nodes(redis.url, *names), index, places)


@pytest.fixture
def servers() -> Iterator[list[PortServer]]:
    with running_cluster() as made:
        yield made


@pytest.mark.long
async def test_a_cluster_of_redis_answers_the_same(servers: list[PortServer]) -> None:
    url = "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in servers)
    index = Index(url)
    try:
        nodes = await fake_nodes(url, "a", "b")
        await check_last_states(nodes, index, {"a": [5, 32, 40], "b": [31, 64]})
    finally:
        await index.aclose()


async def test_a_state_without_its_blocks_is_no_hit(redis: RedisServer, index: Index) -> None:
    a, b = await fake_nodes(redis.url, "a", "b")
    await commits(a, 10, [4, 8], 1)
    await commits(b, 10, [6], 1)
    assert await index.longest_state(CHAIN.packed) == PrefixHits([PrefixHit("a", 8), PrefixHit("b", 6)], 10)
    await a.lost(CHAIN, 7)
    assert await index.longest_state(CHAIN.packed) == PrefixHits([PrefixHit("b", 6)], 10)
    assert await index.longest_state(b"") == PrefixHits([])


async def test_blocks_without_a_state_count_only_on_live_nodes(redis: RedisServer, index: Index) -> None:
    a, b = await fake_nodes(redis.url, "a", "b")
    await commits(a, 10, [2], 1)
    await commits(b, 4, [], 1)
    assert await index.longest_state(CHAIN.packed) == PrefixHits([PrefixHit("a", 2)], 10)
    # What an earlier life of the node said is void.
    again = FakeNode(redis.url, "a", boot_epoch=99)
    await again.beat()
    fresh = Index(redis.url)
    try:
        assert await fresh.longest_state(CHAIN.packed) == PrefixHits([], 4)
    finally:
        await fresh.aclose()
        await again.aclose()


async def test_cached_hits_are_used_while_redis_is_down(
    redis: RedisServer, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    [a] = await fake_nodes(redis.url, "a")
    await commits(a, 10, [6], 2)
    assert await index.longest_state(CHAIN.packed) == PrefixHits([PrefixHit("a", 6)], 10)

    async def gone(*_: object) -> PrefixHits:
        raise Unavailable("no Redis")

    monkeypatch.setattr(index, "_query", gone)
    assert await index.longest_state(CHAIN.packed) == PrefixHits([PrefixHit("a", 6)])
    assert not index.available
    # A prefix of it ends before the state.
    assert await index.longest_state(CHAIN.head(5)) == PrefixHits([])


def test_a_state_hit_is_cached_only_at_its_end() -> None:
    hot = HotPrefixes()
    hot.remember(CHAIN.packed, [("a", 9)], states=True)
    assert [hot.find(CHAIN.head(blocks)) for blocks in (8, 9, 20)] == [{}, {"a": 9}, {"a": 9}]
