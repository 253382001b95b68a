"""A KV node's pool: its slot ledger and waiting queue, with the clock and asynchronous callers.

Every call that changes slots, tickets or blocks ends with :meth:`Pool.changed`, which admits waiters that fit now and
updates the index. Everything runs on one event loop, and no change awaits anything halfway, so there is no lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence

from pillion.errors import Cancelled, Conflict, InvalidRequest, NotFound, Overloaded
from pillion.kvstore.events.followers import Followers
from pillion.kvstore.hashing import SEGMENT_BLOCKS, split_hashes, state_page
from pillion.kvstore.ledger.integrity import check_integrity
from pillion.kvstore.ledger.ledger import FETCH, KEPT, SESSION, Ledger
from pillion.kvstore.ledger.records import Block, IndexEvent, PoolShape, slots_of
from pillion.kvstore.ledger.waiting_queue import MAX_WAITING, Grant, Waiter, WaitingQueue
from pillion.kvstore.pool_survival.survival import PoolSurvival
from pillion.kvstore.tiers.spill import Spiller
from pillion.kvstore.transfer.fetch import Fetcher
from pillion.observability import metric_catalog as names
from pillion.observability.metrics import Meters
from pillion.rules.priority import MAX_FLOW_KEY_BYTES, bounded, bounded_flow
from pillion.v1.kvnode_pb2 import (
    AdoptTicketReply,
    CommitRun,
    CommitRunResult,
    FindBlocksReply,
    FindBlocksRequest,
    HeartbeatReply,
    NodeStatus,
    OpenTicketReply,
    OpenTicketRequest,
    PrefetchReply,
    PrefetchRequest,
)
from pillion.wire.attach import AttachHello

log = logging.getLogger("pillion.kvnode")

MAX_HOLDERS = 4096
MAX_SOURCES = 64
# Max calls that wait for a ticket's chain to grow, over all workers.
MAX_CHAIN_WAITS = 4096


class Pool:
    """The slots, tickets and blocks of a node, and the calls on them.

    Calls raise NotFound for a void epoch, and Conflict for a fenced one if they would change anything. A call by a
    worker or a gateway counts as a heartbeat.

    Args:
        followers: streams of the pool's changes.
        max_waiting: limit of the :class:`WaitingQueue`.
        heartbeat_timeout_s: silence after which a worker is fenced.
        announce: called with new and evicted blocks after each change.
        shaped: called once with the pool's shape.

    Attributes:
        pool_bytes: memory to divide into slots when the first worker sets the block size; may change until then.
        fetcher, spiller: set once the pool has memory.
        survival: makes the blocks of a pool that outlives its node recoverable, else None; set with the pool's shape.
        meters: durations of tickets and fetches; the node adds its counts.
        served_blocks: number of blocks pinned for other nodes to read.
        chain_waits: calls that wait for a chain to grow.
    """

    def __init__(
        self,
        ledger: Ledger,
        followers: Followers,
        *,
        max_waiting: int = MAX_WAITING,
        heartbeat_timeout_s: float,
        announce: Callable[[list[IndexEvent]], None],
        shaped: Callable[[PoolShape], None],
    ) -> None:
        self.ledger, self.followers = ledger, followers
        self.fetcher: Fetcher | None = None
        self.spiller: Spiller | None = None
        self.survival: PoolSurvival | None = None
        self.meters = Meters()
        self._ticket_wait = self.meters.distribution(names.KV_TICKET_WAIT)
        self._fetch_time = self.meters.distribution(names.KV_FETCH_TIME)
        self.served_blocks = 0
        self.pool_bytes = 0
        self._shaped = shaped
        self._namespace = ""
        self._timeout_s = heartbeat_timeout_s
        self._announce = announce
        self._block_bytes = 0
        self._checked_s = time.monotonic()
        self._waiting: dict[tuple[int, int], asyncio.Future[Grant]] = {}
        # By ticket id: of each waiting call, the epoch, the awaited length, and the future that wakes it.
        self._chain_waits: dict[int, list[tuple[int, int, asyncio.Future[None]]]] = {}
        self.chain_waits = 0
        # For workers with a new epoch, by the first epoch of the attachment: (previous epoch, current epoch).
        self._replaced: dict[int, tuple[int, int]] = {}
        self.waiting = WaitingQueue(self.ledger, max_waiting)

    @property
    def shaped(self) -> bool:
        """True once a worker has attached."""
        return self._block_bytes > 0

    def attach(self, hello: AttachHello) -> tuple[int, int]:
        """Create an epoch for a worker; return it and the number of slots. The first worker sets the pool's shape.
        Raises Conflict for another block size or namespace, InvalidRequest for a block that does not fit."""
        if hello.block_bytes <= 0:
            raise InvalidRequest("a block needs at least one byte")
        if self._block_bytes and hello.block_bytes != self._block_bytes:
            raise Conflict(
                f"this pool's blocks have {self._block_bytes} bytes, the worker's {hello.block_bytes}: all workers of "
                "one node must agree on model, dtype and --block-size; restart the node to change them"
            )
        if self._block_bytes and hello.namespace != self._namespace:
            raise Conflict(
                "this pool's blocks are of another model, dtype, layout or block size than the worker's: all workers "
                "of one node must agree on them; restart the node to change them"
            )
        if hello.block_bytes > self.pool_bytes:
            raise InvalidRequest(
                f"one block has {hello.block_bytes} bytes, the whole pool {self.pool_bytes}: raise --kv-pool-bytes"
            )
        self._bound_holders()
        if not self._block_bytes:
            num_slots = slots_of(self.pool_bytes, hello.block_bytes)
            self._shaped(PoolShape(num_slots, hello.block_bytes, hello.namespace))
            self._block_bytes, self._namespace = hello.block_bytes, hello.namespace
            self.ledger.shape(num_slots)
            self.followers.shaped(hello)
            if self.survival is not None:
                self.survival.begin()
            log.info("pool shaped: %d slots of %d bytes", num_slots, hello.block_bytes)
        return self.ledger.attach(hello.component_id, hello.role), self.ledger.num_slots

    def open_session(self, name: str) -> int:
        """Create an epoch for a gateway's session. Raises Overloaded above MAX_HOLDERS."""
        self._bound_holders()
        return self.ledger.attach(name, SESSION)

    def ended(self, epoch: int) -> None:
        """Free all slots and tickets of an epoch, once its worker's death or its session's end is proven.
        Idempotent."""
        _, epoch = self._replaced.pop(epoch, (0, epoch))
        self.ledger.end_epoch(epoch)
        self._dismiss(epoch, "the caller is gone")
        self.changed()

    def reattach(self, epoch: int) -> int:
        """End the epoch of a worker that has drained its steps; return a new one. The worker was fenced, or asks for it
        because a call's outcome is unknown. A repeated call returns the same epoch until that is used. Raises NotFound
        for a void epoch, Conflict for a session's."""
        if (unused := self._unused_replacement(epoch)) is not None:
            return unused
        old = self.ledger.holders.get(epoch)
        if old is None:
            raise NotFound("the epoch is void: attach again")
        if old.role in (SESSION, FETCH, KEPT):
            raise Conflict("only a worker can get a new epoch")
        if not old.fenced:
            self.fence(epoch)
        self.ledger.drained(epoch)
        fresh = self.ledger.attach(old.name, old.role)
        # When the attachment ends, its first epoch is reported.
        first = next((first for first, (_, last) in self._replaced.items() if last == epoch), epoch)
        self._replaced[first] = epoch, fresh
        log.info("%s drained and has a new epoch", old.name)
        self.changed()
        return fresh

    def _unused_replacement(self, epoch: int) -> int | None:
        """Return the epoch that replaced this one, if it is unused because the answer was lost; else None."""
        fresh = next((fresh for old, fresh in self._replaced.values() if old == epoch), None)
        holder = None if fresh is None else self.ledger.holders.get(fresh)
        unused = holder is not None and not (holder.fenced or holder.leased or holder.tickets)
        return fresh if unused else None

    def heartbeat(self, epoch: int) -> HeartbeatReply:
        """Record a heartbeat; return whether the epoch is fenced, and how many unused slots the worker should
        return."""
        holder = self.ledger.touch(epoch, time.monotonic())
        return HeartbeatReply(fenced=holder.fenced, recall_blocks=self.waiting.recall_blocks())

    def judge_silence(self, interval_s: float) -> bool:
        """Fence workers that were silent for too long; return whether any were. Called every ``interval_s``: after a
        much longer interval, this process itself was paused, so the silence timers restart."""
        now = time.monotonic()
        paused = now - self._checked_s > interval_s + self._timeout_s / 2
        self._checked_s = now
        if paused:
            self.ledger.restart_silence_timers(now)
        overdue = tuple(self.ledger.overdue(now, self._timeout_s))
        for epoch in overdue:
            log.warning("%s was silent for %.1f s: fenced", self.ledger.holders[epoch].name, self._timeout_s)
            self.fence(epoch)
        return bool(overdue)

    def fence(self, epoch: int) -> None:
        """Fence an epoch, given by itself or by its attachment's first epoch; its slots are quarantined."""
        _, epoch = self._replaced.get(epoch, (0, epoch))
        self.ledger.fence(epoch)
        self._dismiss(epoch, "the epoch is fenced")
        self.changed()

    async def open_ticket(self, request: OpenTicketRequest) -> OpenTicketReply:
        """Open a ticket; wait in the queue while too few slots are available.

        Without ``total_blocks``, pin the chain's present prefix at once and reserve nothing. With ``adopt``, the
        reserved slots are leased in the same call.

        A cancelled call leaves neither a waiter nor a ticket. If fewer than ``expected_blocks`` are present, the
        missing ones are removed from the index, and a call with ``adopt`` raises NotFound, since its caller would not
        use it.
        """
        now = time.monotonic()
        self.ledger.touch(request.epoch, now)
        hashes = tuple(split_hashes(request.block_hashes))
        if len(request.flow.key) > MAX_FLOW_KEY_BYTES:
            raise InvalidRequest(f"the flow's key has {len(request.flow.key)} bytes; at most {MAX_FLOW_KEY_BYTES}")
        if self.survival is not None:
            await self.survival.restore(hashes)
        # Queue entries are keyed by nonce.
        nonce = request.nonce or new_id()
        if request.adopt:
            self._touch_worker(request.epoch)
        if not request.total_blocks:
            return self._pin_present(request, nonce, hashes)
        waiter = Waiter(
            epoch=request.epoch,
            nonce=nonce,
            hashes=hashes,
            total_blocks=request.total_blocks,
            resume=request.resume,
            adopt=request.adopt,
            expected_blocks=request.expected_blocks,
            priority=bounded(request.priority),
            state_pages=request.state_pages,
            known_blocks=request.known_blocks,
            flow=bounded_flow(request.flow.key, request.flow.weight),
            asked_s=now,
        )
        grant = self.waiting.ask(waiter)
        if grant is None:
            grant = await self._wait(waiter)
        else:
            # The adoption may have evicted blocks.
            self.changed()
        self._ticket_wait.observe(time.monotonic() - now)
        if grant.pinned_blocks < request.expected_blocks:
            self._report_missing(request, grant, hashes)
        return OpenTicketReply(ticket_id=grant.ticket_id, pinned_blocks=grant.pinned_blocks, adopted=grant.adopted)

    def _pin_present(self, request: OpenTicketRequest, nonce: int, hashes: Sequence[bytes]) -> OpenTicketReply:
        ticket = self.ledger.pin_chain(request.epoch, nonce, hashes)
        self.changed()
        adopted = self.ledger.chain_of(ticket) if request.adopt else None
        return OpenTicketReply(ticket_id=ticket.ticket_id, pinned_blocks=ticket.blocks, adopted=adopted)

    def _report_missing(self, request: OpenTicketRequest, grant: Grant, hashes: Sequence[bytes]) -> None:
        """Remove absent blocks from the index. If the caller adopts, release the ticket and raise NotFound.

        The node does this and not the gateway, so that it is in order with the node's other updates, and cannot undo a
        concurrent commit.
        """
        present = grant.pinned_blocks
        expected = hashes[: request.expected_blocks]
        # The index also has a state's first page, after the state's block.
        chain = [*expected, state_page(expected[-1], 0)] if request.state_pages and expected else expected
        missing = [at for at in range(present, len(chain)) if chain[at] not in self.ledger.tree.by_hash]
        self._announce(
            [IndexEvent(chain[at], False, segment=chain[at // SEGMENT_BLOCKS * SEGMENT_BLOCKS]) for at in missing]
        )
        if request.adopt:
            self.ledger.release(request.epoch, [grant.ticket_id])
            self.changed()
            raise NotFound(f"{present} of {request.expected_blocks} blocks are here: plan again")

    async def prefetch(self, request: PrefetchRequest) -> PrefetchReply:
        """Fetch as much as possible of a ticket's chain into the pool."""
        epoch, ticket_id, began_s = request.epoch, request.ticket_id, time.monotonic()
        self.ledger.touch(epoch, began_s)
        hashes, sources = split_hashes(request.block_hashes), request.source_node_ids
        if self.survival is not None:
            await self.survival.restore(hashes)
        if self.fetcher is None:
            return PrefetchReply(blocks=self.ledger.extend(epoch, ticket_id, hashes).blocks)
        if len(sources) > MAX_SOURCES:
            raise InvalidRequest(f"{len(sources)} sources; at most {MAX_SOURCES}")
        try:
            timeout_s, max_bytes, ahead = request.timeout_ms / 1000, request.max_bytes, request.ahead
            return await self.fetcher.fetch_blocks(
                epoch, ticket_id, hashes, sources, timeout_s=timeout_s, max_bytes=max_bytes, ahead=ahead
            )
        finally:
            self._fetch_time.observe(time.monotonic() - began_s)
            self._chain_grown(ticket_id)

    async def find_blocks(self, request: FindBlocksRequest) -> FindBlocksReply:
        """Return how many blocks of a chain, from the first requested one on, lower tiers have, including shared ones.
        A tier that fails is ignored."""
        hashes, first = split_hashes(request.block_hashes), request.first_block
        if self.fetcher is None or first >= len(hashes):
            return FindBlocksReply()
        timeout_s, states = request.timeout_ms / 1000, request.state_pages > 0
        return FindBlocksReply(blocks=await self.fetcher.reach(hashes, first, timeout_s, states=states))

    async def pin_chain(
        self, epoch: int, nonce: int, hashes: list[bytes], first_block: int, timeout_s: float = 0.0
    ) -> tuple[int, list[Block]]:
        """Pin a chain for another node to read; return a ticket and its blocks from ``first_block`` on.

        Missing blocks are loaded from lower tiers first, as far as slots are available and within ``timeout_s`` (0:
        this node's limit). Returns (0, []) without a ticket if no block from ``first_block`` on is present then.
        """
        self.ledger.touch(epoch, time.monotonic())
        if self.survival is not None:
            await self.survival.restore(hashes)
        ticket = self.ledger.pin_chain(epoch, nonce, hashes)
        try:
            if self.fetcher is not None and ticket.blocks < len(hashes):
                # The other node reads shared tiers itself.
                await self.fetcher.fetch_blocks(epoch, ticket.ticket_id, hashes, timeout_s=timeout_s, far=False)
        except BaseException:
            with contextlib.suppress(NotFound, Conflict):
                self.ledger.release(epoch, [ticket.ticket_id])
            raise
        finally:
            self.changed()
        chain = self.ledger.tree.chain(ticket.last_block)[first_block:]
        if not chain:
            self.ledger.release(epoch, [ticket.ticket_id])
            self.changed()
            return 0, []
        self.served_blocks += len(chain)
        return ticket.ticket_id, chain

    def pinned_slots(self, epoch: int, ticket_id: int) -> frozenset[int]:
        """Return the slots of a ticket's chain. Raises NotFound if the epoch does not hold the ticket."""
        self.ledger.touch(epoch, time.monotonic())
        return self.ledger.pinned_slots(epoch, ticket_id)

    def release(self, epoch: int, ticket_ids: Sequence[int], nonces: Sequence[int]) -> None:
        """Remove an epoch from the holders of tickets, given by id or by the nonce of an OpenTicket call. A call that
        still waits is cancelled."""
        self.ledger.touch(epoch, time.monotonic())
        for nonce in nonces:
            if self.waiting.withdraw((epoch, nonce)):
                self._fail((epoch, nonce), "the caller no longer waits")
        self.ledger.release(epoch, ticket_ids, nonces)
        self.changed()

    def adopt(self, epoch: int, ticket_id: int, lease_blocks: int) -> AdoptTicketReply:
        self._touch_worker(epoch)
        adopted = self.ledger.adopt(epoch, ticket_id, lease_blocks)
        self.changed()
        return adopted

    async def await_chain(self, epoch: int, ticket_id: int, blocks: int, timeout_s: float) -> AdoptTicketReply:
        """Wait until a ticket's chain has ``blocks`` blocks, at most ``timeout_s``; return the chain, without leased
        slots. Raises NotFound if the epoch does not hold the ticket, Overloaded above MAX_CHAIN_WAITS, Cancelled if the
        epoch ends."""
        self._touch_worker(epoch)
        if self.ledger.held(epoch, ticket_id).blocks < blocks:
            await self._wait_for_chain(epoch, ticket_id, blocks, timeout_s)
        return self.ledger.chain_of(self.ledger.held(epoch, ticket_id))

    def lease(self, epoch: int, blocks: int) -> tuple[int, ...]:
        self._touch_worker(epoch)
        slots = self.ledger.lease(epoch, blocks)
        self.changed()
        return slots

    def return_slots(self, epoch: int, slots: Sequence[int]) -> None:
        self._touch_worker(epoch)
        self.ledger.return_slots(epoch, slots)
        self.changed()

    def commit(self, epoch: int, runs: Sequence[CommitRun]) -> list[CommitRunResult]:
        self._touch_worker(epoch)
        results = self.ledger.commit(epoch, runs)
        for run in runs:
            self._chain_grown(run.ticket_id)
        self.changed()
        return results

    def status(self) -> NodeStatus:
        """Return the pool's part of the node's status."""
        status = self.ledger.status()
        status.block_bytes = self._block_bytes
        status.waiting_tickets = len(self.waiting)
        status.served_blocks = self.served_blocks
        if self.survival is not None:
            self.survival.complete(status)
        return status

    def check_integrity(self) -> None:
        """Raise IntegrityError (a Conflict) on inconsistency."""
        check_integrity(self.ledger)
        self.waiting.check_integrity()
        self.followers.check_integrity()
        if self.survival is not None:
            self.survival.check_integrity()
        if len(self._waiting) != len(self.waiting):
            raise Conflict(f"{len(self._waiting)} calls wait, {len(self.waiting)} are in the queue")
        waits = sum(map(len, self._chain_waits.values()))
        if waits != self.chain_waits:
            raise Conflict(f"{waits} calls wait for chains, {self.chain_waits} are counted")

    async def _wait(self, waiter: Waiter) -> Grant:
        future: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        self._waiting[waiter.key] = future
        try:
            # With this waiter queued, another tenant's waiter may be first, and fit.
            self.changed()
            return await future
        except asyncio.CancelledError:
            self.waiting.withdraw(waiter.key)
            if future.done() and not future.cancelled() and future.exception() is None:
                # Granted and cancelled at the same time. If the epoch is void, the ticket is released already.
                with contextlib.suppress(NotFound, Conflict):
                    self.ledger.release(waiter.epoch, nonces=[waiter.nonce])
            raise
        finally:
            # Keep the future of a repeated call, which has the same nonce.
            if self._waiting.get(waiter.key) is future:
                del self._waiting[waiter.key]
            self.changed()

    async def _wait_for_chain(self, epoch: int, ticket_id: int, blocks: int, timeout_s: float) -> None:
        if self.chain_waits >= MAX_CHAIN_WAITS:
            raise Overloaded(f"{MAX_CHAIN_WAITS} calls wait for chains at this node already")
        wait = epoch, blocks, asyncio.get_running_loop().create_future()
        self._chain_waits.setdefault(ticket_id, []).append(wait)
        self.chain_waits += 1
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await wait[2]
        finally:
            self.chain_waits -= 1
            waits = self._chain_waits[ticket_id]
            waits.remove(wait)
            if not waits:
                del self._chain_waits[ticket_id]

    def _chain_grown(self, ticket_id: int) -> None:
        """Wake the calls that wait for at most the current length of a ticket's chain."""
        waits, ticket = self._chain_waits.get(ticket_id), self.ledger.tickets.get(ticket_id)
        for _, blocks, woken in waits or ():
            if ticket is not None and ticket.blocks >= blocks and not woken.done():
                woken.set_result(None)

    def _touch_worker(self, epoch: int) -> None:
        """Record a heartbeat of a worker. Raises InvalidRequest for other holders: they cannot write to slots, so they
        must not commit any, and hashes are not secret."""
        if self.ledger.touch(epoch, time.monotonic()).role in (SESSION, FETCH, KEPT):
            raise InvalidRequest("only a worker that has attached may do this")

    def changed(self) -> None:
        """Admit waiters that fit now and update the index. Called after every change in the ledger."""
        for grant in self.waiting.poll():
            future = self._waiting.pop(grant.key)
            if future.done():
                # The caller was cancelled and has not run since; when it runs, it calls this method again.
                self.ledger.release(grant.key[0], nonces=[grant.key[1]])
            else:
                future.set_result(grant)
        events = self.ledger.drain_events()
        if events:
            # Before any caller gets a freed slot.
            if self.survival is not None:
                self.survival.note(events)
            self.followers.note(events)
            self._announce(events)
        if self.spiller is not None and len(self.ledger.free) < self.spiller.low_slots:
            self.spiller.poke()

    def _dismiss(self, epoch: int, reason: str) -> None:
        """Cancel all waiting calls of an epoch."""
        for key in self.waiting.withdraw_epoch(epoch):
            self._fail(key, reason)
        for waits in self._chain_waits.values():
            for waiting, _, woken in waits:
                if waiting == epoch and not woken.done():
                    woken.set_exception(Cancelled(reason))

    def _fail(self, key: tuple[int, int], reason: str) -> None:
        """Cancel a waiting OpenTicket call."""
        future = self._waiting.pop(key)
        if not future.done():
            future.set_exception(Cancelled(reason))

    def _bound_holders(self) -> None:
        if len(self.ledger.holders) >= MAX_HOLDERS:
            raise Overloaded(f"{MAX_HOLDERS} workers and gateways use this node already")


def new_id() -> int:
    """Return an unguessable id, never 0."""
    return secrets.randbits(62) + 1
