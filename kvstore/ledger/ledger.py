"""The slot ledger: who owns which slot of a node's pool (I2, I3, I4). Sans-IO (I9); the node feeds it.

    a slot      free --lease--> leased --commit--> committed --evict--> free
                  ^               |  |
                  +--give back----+  +--fence--> quarantined --gone or drained--> free

    a holder    attached --silence--> fenced --gone or drained--> (void)
                    +-----------------gone----------------------> (void)

    a ticket    opened (tail pinned, rest reserved) --adopt, commit--> grows --last holder lets go--> (void)

Promises made here, which :mod:`pillion.kvstore.ledger.integrity` proves: every slot is in exactly one state; what a
ticket holds is
never evicted; the slots promised to admitted prompts exist, apart from those that losers of a commit race are about to
return. A slot leased from a ticket's reservation that comes back unwritten goes back to the reservation, so a prompt
once admitted can always finish, whoever dies on the way (I5).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from pillion.errors import Conflict, Internal, InvalidRequest, NotFound, Overloaded
from pillion.kvstore.ledger import commits, integrity
from pillion.kvstore.ledger.eviction import EvictionPolicy, LruEviction
from pillion.kvstore.ledger.records import FETCH, NO_TICKET, PREFILL, SESSION, Holder, IndexEvent, TicketState
from pillion.kvstore.ledger.tree import Block, BlockTree, Match
from pillion.wire.kvnode import Adopted, CommitResult, CommitRun, NodeStatus


class Ledger:
    """All calls are O(blocks they touch). Raises NotFound for an unknown epoch and Conflict for a fenced one.

    Args:
        new_id: gives unguessable positive integers below 2**63 for epochs and tickets.
        decode_reserve_percent: share of the pool that admission leaves to running decodes.
        policy: what is evicted first; LRU by default.
    """

    def __init__(
        self, new_id: Callable[[], int], decode_reserve_percent: int = 10, policy: EvictionPolicy | None = None
    ) -> None:
        self._new_id = new_id
        self._reserve_percent = decode_reserve_percent
        self.num_slots = 0
        self.decode_reserve = 0
        self.free: list[int] = []
        self.tree = BlockTree(policy if policy is not None else LruEviction())
        self.holders: dict[int, Holder] = {}
        self.tickets: dict[int, TicketState] = {}
        self.by_opener: dict[tuple[int, int], TicketState] = {}
        self.reserved = 0
        self.evicted_ever = 0
        self.committed_ever = 0
        self._events: list[IndexEvent] = []

    # -- shape and books

    def shape(self, num_slots: int) -> None:
        """Fixes the number of slots, once, when the first worker says how big a block is."""
        if self.num_slots:
            raise Internal("the pool has its shape already")
        self.num_slots = num_slots
        self.decode_reserve = num_slots * self._reserve_percent // 100
        self.free = list(range(num_slots - 1, -1, -1))

    @property
    def available(self) -> int:
        """Slots that are free or can be made free at once: all but leased, quarantined and protected ones."""
        return len(self.free) + len(self.tree.policy)

    @property
    def unpromised(self) -> int:
        """Available slots that no admitted prompt counts on."""
        return max(0, self.available - self.reserved)

    def books(self) -> NodeStatus:
        """The block counts of a NodeStatus; the node adds its name."""
        quarantined = sum(len(holder.leased) for holder in self.holders.values() if holder.fenced)
        held = sum(len(holder.leased) for holder in self.holders.values())
        return NodeStatus(
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
            fenced_components=tuple(sorted(holder.name for holder in self.holders.values() if holder.fenced)),
        )

    def drain_events(self) -> list[IndexEvent]:
        """What changed for the index since the last call, in order."""
        events, self._events = self._events, []
        return events

    def hashes(self) -> Iterator[tuple[bytes, bytes]]:
        """Every committed block as (hash, segment), parents before their children: a picture of now that may be read
        bit by bit later."""
        return ((block.hash, block.segment) for block in list(self.tree.by_hash.values()))

    def check_integrity(self) -> None:
        """Raises IntegrityError with everything that does not add up (I4)."""
        integrity.check(self)

    # -- holders

    def attach(self, name: str, role: str) -> int:
        """A new epoch for a worker or (role ``SESSION``) a gateway."""
        epoch = self._new_id()
        self.holders[epoch] = Holder(epoch, name, role)
        return epoch

    def seen(self, epoch: int, now: float) -> Holder:
        """Notes a sign of life. Raises NotFound for an epoch that this node never gave or that is void."""
        holder = self.holders.get(epoch)
        if holder is None:
            raise NotFound("the epoch is void: attach again")
        holder.seen_s = now
        return holder

    def forgive(self, now: float) -> None:
        """The node itself slept: nobody's silence counts from before ``now``."""
        for holder in self.holders.values():
            if holder.seen_s is not None:
                holder.seen_s = now

    def overdue(self, now: float, timeout_s: float) -> list[int]:
        """Workers silent for longer than ``timeout_s``, not fenced yet. Sessions end with their stream instead."""
        return [
            holder.epoch
            for holder in self.holders.values()
            if holder.role != SESSION
            and not holder.fenced
            and holder.seen_s is not None
            and now - holder.seen_s > timeout_s
        ]

    def fence(self, epoch: int) -> None:
        """Takes the right to change anything. Leases and pins stay until :meth:`gone` or :meth:`drained` (I4)."""
        holder = self.holders.get(epoch)
        if holder is None or holder.fenced:
            return
        holder.fenced = True
        for ticket_id in holder.tickets:
            self._settle(self.tickets[ticket_id])

    def drained(self, epoch: int) -> None:
        """A fenced worker woke and says that nothing of the epoch is in use any more."""
        if epoch in self.holders and not self.holders[epoch].fenced:
            raise Conflict("only a fenced epoch drains")
        self.gone(epoch)

    def gone(self, epoch: int) -> None:
        """The holder's death (or its session's end) is proven: everything it held is let go. Idempotent."""
        holder = self.holders.pop(epoch, None)
        if holder is None:
            return
        self._free(holder, list(holder.leased))
        for ticket_id in list(holder.tickets):
            self._let_go(holder, self.tickets[ticket_id])

    # -- tickets

    def shortage(self, hashes: Sequence[bytes], total_blocks: int) -> int:
        """Slots that are missing before a prompt may be admitted; 0 when it may. The decode reserve is left alone,
        unless nothing else is admitted: then the prompt gets in if it fits at all (I5)."""
        return self._missing(self.tree.longest_prefix(hashes), total_blocks)

    def admit(self, epoch: int, nonce: int, hashes: Sequence[bytes], total_blocks: int) -> TicketState | None:
        """Pins what is here of ``hashes`` and reserves the rest; None, with nothing changed, where memory is short."""
        holder = self.active(epoch)
        # The chain is walked only where it can matter: whoever waits for memory is asked after every change.
        if self._missing(Match(None, len(hashes), 0), total_blocks):
            return None
        match = self.tree.longest_prefix(hashes)
        if self._missing(match, total_blocks):
            return None
        if match.tail is not None:
            self.tree.pin(match.tail)
        return self._opened(holder, nonce, match.tail, total_blocks - match.blocks)

    def _opened(self, holder: Holder, nonce: int, tail: Block | None, reserved: int) -> TicketState:
        ticket = TicketState(self._new_id(), (holder.epoch, nonce), tail, reserved, {holder.epoch})
        self.tickets[ticket.ticket_id] = self.by_opener[ticket.opener] = ticket
        self.reserved += reserved
        holder.tickets.add(ticket.ticket_id)
        return ticket

    def _missing(self, match: Match, total_blocks: int) -> int:
        floor = self.decode_reserve if self.tickets else 0
        left = self.available - self.reserved - match.newly - (total_blocks - match.blocks)
        return max(0, floor - left)

    def pin_chain(self, epoch: int, nonce: int, hashes: Sequence[bytes]) -> TicketState:
        """A ticket that holds what is here of a chain and reserves nothing: for a reader. Raises InvalidRequest for a
        nonce that is in use."""
        holder = self.active(epoch)
        if (epoch, nonce) in self.by_opener:
            raise InvalidRequest("the nonce is in use")
        ticket = self._opened(holder, nonce, None, 0)
        return self.extend(epoch, ticket.ticket_id, hashes)

    def lend(self, epoch: int, ticket_id: int, blocks: int) -> tuple[int, ...]:
        """Leases up to ``blocks`` slots for a ticket's next blocks, reserved ones first; the epoch becomes a holder.

        Raises NotFound without such a ticket.
        """
        ticket, holder = self.tickets.get(ticket_id), self.active(epoch)
        promised = ticket.reserved if ticket is not None else 0
        most = min(promised + self._leasable(holder), self.available)
        return self.adopt(epoch, ticket_id, min(blocks, most)).leased_slots

    def extend(self, epoch: int, ticket_id: int, hashes: Sequence[bytes]) -> TicketState:
        """Moves a ticket's pin along ``hashes``, the chain from its first block, as far as blocks are here.

        A block that is found needs no slot any more, so one that was reserved for it is free to be promised again.
        Raises NotFound if the epoch holds no such ticket, InvalidRequest if the ticket is of another chain.
        """
        ticket = self.held(epoch, ticket_id)
        if ticket.tail is not None and (ticket.blocks > len(hashes) or hashes[ticket.blocks - 1] != ticket.tail.hash):
            raise InvalidRequest("the ticket is of another chain")
        for block_hash in hashes[ticket.blocks :]:
            block = self.tree.by_hash.get(block_hash)
            if block is None or block.parent is not ticket.tail:
                break
            if not (block.holds or ticket.reserved or self.unpromised):
                # Others were promised the slots of what nobody protects.
                break
            self.move_pin(ticket, block)
            promised = min(1, ticket.reserved)
            ticket.reserved -= promised
            self.reserved -= promised
        return ticket

    def held(self, epoch: int, ticket_id: int) -> TicketState:
        """A ticket that an active epoch holds. Raises NotFound where it does not."""
        self.active(epoch)
        ticket = self.tickets.get(ticket_id)
        if ticket is None or epoch not in ticket.holders:
            raise NotFound("no such ticket: it was released, or the node restarted")
        return ticket

    def chain_of(self, ticket: TicketState) -> Adopted:
        """The slots that a ticket pins, in order, and the hash of the last one's block."""
        chain = tuple(block.slot for block in self.tree.chain(ticket.tail))
        return Adopted(chain, (), ticket.tail.hash if ticket.tail else b"")

    def move_pin(self, ticket: TicketState, block: Block) -> None:
        """The ticket's chain ends with ``block``, a child of its tail, from now on."""
        self.tree.pin(block)
        if ticket.tail is not None:
            self.tree.unpin(ticket.tail)
        ticket.tail = block

    def release(self, epoch: int, ticket_ids: Iterable[int] = (), nonces: Iterable[int] = ()) -> None:
        """Drops the epoch's hold on tickets, named by id or by the nonce they were opened with. Idempotent."""
        holder = self.active(epoch)
        opened = (self.by_opener.get((epoch, nonce)) for nonce in nonces)
        for ticket in (*map(self.tickets.get, ticket_ids), *opened):
            if ticket is not None and epoch in ticket.holders:
                self._let_go(holder, ticket)

    def adopt(self, epoch: int, ticket_id: int, lease_blocks: int) -> Adopted:
        """Makes a worker a holder and leases to it, from the reservation first.

        Raises NotFound without such a ticket; Overloaded, with nothing changed, if there are not enough slots beyond
        the reservation.
        """
        holder = self.active(epoch)
        ticket = self.tickets.get(ticket_id)
        if ticket is None:
            raise NotFound("no such ticket: it was released, or the node restarted")
        promised = min(lease_blocks, ticket.reserved)
        extra = lease_blocks - promised
        if extra > self._leasable(holder) or lease_blocks > self.available:
            raise Overloaded(f"{lease_blocks} blocks wanted, {promised} reserved, {self.unpromised} more available")
        ticket.holders.add(epoch)
        holder.tickets.add(ticket_id)
        ticket.reserved -= promised
        self.reserved -= promised
        leased = (*self._take(holder, promised, ticket_id), *self._take(holder, extra, NO_TICKET))
        return replace(self.chain_of(ticket), leased_slots=leased)

    # -- slots

    def lease(self, epoch: int, blocks: int) -> tuple[int, ...]:
        """Up to ``blocks`` slots that no admitted prompt counts on; prefill leaves the decode reserve alone (I5)."""
        holder = self.active(epoch)
        return self._take(holder, min(blocks, self._leasable(holder)), NO_TICKET)

    def give_back(self, epoch: int, slots: Iterable[int]) -> None:
        """Frees leased slots. Raises InvalidRequest, with nothing changed, if one is not leased to the epoch."""
        holder, wanted = self.active(epoch), list(slots)
        if len(set(wanted)) != len(wanted) or not holder.leased.keys() >= set(wanted):
            raise InvalidRequest("a slot that is given back must be leased to the epoch that gives it, once")
        self._free(holder, wanted)

    def commit(self, epoch: int, runs: Iterable[CommitRun]) -> list[CommitResult]:
        """Seals runs in order; each succeeds or is refused as a whole. See :mod:`pillion.kvstore.ledger.commits` for
        the race.
        """
        holder = self.active(epoch)
        return [commits.commit_run(self, holder, run) for run in runs]

    def sealed(self, holder: Holder, slot: int, block_hash: bytes, ticket: TicketState) -> None:
        """A leased slot becomes a committed block, and the ticket's pin moves on to it."""
        del holder.leased[slot]
        self.committed_ever += 1
        ticket.tail = block = self.tree.add(slot, block_hash, ticket.tail)
        self._events.append(IndexEvent(block_hash, here=True, segment=block.segment))

    def evict_block(self, block: Block) -> None:
        """Frees the slot of a block that nobody protects and that has no children, ahead of need. Raises Internal for
        another."""
        self.tree.drop(block)
        self.free.append(self._evicted(block))

    # -- inside

    def active(self, epoch: int) -> Holder:
        """The holder that may change things. Raises NotFound for a void epoch, Conflict for a fenced one."""
        holder = self.holders.get(epoch)
        if holder is None:
            raise NotFound("the epoch is void: attach again")
        if holder.fenced:
            raise Conflict(f"{holder.name} was silent for too long and is fenced: drain, then attach again")
        return holder

    def _leasable(self, holder: Holder) -> int:
        return max(0, self.unpromised - (self.decode_reserve if holder.role in (PREFILL, FETCH) else 0))

    def _take(self, holder: Holder, count: int, charge: int) -> tuple[int, ...]:
        slots = tuple(self.free.pop() if self.free else self._evict() for _ in range(count))
        holder.leased.update(dict.fromkeys(slots, charge))
        return slots

    def _evict(self) -> int:
        return self._evicted(self.tree.evict())

    def _evicted(self, block: Block) -> int:
        self.evicted_ever += 1
        self._events.append(IndexEvent(block.hash, here=False, segment=block.segment))
        return block.slot

    def _free(self, holder: Holder, slots: list[int]) -> None:
        for slot in slots:
            ticket = self.tickets.get(holder.leased.pop(slot))
            self.free.append(slot)
            if ticket is not None and self._wanted(ticket):
                ticket.reserved += 1
                self.reserved += 1

    def _let_go(self, holder: Holder, ticket: TicketState) -> None:
        ticket.holders.discard(holder.epoch)
        holder.tickets.discard(ticket.ticket_id)
        self._settle(ticket)

    def _wanted(self, ticket: TicketState) -> bool:
        """Whether someone who may still lease holds it; a holder that is just going does not count."""
        return any(epoch in self.holders and not self.holders[epoch].fenced for epoch in ticket.holders)

    def _settle(self, ticket: TicketState) -> None:
        """A ticket that nobody can use reserves nothing; one that nobody holds is void."""
        if not self._wanted(ticket):
            self.reserved -= ticket.reserved
            ticket.reserved = 0
        if not ticket.holders:
            del self.tickets[ticket.ticket_id], self.by_opener[ticket.opener]
            if ticket.tail is not None:
                self.tree.unpin(ticket.tail)
