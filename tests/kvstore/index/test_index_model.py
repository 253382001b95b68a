"""The index against a dictionary: nodes boot, commit, evict, die and are swept in any order; look-ups must agree."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lab.testbed.redis import RedisServer
from lab.testbed.redis_kinds import running_cluster
from pillion.kvstore.hashing import SEGMENT_BLOCKS
from pillion.kvstore.index.index import Index
from tests.support.examples import examples
from tests.support.redis_nodes import Chain, FakeNode

pytestmark = pytest.mark.usefixtures("patient")

# Chains that share nothing, a block, a part of a segment, a segment, and more.
LENGTH = 2 * SEGMENT_BLOCKS + 10
CHAINS = [
    Chain(range(LENGTH)),
    Chain([*range(1), *range(1000, 1000 + LENGTH)]),
    Chain([*range(SEGMENT_BLOCKS - 3), *range(2000, 2000 + LENGTH)]),
    Chain([*range(SEGMENT_BLOCKS), *range(3000, 3000 + LENGTH)]),
    Chain([*range(SEGMENT_BLOCKS + 5), *range(4000, 4000 + LENGTH)]),
    Chain([7, 8, 9]),
]
NODES = ("a", "b", "c")

nodes = st.sampled_from(NODES)
chains = st.integers(0, len(CHAINS) - 1)
lengths = st.one_of(st.sampled_from([0, 1, SEGMENT_BLOCKS, SEGMENT_BLOCKS + 1]), st.integers(0, LENGTH))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("has"), nodes, chains, lengths),
        st.tuples(st.just("keeps"), nodes, chains, lengths),
        st.tuples(st.just("boots"), nodes, st.just(0), st.just(0)),
        st.tuples(st.just("leaves"), nodes, st.just(0), st.just(0)),
        st.tuples(st.just("sweeps"), nodes, chains, st.just(0)),
    ),
    max_size=20,
)


class IndexModel:
    """``blocks``: the blocks of each live node; of a chain, those from the first one to an end."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.blocks: dict[str, set[bytes]] = {}
        self.nodes: dict[str, FakeNode] = {}
        self.boots = 0

    async def run(self, what: str, name: str, chain: Chain, length: int) -> None:
        if what in ("has", "keeps", "boots") and (what == "boots" or name not in self.blocks):
            await self.boot(name)
        length = min(length, len(chain))
        if what == "has":
            await self.nodes[name].has(chain, 0, length)
            self.blocks[name] |= set(chain.hashes[:length])
        elif what == "keeps":
            # What hangs on an evicted block goes before it, in every chain.
            for other in CHAINS:
                shared = next(
                    (i for i, (x, y) in enumerate(zip(chain.hashes, other.hashes, strict=False)) if x != y), 3
                )
                if other is chain or shared > length:
                    await self.nodes[name].lost(other, length)
                    self.blocks[name] -= set(other.hashes[length:])
        elif what == "leaves" and name in self.blocks:
            await self.nodes[name].registry.leave(name)
            del self.blocks[name]
        elif what == "sweeps" and name in self.blocks:
            await self.nodes[name].sweep_all(chain)

    async def boot(self, name: str) -> None:
        self.boots += 1
        if name in self.nodes:
            await self.nodes[name].aclose()
        self.nodes[name] = FakeNode(self.url, name, boot_epoch=self.boots)
        await self.nodes[name].beat()
        self.blocks[name] = set()

    async def check(self) -> None:
        """A new index each time: an old one's knowledge of the nodes may be a second old."""
        index = Index(self.url)
        for chain in CHAINS:
            ends = {name: _end(chain, has) for name, has in self.blocks.items()}
            hits = await index.longest_prefix(chain.packed)
            assert {hit.node_id: hit.blocks for hit in hits} == {name: end for name, end in ends.items() if end}
        await index.aclose()


def _end(chain: Chain, has: set[bytes]) -> int:
    return next((i for i, block in enumerate(chain.hashes) if block not in has), len(chain))


async def play(url: str, script: list[tuple[str, str, int, int]]) -> None:
    model = IndexModel(url)
    for what, name, chain, length in script:
        await model.run(what, name, CHAINS[chain], length)
        await model.check()
    for node in model.nodes.values():
        await node.aclose()


@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps)
def test_one_server_agrees_with_a_dictionary(redis: RedisServer, script: list[tuple[str, str, int, int]]) -> None:
    redis.command("FLUSHALL")
    asyncio.run(play(redis.url, script))


@pytest.fixture(scope="module")
def cluster_ports() -> Iterator[list[int]]:
    with running_cluster() as servers:
        yield [server.port for server in servers]


@settings(max_examples=examples(8), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps)
def test_a_cluster_agrees_with_a_dictionary(cluster_ports: list[int], script: list[tuple[str, str, int, int]]) -> None:
    import redis as client

    for port in cluster_ports:
        with client.Redis(port=port) as shard:
            shard.flushall()
    asyncio.run(play("redis+cluster://" + ",".join(f"127.0.0.1:{port}" for port in cluster_ports), script))
