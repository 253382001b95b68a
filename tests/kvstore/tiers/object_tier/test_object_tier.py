"""The object tier over a real S3 service, sound and failing: blocks are read whole or not at all, and in time."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator, Sequence

import pytest

from lab.testbed.conditions import WITHIN_S, until
from lab.testbed.s3_service import CREDENTIALS, S3Service
from pillion.kvstore.hashing import SEGMENT_BLOCKS
from pillion.kvstore.tiers import tier_breaker
from pillion.kvstore.tiers.object_tier import object_store, object_tier
from pillion.kvstore.tiers.object_tier.object_runs import RunLayout
from pillion.kvstore.tiers.object_tier.object_store import ObjectStore, parse_object_url
from pillion.kvstore.tiers.object_tier.object_tier import ObjectTier
from tests.support.disk import BLOCK_BYTES, NAMESPACE, OTHER, Stored
from tests.support.object_blocks import branched

pytest.importorskip("obstore")


@pytest.fixture
async def service(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[S3Service]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tier_breaker, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(object_store, "CONNECT_TIMEOUT_MS", object_store.REQUEST_TIMEOUT_MS)
    probe = ObjectTier._answers_probe
    async with S3Service(tmp_path / "s3").running() as found:

        async def probed(tier: ObjectTier) -> bool:
            # A pause lasts as long as the trouble, also where a probe would have found none.
            await until("the trouble's end", lambda: not found.trouble)
            return await probe(tier)

        monkeypatch.setattr(ObjectTier, "_answers_probe", probed)
        yield found


@contextlib.asynccontextmanager
async def opened(service: S3Service, namespace: bytes = NAMESPACE) -> AsyncIterator[ObjectTier]:
    """A node's tier with empty caches of the bucket's content."""
    tier = ObjectTier(ObjectStore(parse_object_url(service.url())), RunLayout(namespace, BLOCK_BYTES))
    try:
        yield tier
    finally:
        await tier.close()


async def written(tier: ObjectTier, blocks: Sequence[Stored]) -> None:
    """Store blocks, last ones first, as the pool evicts them, and again after a failed write, until the bucket has
    them."""

    async def stored() -> bool:
        missing = [block for block in blocks if block[0].hash not in tier]
        if missing and tier.is_available():
            await tier.store(missing[::-1])
        return len(tier) >= len({name.hash for name, _ in blocks}) and not missing

    await until("all blocks to be written", stored)


async def found(tier: ObjectTier, blocks: Sequence[Stored], first: int = 0) -> int:
    """Return how many blocks of a chain the tier has from ``first`` on, after a look-up."""
    await tier.find([name.hash for name, _ in blocks], first)
    return next((at for at, (name, _) in enumerate(blocks[first:]) if name.hash not in tier), len(blocks) - first)


async def loaded(tier: ObjectTier, blocks: Sequence[Stored]) -> int:
    """Return how many leading blocks were loaded, after checking them."""
    targets = [bytearray(BLOCK_BYTES) for _ in blocks]
    count = await tier.load([name.hash for name, _ in blocks], [memoryview(target) for target in targets])
    for (_, data), target in zip(blocks[:count], targets, strict=False):
        assert target == data
    return count


async def test_a_long_chain_is_found_with_few_list_calls(service: S3Service) -> None:
    """Of 40 segments in the bucket and 9 missing ones, the end is found by about twice the root of 49 lists; everything
    before it is loaded anyway."""
    (chain,) = branched([49 * SEGMENT_BLOCKS])
    hashes = [name.hash for name, _ in chain]
    async with opened(service) as tier:
        await written(tier, chain[: 40 * SEGMENT_BLOCKS])
    async with opened(service) as tier:
        before = service.requests
        await tier.find(hashes, 0, roughly=True)
        assert service.requests - before <= 2 * 7 + 2
        assert max(at for at, block_hash in enumerate(hashes) if block_hash in tier) == 40 * SEGMENT_BLOCKS - 1
        assert await found(tier, chain) == 40 * SEGMENT_BLOCKS


async def test_other_nodes_find_written_objects(service: S3Service) -> None:
    """A chain of three segments, another that branches in the second, and a longer one: each is read as far as it was
    written, by a node that knows only the bucket."""
    one, two = branched([80, 50])
    async with opened(service) as tier:
        await written(tier, one)
        await written(tier, two)
        assert await loaded(tier, one) == 80
    assert all(path.name.count("-") == 1 for path in service.objects())
    longer = [*one, *branched([5], 77)[0]]
    async with opened(service) as tier:
        assert await loaded(tier, one) == 0, "nobody asked"
        assert await found(tier, one) == 80
        assert await found(tier, two) == 50
        assert await found(tier, longer) == 80
        assert await loaded(tier, longer) == 80
        assert await loaded(tier, two) == 50
        assert tier.counts.loaded == 130
        assert tier.counts.corrupt == tier.counts.failed == 0
    async with opened(service) as tier:
        assert await found(tier, one, 70) == 10, "the pool has the head"
        assert await loaded(tier, one[70:]) == 10
    async with opened(service, OTHER) as tier:
        assert await found(tier, one) == 0, "another model's node sees other objects"


async def test_blocks_pending_a_write_are_readable(service: S3Service) -> None:
    (blocks,) = branched([40])
    async with opened(service) as tier:
        service.trouble = "stall"
        assert await tier.store(blocks[::-1]) == []
        assert await loaded(tier, blocks) == 40
        service.trouble = ""
        service.hang_up()


@pytest.mark.parametrize("trouble", ["stall", "503", "cut"])
async def test_a_failing_service_only_loses_blocks(
    service: S3Service, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, others = branched([40]), branched([40], 500)
    async with opened(service) as tier:
        await written(tier, blocks[0])
    async with opened(service) as tier:
        assert await found(tier, blocks[0]) == 40
        service.trouble = trouble
        with monkeypatch.context() as patch:
            patch.setattr(object_store, "REQUEST_TIMEOUT_MS", 500)
            assert await loaded(tier, blocks[0]) < 40
        assert not tier.is_available()
        assert tier.room_bytes() == 0
        assert len(await tier.store(others[0])) == 40, "refused, and so forgotten"
        service.trouble = ""
        await until("the service to be asked again", tier.is_available)
        assert await loaded(tier, blocks[0]) == 40
        await written(tier, others[0])


async def test_a_write_that_fails_is_reported(service: S3Service) -> None:
    (blocks,) = branched([40])
    async with opened(service) as tier:
        service.trouble = "503"
        assert await tier.store(blocks) == []
        await until("the writes to fail", lambda: not any(name.hash in tier for name, _ in blocks))
        service.trouble = ""
        await until("the service to be asked again", tier.is_available)
        assert {name.hash for name in await tier.store([])} == {name.hash for name, _ in blocks}
        await written(tier, blocks)


async def test_damaged_objects_are_forgotten_and_written_again(service: S3Service) -> None:
    (blocks,) = branched([40])
    async with opened(service) as tier:
        await written(tier, blocks)
        service.trouble = "flip"
        assert await loaded(tier, blocks) < 40
        assert tier.counts.corrupt >= 1
        assert tier.is_available(), "the service did what it was asked"
        service.trouble = ""
        lost = [block for block in blocks if block[0].hash not in tier]
        assert lost
        await written(tier, blocks)
        assert await loaded(tier, blocks) == 40


async def test_objects_that_were_removed_or_replaced_are_missing(service: S3Service) -> None:
    (blocks,) = branched([70])
    async with opened(service) as tier:
        await written(tier, blocks)
        first, second = sorted(service.objects(), key=lambda path: blocks[0][0].segment.hex() not in str(path))[:2]
        second.write_bytes(first.read_bytes())
        assert await loaded(tier, blocks) == 32
        assert tier.counts.corrupt == 1
        first.unlink()

        async def missing() -> bool:
            return tier.is_available() and await loaded(tier, blocks) == 0 and await found(tier, blocks) == 0

        await until("the service to see that it is gone", missing)


async def test_an_object_of_another_size_is_not_read(service: S3Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may write to the bucket may put an object of any size under a run's name."""
    (chain,) = branched([3])
    async with opened(service) as tier:
        await written(tier, chain)
    (path,) = service.objects()
    with path.open("ab") as file:
        file.truncate(2**24)
    read: list[int] = []
    before = object_store.memoryview if hasattr(object_store, "memoryview") else memoryview
    monkeypatch.setattr(object_store, "memoryview", lambda data: read.append(len(data)) or before(data), raising=False)
    async with opened(service) as tier:
        assert await found(tier, chain) == 3
        assert await loaded(tier, chain) == 0
        assert (tier.counts.corrupt, tier.counts.failed) == (1, 0)
        assert await tier.load([chain[0][0].hash], [memoryview(bytearray(BLOCK_BYTES))]) == 0, "it is forgotten"
    assert read == []


async def test_lost_credentials_pause_the_tier(service: S3Service, monkeypatch: pytest.MonkeyPatch) -> None:
    (blocks,) = branched([40])
    async with opened(service) as tier:
        await written(tier, blocks)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret")
    async with opened(service) as tier:
        assert await found(tier, blocks) == 0
        assert not tier.is_available()
        assert len(await tier.store(blocks)) == 40


async def test_concurrent_lookups_share_a_request_and_misses_are_cached(
    service: S3Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_tier, "ABSENT_MS", 1000 * WITHIN_S)
    (blocks,) = branched([20])
    async with opened(service) as tier:
        assert await asyncio.gather(*(found(tier, blocks) for _ in range(10))) == [0] * 10
        asked = service.requests
        assert await found(tier, blocks) == 0
        assert service.requests == asked <= 2
        await written(tier, blocks)
        assert await found(tier, blocks) == 20, "what the node wrote itself it knows"


async def test_a_cancelled_load_writes_to_no_slot_any_more(service: S3Service) -> None:
    (blocks,) = branched([40])
    async with opened(service) as tier:
        await written(tier, blocks)
        service.trouble = "stall"
        targets = [bytearray(BLOCK_BYTES) for _ in blocks]
        hashes = [name.hash for name, _ in blocks]
        load = asyncio.ensure_future(tier.load(hashes, [memoryview(one) for one in targets]))
        await until("a request", lambda: service.requests > 2)
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        service.trouble = ""
        assert not any(map(any, targets))
        assert await loaded(tier, blocks) == 40
