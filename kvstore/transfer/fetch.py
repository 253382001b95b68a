"""Fetches blocks of a prompt into this pool, from the node's lower tiers and from other nodes.

    fetch_blocks --> blocks present here are pinned to the ticket
       ^          |
       |          +-- another fetch has the next block in flight --> wait for that
       |          +-- a lower tier has it --> lease slots, load, commit
       |          +-- another node has it --> pin it there, lease slots, read, verify, commit
       |          +-- the bucket, asked once, has it --> as from a lower tier
       |          +-- no source, slots, time or bytes left --> the end, maybe short
       +----------+

Every fetch is a holder in the ledger with its own epoch. It leases slots from the ticket's reservation first, and
commits blocks as a worker does, pinned to the ticket. A failure means fewer blocks, never wrong ones (I1). For a ticket
that resumes from states, the pages of the state after the last block are fetched after the chain, under a separate
ticket of the fetch, and the caller's ticket then extends to the last state present. A read that outlives its fetch
keeps its slots until it has ended, because it may write to them; it holds no ticket, and counts as a fetch. A tier that
was late is skipped until it answers again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from pillion.errors import PillionError
from pillion.kvstore.exchange.peers import SourceNode
from pillion.kvstore.hashing import state_page
from pillion.kvstore.ledger.ledger import FETCH, Ledger
from pillion.kvstore.memory.memory import PoolMemory
from pillion.kvstore.tiers.object_tier.object_tier import ObjectTier
from pillion.kvstore.tiers.tiers import Tier, load_into
from pillion.tasks import at_most
from pillion.v1.kvnode_pb2 import CommitRun, NodeStatus, PrefetchReply
from pillion.v1.kvplane_pb2 import PinBlocksReply

log = logging.getLogger("pillion.kvnode")

# Bytes per read: enough to saturate the transport, and few enough that its blocks are soon usable.
BATCH_BYTES = 32 * 2**20
MAX_BATCH_BLOCKS = 512
# Concurrent fetches, including ended ones with pending reads. Above this limit, or once such late reads occupy this
# share of the pool, fetches return at once and their prompts are computed.
MAX_FETCHES = 64
MAX_LATE_PERCENT = 10
# Concurrent fetches ahead of need, and the share of the free slots that each may use.
MAX_FETCHES_AHEAD = 4
MAX_AHEAD_PERCENT = 50


@dataclass(slots=True)
class _Fetch:
    """State of one fetch. ``hashes`` begin with the chain's first block; ``until_s`` is on the loop's clock."""

    epoch: int
    caller: int
    ticket_id: int
    hashes: list[bytes]
    until_s: float
    left_blocks: int
    sources: list[SourceNode]
    pinned: PinBlocksReply | None = None
    pinned_from: int = 0
    brought: PrefetchReply = field(default_factory=PrefetchReply)
    ahead: bool = False
    bucket_asked: bool = False
    # Ticket of the caller, extended to the last state present, if the model has states; ``ticket_id`` is then the
    # fetch's own.
    extended_ticket: int = 0
    lingering: dict[asyncio.Future[Any], None] = field(default_factory=dict)


class Fetcher:
    """All fetches into one shaped pool. Only the node's loop calls it.

    Args:
        timeout_s, max_bytes: limits of one fetch; callers can only lower them.
        changed: called after every change in the ledger.
        source: returns a node by its id. Raises PillionErrors.
        tiers: the node's own lower tiers, fastest first.
        bucket: the bucket's tier, asked if neither ``tiers`` nor other nodes have the next block.
    """

    def __init__(
        self,
        ledger: Ledger,
        memory: PoolMemory,
        *,
        timeout_s: float,
        max_bytes: int,
        changed: Callable[[], None],
        source: Callable[[str], SourceNode],
        tiers: Sequence[Tier] = (),
        bucket: ObjectTier | None = None,
    ) -> None:
        self.counts = NodeStatus()
        self._ledger = ledger
        self._timeout_s = timeout_s
        self._memory = memory
        self._changed = changed
        self._source = source
        self._tiers = tiers
        self._bucket = bucket
        self._batch_blocks = min(max(1, BATCH_BYTES // memory.block_bytes), MAX_BATCH_BLOCKS)
        self._max_blocks = max(1, max_bytes // memory.block_bytes)
        # Blocks in flight; other fetches of the same block wait for its event.
        self._in_flight: dict[bytes, asyncio.Event] = {}
        self._fetches = self._ahead = 0
        # Reads that outlived their fetch, with the number of slots that they occupy.
        self._late_reads: dict[asyncio.Future[Any], int] = {}

    @property
    def late_blocks(self) -> int:
        """Number of slots occupied by reads that outlived their fetch."""
        return sum(self._late_reads.values())

    async def fetch_blocks(
        self,
        epoch: int,
        ticket_id: int,
        hashes: list[bytes],
        sources: Sequence[str] = (),
        *,
        timeout_s: float = 0.0,
        max_bytes: int = 0,
        far: bool = True,
        ahead: bool = False,
    ) -> PrefetchReply:
        """Fetch as many blocks of a chain into the pool as possible, under a ticket of ``epoch``.

        Args:
            hashes: the chain from its first block.
            sources: ids of nodes that may have its blocks, in the order of asking.
            timeout_s, max_bytes: limits; 0: this node's own.
            far: whether to ask the bucket.
            ahead: fetch ahead of need, which only uses free slots.

        Raises NotFound if the epoch does not have the ticket, InvalidRequest for a ticket of another chain.
        """
        ticket = self._ledger.extend(epoch, ticket_id, hashes)
        blocks = ticket.blocks
        self._changed()
        if blocks >= len(hashes) or self._full() or (ahead and self._ahead >= MAX_FETCHES_AHEAD):
            return PrefetchReply(blocks=blocks)
        limit_s = min(timeout_s, self._timeout_s) if timeout_s > 0 else self._timeout_s
        limit_blocks = min(max_bytes // self._memory.block_bytes, self._max_blocks) if max_bytes else self._max_blocks
        if ahead:
            limit_blocks = min(limit_blocks, len(self._ledger.free) * MAX_AHEAD_PERCENT // 100)
        fetch = _Fetch(
            epoch=self._ledger.attach("fetch", FETCH),
            caller=epoch,
            ticket_id=ticket_id,
            hashes=hashes,
            until_s=asyncio.get_running_loop().time() + limit_s,
            left_blocks=limit_blocks,
            sources=self._open_sources(sources),
            ahead=ahead,
            bucket_asked=not far,
        )
        if ticket.state_pages:
            self._append_state(fetch, ticket.state_pages)
        self._fetches += 1
        self._ahead += ahead
        try:
            blocks = await self._fetch_all(fetch)
            if fetch.extended_ticket:
                blocks = self._ledger.extend(epoch, ticket_id, hashes).blocks
        finally:
            self._fetches -= 1
            self._ahead -= ahead
            self._end(fetch)
        self.counts.short_fetches += blocks < len(hashes)
        fetch.brought.blocks = blocks
        return fetch.brought

    async def close(self) -> None:
        """Wait for pending reads, after the last fetch."""
        await asyncio.gather(*self._late_reads, return_exceptions=True)

    def _append_state(self, fetch: _Fetch, pages: int) -> None:
        """Append the pages of the state after the last block to a fetch, under a separate ticket that reserves no
        slots."""
        fetch.extended_ticket, fetch.caller = fetch.ticket_id, fetch.epoch
        fetch.hashes = [*fetch.hashes, *(state_page(fetch.hashes[-1], page) for page in range(pages))]
        fetch.ticket_id = self._ledger.pin_chain(fetch.epoch, 0, fetch.hashes).ticket_id

    async def _fetch_all(self, fetch: _Fetch) -> int:
        loop = asyncio.get_running_loop()
        while True:
            ticket = self._ledger.extend(fetch.caller, fetch.ticket_id, fetch.hashes)
            self._changed()
            at, left_s = ticket.blocks, fetch.until_s - loop.time()
            if at >= len(fetch.hashes) or left_s <= 0 or fetch.left_blocks <= 0:
                return at
            in_flight = self._in_flight.get(fetch.hashes[at])
            if in_flight is not None:
                await at_most(left_s, in_flight.wait())
                continue
            if not await self._fetch_batch(fetch, at):
                return self._ledger.extend(fetch.caller, fetch.ticket_id, fetch.hashes).blocks

    async def _fetch_batch(self, fetch: _Fetch, at: int) -> bool:
        """Fetch the blocks from index ``at`` on from the first source that has some; return False if no source has any,
        or no slot is left."""
        hit = self._in_tiers(self._tiers, self._next_batch(fetch, at))
        if hit is not None:
            count = await self._from_tier(fetch, *hit)
            fetch.brought.restored_blocks += count
            self.counts.restored_blocks += count
            return count > 0
        while fetch.sources:
            begun_s = asyncio.get_running_loop().time()
            left_s = fetch.until_s - begun_s
            if left_s <= 0:
                return False
            pinned = await self._pin(fetch, at, left_s)
            fetch.brought.fetched_ms += self._asked_ms(fetch, begun_s, pinned is not None)
            if pinned is None:
                self._drop_source(fetch)
                continue
            wanted = self._next_batch(fetch, at)
            if not wanted:
                return True
            first = at - fetch.pinned_from
            remote = tuple(pinned.slots[first : first + len(wanted)])
            slots = self._lease(fetch, len(remote))
            if not slots:
                return False
            sums = pinned.checksums[first : first + len(slots)]
            came = await self._from_source(fetch, wanted[: len(slots)], remote[: len(slots)], slots, sums)
            if came < len(slots):
                self._drop_source(fetch)
            if came:
                return True
        return await self._fetch_from_bucket(fetch, at)

    async def _fetch_from_bucket(self, fetch: _Fetch, at: int) -> bool:
        """Fetch the blocks from index ``at`` on from the bucket; return False if it has none, or no slot is left."""
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        if not fetch.bucket_asked:
            fetch.bucket_asked = True
            await self._ask_bucket(fetch.hashes, at, fetch.until_s - begun_s)
        wanted = self._next_batch(fetch, at)
        hit = self._in_tiers([] if self._bucket is None else [self._bucket], wanted)
        count = await self._from_tier(fetch, *hit) if hit is not None else 0
        fetch.brought.bucket_blocks += count
        self.counts.bucket_blocks += count
        if self._bucket is not None:
            fetch.brought.bucket_ms += self._asked_ms(fetch, begun_s, hit is not None)
        return count > 0 if hit is not None else not wanted

    @staticmethod
    def _asked_ms(fetch: _Fetch, begun_s: float, had_some: bool) -> float:
        """Return the milliseconds since ``begun_s`` if the source had some blocks, or did not answer before the fetch
        ended; else 0, since a quick negative answer is no measure of its speed."""
        now = asyncio.get_running_loop().time()
        return (now - begun_s) * 1000 if had_some or now >= fetch.until_s else 0.0

    async def reach(self, hashes: Sequence[bytes], first: int, timeout_s: float, *, states: bool = False) -> int:
        """Return how many blocks of a chain from index ``first`` on the lower tiers probably have, after asking the
        bucket. If a tier has block ``first``, the tiers are assumed to have all blocks up to the last one found, since
        blocks are stored with those before them; missing ones are computed (I1). With ``states``, only blocks followed
        by a state count as the last one; the state is recognized by its first page, since pages are written in
        order."""
        await self._ask_bucket(hashes, first, timeout_s, roughly=True, states=states)
        tiers = [tier for tier in (*self._tiers, self._bucket) if tier is not None and tier.is_available()]

        def present(block_hash: bytes) -> bool:
            return any(block_hash in tier for tier in tiers)

        chain = hashes[first:]
        if not chain or not present(chain[0]):
            return 0
        ends = (state_page(block_hash, 0) if states else block_hash for block_hash in reversed(chain))
        return next((len(chain) - skipped for skipped, end in enumerate(ends) if present(end)), 0)

    async def _ask_bucket(
        self,
        hashes: Sequence[bytes],
        first: int,
        timeout_s: float,
        *,
        roughly: bool = False,
        states: bool = False,
    ) -> None:
        if self._bucket is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, timeout_s)):
                    await self._bucket.find(hashes, first, roughly=roughly, states=states)

    @staticmethod
    def _in_tiers(tiers: Sequence[Tier], wanted: list[bytes]) -> tuple[Tier, list[bytes]] | None:
        """Return the first tier that has the first of the ``wanted`` blocks, and the leading ones that it has."""
        for tier in tiers:
            present = list(takewhile(tier.__contains__, wanted)) if tier.is_available() else []
            if present:
                return tier, present
        return None

    async def _from_tier(self, fetch: _Fetch, tier: Tier, hashes: list[bytes]) -> int:
        """Load blocks from a tier, as many as slots can be leased for; return how many were committed."""
        slots = self._lease(fetch, len(hashes))
        hashes = hashes[: len(slots)]
        if not slots:
            return 0
        with self._marked_in_flight(hashes):
            # Not awaited directly: a cancel must not end the load while threads write to the slots.
            loading = asyncio.ensure_future(load_into(self._memory, tier, hashes, slots))
            came = await self._finish(fetch, loading, len(slots))
            return self._commit(fetch, hashes, slots, loading.result() if came else 0)

    async def _from_source(
        self, fetch: _Fetch, hashes: list[bytes], remote: tuple[int, ...], slots: tuple[int, ...], sums: Sequence[int]
    ) -> int:
        """Read blocks into ``slots`` from slots ``remote`` of the first source, verify them by their checksums
        ``sums``, and commit the intact ones; return how many were committed."""
        source, pinned = fetch.sources[0], fetch.pinned
        assert pinned is not None
        begun_s = asyncio.get_running_loop().time()
        with self._marked_in_flight(hashes):
            reading = asyncio.ensure_future(source.read(pinned.ticket_id, remote, slots))
            try:
                came = await self._finish(fetch, reading, len(slots))
                if came:
                    reading.result()
            except PillionError as error:
                log.warning("blocks from node %s did not arrive: %s", source.node_id, error.message)
                came = False
            good = await self._count_good(source, slots, sums) if came else 0
            count = self._commit(fetch, hashes, slots, good)
        fetch.brought.fetched_blocks += count
        fetch.brought.fetched_ms += (asyncio.get_running_loop().time() - begun_s) * 1000
        self.counts.fetched_blocks += count
        return count

    async def _finish(self, fetch: _Fetch, work: asyncio.Future[Any], blocks: int) -> bool:
        """Return whether ``work``, which writes to ``blocks`` slots, ended in time. If not, it goes on and occupies
        the slots until it ends."""
        left_s = max(0.0, fetch.until_s - asyncio.get_running_loop().time())
        try:
            done, _ = await asyncio.wait({work}, timeout=left_s)
        except asyncio.CancelledError:
            self._linger(fetch, work, blocks)
            raise
        if not done:
            self._linger(fetch, work, blocks)
        return bool(done)

    async def _count_good(self, source: SourceNode, slots: tuple[int, ...], sums: Sequence[int]) -> int:
        """Return how many leading slots match the checksums from the source."""
        computed = await self._memory.checksums(slots)
        good = 0
        for sent, actual in zip(sums, computed, strict=True):
            if sent not in (0, actual):
                self.counts.corrupt_blocks += 1
                log.warning("a block from node %s does not match its checksum; it is computed again", source.node_id)
                break
            good += 1
        return good

    def _lease(self, fetch: _Fetch, blocks: int) -> tuple[int, ...]:
        """Lease slots for the next blocks; none if memory is short or the caller released its ticket (I8)."""
        if fetch.extended_ticket and fetch.extended_ticket not in self._ledger.tickets:
            return ()
        if fetch.ahead:
            blocks = min(blocks, len(self._ledger.free), max(0, fetch.left_blocks))
        slots = self._ledger.lease_some(fetch.epoch, fetch.ticket_id, blocks)
        fetch.left_blocks -= len(slots)
        self._changed()
        return slots

    def _commit(self, fetch: _Fetch, hashes: list[bytes], slots: tuple[int, ...], good: int) -> int:
        """Commit the first ``good`` slots, and return the other slots to the pool unless a pending read may write to
        them. Return the number of committed blocks."""
        ledger, count = self._ledger, 0
        back: list[int] = [] if fetch.lingering else list(slots[good:])
        if good:
            run = CommitRun(ticket_id=fetch.ticket_id, slots=slots[:good], block_hashes=b"".join(hashes[:good]))
            (result,) = ledger.commit(fetch.epoch, [run])
            # After a refusal or a lost race, return the own slots at once, since no step reads them.
            back += [slot for slot, stays in zip(slots, result.slots or (-1,) * good, strict=False) if slot != stays]
            count = len(result.slots)
            if result.refusal:
                log.warning("fetched blocks were refused: %s", result.refusal)
        ledger.return_slots(fetch.epoch, back)
        self._changed()
        return count

    def _end(self, fetch: _Fetch) -> None:
        """End a fetch: release its tickets, here and at the sources, and its slots once no read writes to them."""
        self._drop_source(fetch)
        self._ledger.release(fetch.epoch, [fetch.ticket_id])

        def end_if_done(_: object = None) -> None:
            if all(work.done() for work in fetch.lingering):
                self._ledger.end_epoch(fetch.epoch)
                self._changed()

        end_if_done()
        for work in fetch.lingering:
            work.add_done_callback(end_if_done)

    def _open_sources(self, names: Sequence[str]) -> list[SourceNode]:
        """Return the nodes with these ids that can be sources now."""
        sources = []
        for name in dict.fromkeys(names):
            try:
                sources.append(self._source(name))
            except PillionError as error:
                log.debug("no blocks from node %s: %s", name, error.message)
        return sources

    async def _pin(self, fetch: _Fetch, at: int, left_s: float) -> PinBlocksReply | None:
        """Pin the first source's blocks from ``at`` on; return None if it has none or does not answer."""
        if fetch.pinned is None:
            try:
                # Ask for no more blocks than this fetch may read: the source checksums all that it pins.
                packed = b"".join(fetch.hashes[: at + fetch.left_blocks])
                fetch.pinned = await fetch.sources[0].pin(packed, at, timeout_s=left_s)
                fetch.pinned_from = at
            except PillionError as error:
                log.debug("node %s pins nothing: %s", fetch.sources[0].node_id, error.message)
                return None
        return fetch.pinned if at - fetch.pinned_from < len(fetch.pinned.slots) else None

    def _drop_source(self, fetch: _Fetch) -> None:
        """Drop the first source, which has no further block or has failed. Its pins are released once nothing reads
        them."""
        if not fetch.sources:
            return
        source, pinned = fetch.sources.pop(0), fetch.pinned
        fetch.pinned = None
        if pinned is None:
            return
        for work in fetch.lingering:
            work.add_done_callback(lambda _: source.release(pinned.ticket_id))
        if not fetch.lingering:
            source.release(pinned.ticket_id)

    def _full(self) -> bool:
        """Return whether no further fetch may start."""
        late_percent = self.late_blocks * 100 // max(1, self._ledger.num_slots)
        return self._fetches + len(self._late_reads) >= MAX_FETCHES or late_percent >= MAX_LATE_PERCENT

    def _linger(self, fetch: _Fetch, work: asyncio.Future[Any], blocks: int) -> None:
        """Cancel a late read, which still occupies ``blocks`` slots until it ends."""
        # It ends soon after the cancel, but not before its last write to the slots.
        work.cancel()
        fetch.lingering[work] = None
        self._late_reads[work] = blocks
        work.add_done_callback(lambda done: self._late_reads.pop(done, None))
        work.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _next_batch(self, fetch: _Fetch, at: int) -> list[bytes]:
        """Return the hashes of the next batch, from index ``at`` on, up to a block that another fetch has in flight."""
        batch = fetch.hashes[at : at + min(self._batch_blocks, fetch.left_blocks)]
        return list(takewhile(lambda block_hash: block_hash not in self._in_flight, batch))

    @contextlib.contextmanager
    def _marked_in_flight(self, hashes: list[bytes]) -> Iterator[None]:
        """Make other fetches wait for the blocks of ``hashes`` while the context is open."""
        done = asyncio.Event()
        self._in_flight.update(dict.fromkeys(hashes, done))
        try:
            yield
        finally:
            for block_hash in dict.fromkeys(hashes):
                del self._in_flight[block_hash]
            done.set()
