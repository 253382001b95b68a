"""Slot ledger: who owns which slot of a node's pool (I2, I3, I4). Sans-IO (I9); the node calls it.

    a slot      free --lease--> leased --commit--> committed --evict--> free
                  ^               |  |
                  +--return-------+  +--fence--> quarantined --end_epoch or drained--> free

    a holder    attached --silence--> fenced --end_epoch or drained--> (void)
                    +-----------------end_epoch----------------------> (void)

    a ticket    opened (chain pinned, rest reserved) --adopt, commit--> grows --last holder releases--> (void)

    a commit of a leased slot under a block hash (I2)
                new block              the slot is sealed and the ticket's pin moves to it
                page of a state        sealed after a block of the chain, with a separate pin
                committed by another   the first committer's slot stays and the pin moves to it; the loser's slot stays
                                       leased until its worker's block tables no longer use it, then it is freed
                by the same ticket     the same, but the ticket's pin is already on it

Guarantees, checked by :mod:`pillion.kvstore.ledger.integrity`: every slot is in exactly one state; blocks pinned by a
ticket are never evicted; the slots reserved for admitted prompts exist, except slots that losers of a commit race have
not returned yet. A slot leased from a ticket's reservation and returned unwritten is reserved again, so an admitted
prompt can always finish, whichever process dies meanwhile (I5)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from pillion.errors import Conflict, Internal, InvalidRequest, NotFound, Overloaded
from pillion.kvstore.hashing import HASH_BYTES, split_hashes, state_page
from pillion.kvstore.ledger.eviction import LruEviction
from pillion.kvstore.ledger.pin_table import PrefixPinTable
from pillion.kvstore.ledger.records import Block, IndexEvent
from pillion.kvstore.ledger.state_eviction import StateEviction
from pillion.kvstore.ledger.tree import BlockTree, Match
from pillion.v1.kvnode_pb2 import AdoptTicketReply, CommitRun, CommitRunResult, NodeStatus

NO_TICKET = 0
# In Holder.leased: a slot that lost a commit race. Freed, it returns to the pool, never to a reservation.
LOST_RACE = -1

# Roles of holders. FETCH is a fetch by this node, KEPT the blocks of its previous process until they are verified.
SESSION = "gateway"
PREFILL = "prefill"
DECODE = "decode"
FETCH = "fetch"
KEPT = "kept"


@dataclass(slots=True)
class Holder:
    """Owner of an epoch: a worker, a gateway's session, a fetch, or the blocks of the node's previous process.

    Attributes:
        leased: by leased slot, the ticket whose reservation it came from, NO_TICKET or LOST_RACE.
        seen_s: time of the holder's last call; None before the first, since a worker that is still loading must not be
            fenced for silence.
    """

    epoch: int
    name: str
    role: str
    fenced: bool = False
    seen_s: float | None = None
    leased: dict[int, int] = field(default_factory=dict)
    tickets: set[int] = field(default_factory=set)


@dataclass(slots=True)
class TicketState:
    """A ticket: one request's pinned chain and reserved slots.

    Attributes:
        opener: (epoch, nonce) of the call that opened the ticket.
        last_block: last block of the pinned chain, None if nothing is pinned.
        reserved: reserved slots that are not leased yet.
        holders: epochs that hold the ticket.
        slots: cache of the chain's slots; stale once the chain has grown.
        state: last page of the pinned state of ``state_pages`` pages; None without a state.
        flow_key: key of the request's flow (:class:`pillion.rules.priority.Flow`).
        asked_blocks: blocks that the request needed in total when the ticket was opened.
        known_blocks: in a model with states, number of blocks after which other prompts are expected to diverge, where
            the worker keeps a state: those present here or on another node at admission, or more if the pool remembers
            a later branch point.
    """

    ticket_id: int
    opener: tuple[int, int]
    last_block: Block | None
    reserved: int
    holders: set[int]
    slots: frozenset[int] = frozenset()
    state: Block | None = None
    state_pages: int = 0
    known_blocks: int = 0
    flow_key: bytes = b""
    asked_blocks: int = 0

    @property
    def blocks(self) -> int:
        """Number of blocks of the pinned chain."""
        return self.last_block.depth + 1 if self.last_block else 0


@dataclass(frozen=True, slots=True)
class PoolShares:
    """Shares of a pool that may be exempt from plain eviction, in percent.

    Attributes:
        pinned_percent, owner_pinned_percent: for prefix pins, in total and per owner.
        state_percent: for states of hybrid models that no running request uses.
    """

    pinned_percent: int = 50
    owner_pinned_percent: int = 25
    state_percent: int = 100


class Ledger:
    """Slots, holders and tickets of one pool. Every call is O(blocks that it reads or changes).

    Only the node's event loop calls it, and no call waits, so it has no lock. Mutating calls raise NotFound for an
    unknown epoch and Conflict for a fenced one. Attributes are read-only for callers.

    Args:
        new_id: returns unguessable positive integers below 2**63 for epochs and tickets.
        decode_reserve_percent: share of the pool that admission reserves for running decodes.
        shares: limits for pinned prefixes and states.
    """

    def __init__(
        self,
        new_id: Callable[[], int],
        decode_reserve_percent: int = 10,
        shares: PoolShares = PoolShares(),
    ) -> None:
        self._new_id = new_id
        self._reserve_percent = decode_reserve_percent
        self.num_slots = 0
        self.decode_reserve = 0
        self.free: list[int] = []
        plain = LruEviction()
        self.tree, self.states = BlockTree(plain), StateEviction(plain, shares.state_percent)
        self.prefix_pins = PrefixPinTable(self.tree, shares.pinned_percent, shares.owner_pinned_percent)
        self.holders: dict[int, Holder] = {}
        self.tickets: dict[int, TicketState] = {}
        self.by_opener: dict[tuple[int, int], TicketState] = {}
        self.reserved = 0
        self.evicted_ever = 0
        self.committed_ever = 0
        self._events: list[IndexEvent] = []

    def shape(self, num_slots: int) -> None:
        """Set the number of slots, once, when the first worker that attaches has set the block size."""
        if self.num_slots:
            raise Internal("the pool is already sized")
        self.num_slots = num_slots
        self.decode_reserve = num_slots * self._reserve_percent // 100
        self.free = list(range(num_slots - 1, -1, -1))
        self.prefix_pins.shape(num_slots)
        self.states.shape(num_slots)

    @property
    def available(self) -> int:
        """Number of slots that are free or evictable, i.e. neither leased, quarantined nor pinned."""
        return len(self.free) + self.tree.idle

    @property
    def unreserved(self) -> int:
        """Number of available slots that are not reserved."""
        return max(0, self.available - self.reserved)

    def status(self) -> NodeStatus:
        """Return a NodeStatus with the ledger's counts."""
        quarantined = sum(len(holder.leased) for holder in self.holders.values() if holder.fenced)
        held = sum(len(holder.leased) for holder in self.holders.values())
        fenced = {holder.name for holder in self.holders.values() if holder.fenced}
        # A restarted worker is not reported as fenced, even if its previous process may still be running.
        live_names = {holder.name for holder in self.holders.values() if not holder.fenced} if fenced else set()
        status = NodeStatus(
            total_blocks=self.num_slots,
            free_blocks=len(self.free),
            leased_blocks=held - quarantined,
            committed_blocks=len(self.tree),
            quarantined_blocks=quarantined,
            pinned_blocks=self.tree.protected,
            reserved_blocks=self.reserved,
            tickets=len(self.tickets),
            holders=len(self.holders),
            evicted_blocks=self.evicted_ever,
            committed_blocks_ever=self.committed_ever,
            fenced_components=sorted(fenced - live_names),
        )
        self.prefix_pins.describe(status)
        return status

    def drain_events(self) -> list[IndexEvent]:
        """Return the arrivals and evictions of blocks since the last call, in order."""
        events, self._events = self._events, []
        return events

    def hashes(self) -> Iterator[tuple[bytes, bytes]]:
        """Return (hash, segment) of every block that is committed now, parents before their children."""
        return ((block.hash, block.segment) for block in list(self.tree.by_hash.values()))

    def attach(self, name: str, role: str) -> int:
        """Create a holder and return its epoch."""
        epoch = self._new_id()
        self.holders[epoch] = Holder(epoch, name, role)
        return epoch

    def touch(self, epoch: int, now: float) -> Holder:
        """Record a heartbeat. Raises NotFound for an unknown or void epoch."""
        holder = self.holders.get(epoch)
        if holder is None:
            raise NotFound("the epoch is void: attach again")
        holder.seen_s = now
        return holder

    def restart_silence_timers(self, now: float) -> None:
        """Restart the silence timers of all holders, after a pause of the node itself."""
        for holder in self.holders.values():
            if holder.seen_s is not None:
                holder.seen_s = now

    def overdue(self, now: float, timeout_s: float) -> list[int]:
        """Return the epochs of unfenced workers that were silent for over ``timeout_s``. Gateways' sessions are exempt:
        they end with their gRPC streams."""
        return [
            holder.epoch
            for holder in self.holders.values()
            if holder.role != SESSION
            and not holder.fenced
            and holder.seen_s is not None
            and now - holder.seen_s > timeout_s
        ]

    def fence(self, epoch: int) -> None:
        """Revoke an epoch's right to make changes; its leases and pins stay until :meth:`end_epoch` or :meth:`drained`
        (I4)."""
        holder = self.holders.get(epoch)
        if holder is None:
            return
        holder.fenced = True
        for ticket_id in holder.tickets:
            self._drop_unused(self.tickets[ticket_id])

    def drained(self, epoch: int) -> None:
        """Free all slots and tickets of a fenced epoch, whose worker has no step in flight any more. Raises Conflict if
        it is not fenced."""
        if epoch in self.holders and not self.holders[epoch].fenced:
            raise Conflict("only a fenced epoch can be drained")
        self.end_epoch(epoch)

    def end_epoch(self, epoch: int) -> None:
        """Free all slots and tickets of an epoch, once its holder's end is proven. Idempotent."""
        holder = self.holders.pop(epoch, None)
        if holder is None:
            return
        self._free(holder, list(holder.leased))
        for ticket_id in list(holder.tickets):
            self._release(holder, self.tickets[ticket_id])

    def shortage(self, hashes: Sequence[bytes], total_blocks: int, state_pages: int = 0) -> int:
        """Return how many slots are missing to admit a prompt, 0 if it fits. The decode reserve stays free, unless no
        ticket exists: then a prompt is admitted if it fits in the pool (I5)."""
        return self._missing(self._match(hashes, state_pages), total_blocks)

    def _match(self, hashes: Sequence[bytes], state_pages: int) -> Match:
        return self.tree.longest_with_state(hashes, state_pages) if state_pages else self.tree.longest_prefix(hashes)

    def admit(
        self,
        epoch: int,
        nonce: int,
        hashes: Sequence[bytes],
        total_blocks: int,
        state_pages: int = 0,
        known_blocks: int = 0,
        flow_key: bytes = b"",
    ) -> TicketState | None:
        """Open a ticket: pin the committed prefix of ``hashes`` and reserve slots for the rest of ``total_blocks``.
        Return None, with nothing changed, if too few slots are available.

        In a model with states, ``state_pages`` is the number of pages per state: the prefix then ends before a state,
        which is pinned as well. ``known_blocks`` leading blocks of ``hashes`` are present on some node.
        """
        holder = self.active(epoch)
        # Fast path: the first waiter is retried after every change, so skip its look-up if even a full hit does not
        # fit.
        if self._missing(Match(None, len(hashes), 0), total_blocks):
            return None
        match = self._match(hashes, state_pages)
        if self._missing(match, total_blocks):
            return None
        known = match.known
        if state_pages:
            known = max(known, min(known_blocks, len(hashes)))
            known = self.states.on_admit(hashes, replace(match, known=known))
        self.tree.pin(match.last_block)
        self.tree.pin(match.state)
        if self.prefix_pins.all:
            self.prefix_pins.count_hits(hashes, match.blocks)
        ticket = self._opened(holder, nonce, match.last_block, total_blocks - match.blocks)
        ticket.state, ticket.state_pages = match.state, state_pages
        ticket.known_blocks = known
        ticket.flow_key, ticket.asked_blocks = flow_key, total_blocks
        return ticket

    def claims(self) -> Counter[bytes]:
        """Return the blocks claimed by each flow's tickets, by flow key: per ticket its requested blocks, or its
        chain's length if longer. O(tickets)."""
        claims: Counter[bytes] = Counter()
        for ticket in self.tickets.values():
            claims[ticket.flow_key] += max(ticket.asked_blocks, ticket.blocks)
        return claims

    def _opened(self, holder: Holder, nonce: int, last_block: Block | None, reserved: int) -> TicketState:
        ticket = TicketState(self._new_id(), (holder.epoch, nonce), last_block, reserved, {holder.epoch})
        self.tickets[ticket.ticket_id] = self.by_opener[ticket.opener] = ticket
        self.reserved += reserved
        holder.tickets.add(ticket.ticket_id)
        return ticket

    def _missing(self, match: Match, total_blocks: int) -> int:
        """Return the slots missing to pin ``match`` and reserve the rest of ``total_blocks``, with the decode reserve
        left free if any ticket exists."""
        floor = self.decode_reserve if self.tickets else 0
        left = self.available - self.reserved - match.newly_pinned - (total_blocks - match.blocks)
        return max(0, floor - left)

    def pin_chain(self, epoch: int, nonce: int, hashes: Sequence[bytes]) -> TicketState:
        """Open a ticket that pins a chain's committed prefix and reserves nothing. Raises InvalidRequest for a nonce in
        use."""
        holder = self.active(epoch)
        if (epoch, nonce) in self.by_opener:
            raise InvalidRequest("the nonce is in use")
        ticket = self._opened(holder, nonce, None, 0)
        return self.extend(epoch, ticket.ticket_id, hashes)

    def lease_some(self, epoch: int, ticket_id: int, blocks: int) -> tuple[int, ...]:
        """Lease up to ``blocks`` slots for a ticket's next blocks, reserved ones first, and make the epoch a holder.
        Raises NotFound for an unknown ticket."""
        ticket, holder = self.tickets.get(ticket_id), self.active(epoch)
        reserved = ticket.reserved if ticket is not None else 0
        leasable = min(reserved + self._leasable(holder), self.available)
        return self._adopt(epoch, ticket_id, min(blocks, leasable))[1]

    def extend(self, epoch: int, ticket_id: int, hashes: Sequence[bytes]) -> TicketState:
        """Move a ticket's pin along ``hashes``, the chain from its first block, to its last committed block; in a model
        with states, to the last block before a state, which is pinned as well.

        Each further block releases one reserved slot. Raises NotFound if the epoch does not hold the ticket,
        InvalidRequest if the ticket belongs to another chain.
        """
        ticket = self.held(epoch, ticket_id)
        if ticket.last_block is not None and (
            ticket.blocks > len(hashes) or hashes[ticket.blocks - 1] != ticket.last_block.hash
        ):
            raise InvalidRequest("the ticket belongs to another chain")
        if ticket.state_pages:
            self._extend_to_state(ticket, hashes)
            return ticket
        for block_hash in hashes[ticket.blocks :]:
            block = self.tree.by_hash.get(block_hash)
            if block is None or block.parent is not ticket.last_block:
                break
            # Pinning an idle block uses up an available slot: one that the ticket has reserved, or an unreserved one.
            if not (block.ref_count or ticket.reserved or self.unreserved):
                break
            self._move_pin(ticket, block)
            from_reservation = min(1, ticket.reserved)
            ticket.reserved -= from_reservation
            self.reserved -= from_reservation
        return ticket

    def _extend_to_state(self, ticket: TicketState, hashes: Sequence[bytes]) -> None:
        """Move a ticket's pin to the last block of its chain before a state, if there is a later one than now."""
        match = self.tree.longest_with_state(hashes, ticket.state_pages)
        from_reservation = min(match.blocks - ticket.blocks, ticket.reserved)
        if from_reservation <= 0:
            return
        # Pinning uses up match.newly_pinned slots; the remaining reservations must still be covered.
        if self.available - match.newly_pinned < self.reserved - from_reservation:
            return
        self.tree.pin(match.last_block)
        self.tree.pin(match.state)
        self._unpin(ticket)
        ticket.last_block, ticket.state = match.last_block, match.state
        ticket.reserved -= from_reservation
        self.reserved -= from_reservation

    def held(self, epoch: int, ticket_id: int) -> TicketState:
        """Return a ticket that an active epoch holds. Raises NotFound otherwise."""
        self.active(epoch)
        ticket = self.tickets.get(ticket_id)
        if ticket is None or epoch not in ticket.holders:
            raise NotFound("no such ticket: it was released, or the node restarted")
        return ticket

    def pinned_slots(self, epoch: int, ticket_id: int) -> frozenset[int]:
        """Return the slots of a ticket's chain, cached until it grows. Raises NotFound if the epoch does not hold the
        ticket."""
        ticket = self.held(epoch, ticket_id)
        if len(ticket.slots) != ticket.blocks:
            ticket.slots = frozenset(block.slot for block in self.tree.chain(ticket.last_block))
        return ticket.slots

    def chain_of(self, ticket: TicketState) -> AdoptTicketReply:
        """Return the slots of a ticket's chain, in order, and its last block's hash; ``leased_slots`` is empty. The
        pinned state's slots are included if the state follows the last block."""
        chain = [block.slot for block in self.tree.chain(ticket.last_block)]
        state = self.tree.state_after(ticket.last_block, ticket.state, ticket.state_pages)
        last_hash = ticket.last_block.hash if ticket.last_block else b""
        pages = [page.slot for page in state]
        known = ticket.known_blocks
        return AdoptTicketReply(chain_slots=chain, last_hash=last_hash, state_slots=pages, known_blocks=known)

    def release(self, epoch: int, ticket_ids: Iterable[int] = (), nonces: Iterable[int] = ()) -> None:
        """Remove an epoch from the holders of tickets, given by id or by the nonce that opened them. Idempotent.

        A caller that releases by nonce never got the call's answer, so the slots leased with it are freed."""
        holder = self.active(epoch)
        abandoned = [self.by_opener.get((epoch, nonce)) for nonce in nonces]
        for ticket_id in [ticket.ticket_id for ticket in abandoned if ticket is not None]:
            self._free(holder, [slot for slot, leased in holder.leased.items() if leased == ticket_id])
        for ticket in (*map(self.tickets.get, ticket_ids), *abandoned):
            if ticket is not None and epoch in ticket.holders:
                self._release(holder, ticket)

    def adopt(self, epoch: int, ticket_id: int, lease_blocks: int) -> AdoptTicketReply:
        """Make a worker a holder of a ticket and lease ``lease_blocks`` slots to it, reserved ones first.

        Raises NotFound for an unknown ticket, and Overloaded, with nothing changed, if too few slots are available
        beyond the reservation.
        """
        ticket, leased = self._adopt(epoch, ticket_id, lease_blocks)
        adopted = self.chain_of(ticket)
        adopted.leased_slots.extend(leased)
        return adopted

    def _adopt(self, epoch: int, ticket_id: int, lease_blocks: int) -> tuple[TicketState, tuple[int, ...]]:
        holder = self.active(epoch)
        ticket = self.tickets.get(ticket_id)
        if ticket is None:
            raise NotFound("no such ticket: it was released, or the node restarted")
        from_reservation = min(lease_blocks, ticket.reserved)
        extra = lease_blocks - from_reservation
        if extra > self._leasable(holder) or lease_blocks > self.available:
            raise Overloaded(
                f"{lease_blocks} blocks requested, {from_reservation} reserved, {self.unreserved} more available"
            )
        ticket.holders.add(epoch)
        holder.tickets.add(ticket_id)
        ticket.reserved -= from_reservation
        self.reserved -= from_reservation
        return ticket, (*self._lease(holder, from_reservation, ticket_id), *self._lease(holder, extra, NO_TICKET))

    def lease(self, epoch: int, blocks: int) -> tuple[int, ...]:
        """Lease up to ``blocks`` unreserved slots. Prefill and fetches cannot use the decode reserve (I5)."""
        holder = self.active(epoch)
        return self._lease(holder, min(blocks, self._leasable(holder)), NO_TICKET)

    def return_slots(self, epoch: int, slots: Iterable[int]) -> None:
        """Free leased slots. Raises InvalidRequest, with nothing changed, if a slot is not leased to the epoch."""
        holder, wanted = self.active(epoch), list(slots)
        if len(set(wanted)) != len(wanted) or not holder.leased.keys() >= set(wanted):
            raise InvalidRequest("a returned slot must be leased to the epoch that returns it, and be returned once")
        self._free(holder, wanted)

    def commit(self, epoch: int, runs: Iterable[CommitRun]) -> list[CommitRunResult]:
        """Commit runs of leased slots, in order. Each run is committed or refused as a whole."""
        holder = self.active(epoch)
        return [self._commit_run(holder, run) for run in runs]

    def evict_block(self, block: Block) -> None:
        """Evict an unprotected block without children before its slot is needed. Raises Internal for other blocks."""
        self.tree.drop(block)
        self.free.append(self._evicted(block))

    # Recovery of blocks that outlived the node's previous process
    # (:mod:`pillion.kvstore.pool_survival.surviving_blocks`).

    def claim(self, slots: Iterable[int]) -> int:
        """Lease these slots to a new holder of role KEPT; return its epoch. Raises Internal if a slot is not free.
        O(pool)."""
        wanted = dict.fromkeys(slots, NO_TICKET)
        if not wanted.keys() <= set(self.free):
            raise Internal("slots of kept blocks were allocated")
        epoch = self.attach("kept blocks", KEPT)
        self.free = [slot for slot in self.free if slot not in wanted]
        self.holders[epoch].leased.update(wanted)
        return epoch

    def restore(self, epoch: int, parent: Block | None, run: Sequence[tuple[int, bytes]]) -> list[Block]:
        """Commit leased slots that already contain their blocks' bytes: ``run`` has the (slot, hash) of each, a chain
        after ``parent``. No hash may be committed yet. Return the blocks, unpinned."""
        holder = self.active(epoch)
        last_block = parent
        self.tree.pin(last_block)
        blocks = []
        for slot, block_hash in run:
            del holder.leased[slot]
            last_block = self.tree.add(slot, block_hash, last_block, _is_page(block_hash, last_block))
            self._on_commit(last_block)
            blocks.append(last_block)
        self.tree.unpin(last_block)
        return blocks

    def active(self, epoch: int) -> Holder:
        """Return an epoch's holder. Raises NotFound for a void epoch, Conflict for a fenced one."""
        holder = self.holders.get(epoch)
        if holder is None:
            raise NotFound("the epoch is void: attach again")
        if holder.fenced:
            raise Conflict(f"{holder.name} was silent for too long and is fenced: drain, then attach again")
        return holder

    def _leasable(self, holder: Holder) -> int:
        return max(0, self.unreserved - (self.decode_reserve if holder.role in (PREFILL, FETCH) else 0))

    def _lease(self, holder: Holder, count: int, charge: int) -> tuple[int, ...]:
        slots = tuple(self.free.pop() if self.free else self._evicted(self.tree.evict()) for _ in range(count))
        holder.leased.update(dict.fromkeys(slots, charge))
        return slots

    def _on_commit(self, block: Block) -> None:
        self._events.append(IndexEvent(block.hash, here=True, segment=block.segment, parent=block.parent_hash))
        if block.page:
            self.tree.order_by(self.states)
            self.states.on_commit(block)
        self.prefix_pins.on_commit(block)

    def _evicted(self, block: Block) -> int:
        self.evicted_ever += 1
        self.prefix_pins.on_evict(block)
        self.states.on_evict(block)
        self._events.append(IndexEvent(block.hash, here=False, segment=block.segment))
        return block.slot

    def _free(self, holder: Holder, slots: list[int]) -> None:
        for slot in slots:
            ticket = self.tickets.get(holder.leased.pop(slot))
            self.free.append(slot)
            if ticket is not None and self._usable(ticket):
                ticket.reserved += 1
                self.reserved += 1

    def _release(self, holder: Holder, ticket: TicketState) -> None:
        ticket.holders.discard(holder.epoch)
        holder.tickets.discard(ticket.ticket_id)
        self._drop_unused(ticket)

    def _usable(self, ticket: TicketState) -> bool:
        """Return whether a holder may still lease slots from the ticket's reservation. A decode worker leases only
        while it adopts."""
        holders = [self.holders[epoch] for epoch in ticket.holders if epoch in self.holders]
        return any(not holder.fenced and holder.role != DECODE for holder in holders)

    def _drop_unused(self, ticket: TicketState) -> None:
        """Cancel the ticket's reservation if no holder can use it, and remove the ticket if it has no holder."""
        if not self._usable(ticket):
            self.reserved -= ticket.reserved
            ticket.reserved = 0
        if not ticket.holders:
            del self.tickets[ticket.ticket_id], self.by_opener[ticket.opener]
            self._unpin(ticket)

    def _unpin(self, ticket: TicketState) -> None:
        self.tree.unpin(ticket.last_block)
        self.tree.unpin(ticket.state)

    def _move_pin(self, ticket: TicketState, block: Block) -> None:
        """Move a ticket's pin to ``block``, a child of its chain's last block."""
        self.tree.pin(block)
        self.tree.unpin(ticket.last_block)
        ticket.last_block = block

    def _commit_run(self, holder: Holder, run: CommitRun) -> CommitRunResult:
        try:
            ticket, hashes = self._check_run(holder, run)
            parent = self._check_state(ticket, run.after, hashes) if run.after else None
            if parent is None:
                self._check_chain(ticket, hashes)
        except InvalidRequest as error:
            return CommitRunResult(refusal=error.message)
        if parent is not None:
            return CommitRunResult(slots=self._seal_state(holder, ticket, parent, run.slots, hashes))
        slots = [self._seal(holder, ticket, *pair) for pair in zip(run.slots, hashes, strict=True)]
        return CommitRunResult(slots=slots)

    def _check_run(self, holder: Holder, run: CommitRun) -> tuple[TicketState, list[bytes]]:
        ticket = self.tickets.get(run.ticket_id)
        if ticket is None or holder.epoch not in ticket.holders:
            raise InvalidRequest("the ticket is void, or not held by this epoch")
        hashes = split_hashes(run.block_hashes)
        if not hashes or len(hashes) != len(run.slots):
            raise InvalidRequest(f"{len(run.slots)} slots need as many hashes of {HASH_BYTES} bytes, and at least one")
        if len(set(hashes)) != len(hashes) or len(set(run.slots)) != len(run.slots):
            raise InvalidRequest("a slot or a hash occurs twice")
        if not holder.leased.keys() >= set(run.slots):
            raise InvalidRequest("a slot is not leased to this epoch")
        return ticket, hashes

    def _check_state(self, ticket: TicketState, after: bytes, hashes: list[bytes]) -> Block:
        """Return the block with the hash ``after``, which a state is to follow. Raises InvalidRequest unless the block
        is on the ticket's chain and ``hashes`` are those of the state's pages."""
        block = self.tree.by_hash.get(after)
        if block is None or not self.tree.on_chain(block, ticket.last_block):
            raise InvalidRequest("the state does not belong to the ticket's chain")
        if any(page != state_page(after, number) for number, page in enumerate(hashes)):
            raise InvalidRequest("a state page has the wrong hash")
        return block

    def _seal_state(
        self, holder: Holder, ticket: TicketState, parent: Block, slots: Iterable[int], hashes: list[bytes]
    ) -> list[int]:
        """Commit the pages of a state after the block ``parent``; return the slots that the pages have from now on. The
        ticket pins the new state instead of its previous one."""
        self.tree.pin(parent)
        # A scratch ticket, so that _seal appends pages to it and not to the request's chain.
        scratch = TicketState(ticket.ticket_id, ticket.opener, parent, 0, set())
        sealed = [self._seal(holder, scratch, *pair, page=True) for pair in zip(slots, hashes, strict=True)]
        previous, ticket.state, ticket.state_pages = ticket.state, scratch.last_block, len(hashes)
        self.tree.unpin(previous)
        return sealed

    def _check_chain(self, ticket: TicketState, hashes: list[bytes]) -> None:
        """Raise InvalidRequest unless a run fits the ticket's chain: first committed blocks, each the child of the
        previous, which are on the chain or continue it; then new blocks, which continue the chain's last block or
        committed blocks after it."""
        known = [block for block in map(self.tree.by_hash.get, hashes) if block is not None]
        if not known:
            return
        first, end = known[0], ticket.blocks - 1
        linked = all(child.parent is parent for parent, child in pairwise(known))
        if not linked or any(block.hash != block_hash for block, block_hash in zip(known, hashes, strict=False)):
            raise InvalidRequest("a block is already committed under another parent")
        if first.depth > end:
            continues = first.parent is ticket.last_block
        else:
            continues = self.tree.on_chain(known[: end - first.depth + 1][-1], ticket.last_block)
        if not continues or (len(known) < len(hashes) and known[-1].depth < end):
            raise InvalidRequest("the run does not continue the ticket's chain")

    def _seal(self, holder: Holder, ticket: TicketState, slot: int, block_hash: bytes, page: bool = False) -> int:
        """Commit one leased slot; return the slot that the block has from now on."""
        block = self.tree.by_hash.get(block_hash)
        if block is None:
            del holder.leased[slot]
            self.committed_ever += 1
            # Fetched runs do not say which blocks are pages of states.
            page = page or (holder.role == FETCH and _is_page(block_hash, ticket.last_block))
            ticket.last_block = block = self.tree.add(slot, block_hash, ticket.last_block, page)
            self._on_commit(block)
            return slot
        holder.leased[slot] = LOST_RACE
        if block.depth >= ticket.blocks:
            self._move_pin(ticket, block)
        return block.slot


def _is_page(block_hash: bytes, parent: Block | None) -> bool:
    """Return whether a block after ``parent`` is a page of a state: it follows a page, or has a first page's hash."""
    return parent is not None and (parent.page or block_hash == state_page(parent.hash, 0))
