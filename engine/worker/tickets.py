"""A worker's tickets: adopted from gateways, or opened for prompts without a prefill worker, for preempted streams and
for chains of draft models' KV.

    open, adopt --> adopted, chain awaited --> in use by a sequence --node confirms the release--> unused
                         +-----------------------+--> release_ticket: not needed -------------------^

Replies of the node carry slots that must not be lost. So a call whose reply may carry slots is never cancelled, except
the opening of a ticket, which the client makes the node undo. A call with an unknown outcome ends the worker's epoch:
waiting callers get Unavailable, and the node frees everything once the worker has drained or is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Unpack

from pillion.engine.scheduling.block_chain import AdoptedTicket
from pillion.engine.scheduling.scheduler import Scheduler
from pillion.engine.scheduling.step_plan import ChainOrder, ResumeOrder
from pillion.errors import DeadlineExceeded, NotFound, Overloaded, PillionError, Unavailable
from pillion.kvstore.client.node_client import NodeClient, TicketDemand
from pillion.rules.priority import NO_FLOW, Flow
from pillion.v1.kvnode_pb2 import AwaitChainReply

# Max wait for memory in the node's queue.
MEMORY_WAIT_S = 120.0
# Max wait for the next block of an awaited chain. A gateway ends the wait much sooner if the prefill worker falls
# silent.
CHAIN_STALL_TIMEOUT_S = 3600.0
# Max wait of a ticket's next use for the release of the previous one.
IN_USE_TIMEOUT_S = 1.0


class Tickets:
    """The tickets of one epoch. ``post_event`` schedules a call of a Scheduler method between two steps; ``on_lost`` is
    called with the error of a call that ends the epoch."""

    def __init__(
        self, node: NodeClient, epoch: int, *, post_event: Callable[..., None], on_lost: Callable[[PillionError], None]
    ) -> None:
        self._node = node
        self._epoch = epoch
        self._post_event: Callable[..., Any] = post_event
        self._on_lost = on_lost
        self._retired = False
        self._in_use: dict[int, asyncio.Event] = {}
        self._opening: dict[int, asyncio.Task[tuple[AdoptedTicket, bytes]]] = {}
        self._awaiting: dict[int, asyncio.Task[AwaitChainReply]] = {}

    async def adopt(
        self,
        ticket_id: int,
        end_block: int,
        *,
        start_block: int = 0,
        awaited_blocks: int = 0,
        first_lease_blocks: int = 1,
    ) -> tuple[AdoptedTicket, bytes]:
        """Adopt a ticket whose chain has at least ``start_block`` blocks, and lease slots for its blocks from the end
        of the chain to ``end_block``.

        The first call leases ``first_lease_blocks``; a second one follows only if these are too few. Blocks below
        ``awaited_blocks`` are committed by other workers: only later ones are leased, and :meth:`await_chain` must
        follow. Return the ticket and the hash of the chain's last block, empty without one. The ticket must be passed
        to a sequence or to :meth:`release_ticket`, so shield this call from cancellation.

        Raises:
            NotFound: the ticket does not exist, is in use here, or its chain is too short: plan again.
            Overloaded: the node has too few slots beyond the reservation.
            Unavailable: no reply, or the epoch ended; nothing is adopted.
        """
        await self._claim(ticket_id)
        try:
            lease_blocks = end_block - awaited_blocks if awaited_blocks else first_lease_blocks
            first = await self._node.adopt(self._epoch, ticket_id, lease_blocks)
            self._check_open()
        except PillionError as error:
            self.on_released((ticket_id,))
            raise self._to_caller_error(error) from None
        chain, leased, state = map(tuple, (first.chain_slots, first.leased_slots, first.state_slots))
        try:
            if len(chain) < start_block:
                raise NotFound(f"the ticket has {len(chain)} blocks, {start_block} are needed: plan again")
            missing = end_block - max(len(chain), awaited_blocks) - len(leased)
            if missing > 0:
                leased += tuple((await self._node.adopt(self._epoch, ticket_id, missing)).leased_slots)
                self._check_open()
        except PillionError as error:
            self.release_ticket(AdoptedTicket(ticket_id, chain, leased))
            raise self._to_caller_error(error) from None
        return AdoptedTicket(ticket_id, chain, leased, state, first.known_blocks), first.last_hash

    async def await_chain(self, seq_id: int, adopted: AdoptedTicket, blocks: int) -> tuple[AdoptedTicket, bytes]:
        """Wait until other workers have committed ``blocks`` blocks of the ticket's chain. Return the ticket with that
        chain, and the hash of its last block.

        Releases the ticket and raises NotFound if the chain does not grow for CHAIN_STALL_TIMEOUT_S or
        :meth:`stop_waiting` was called, Overloaded if too many calls wait at the node, Unavailable if the epoch ends.
        """
        try:
            chain = await self._wait_for_chain(seq_id, adopted.ticket_id, blocks, len(adopted.chain_slots))
        except PillionError as error:
            self.release_ticket(adopted)
            raise self._to_caller_error(error) from None
        except BaseException:
            self.release_ticket(adopted)
            raise
        grown = replace(adopted, chain_slots=tuple(chain.chain_slots), state_slots=tuple(chain.state_slots))
        return grown, chain.last_hash

    async def _wait_for_chain(self, seq_id: int, ticket_id: int, blocks: int, have_blocks: int) -> AwaitChainReply:
        """Return the chain once it has ``blocks`` blocks. The calls lease no slots, so they may be cancelled."""
        while True:
            waiting = asyncio.create_task(
                self._node.await_chain(self._epoch, ticket_id, blocks, timeout_s=CHAIN_STALL_TIMEOUT_S)
            )
            self._awaiting[seq_id] = waiting
            try:
                chain = await waiting
            except asyncio.CancelledError:
                self._check_open()
                raise NotFound("the wait for the ticket's chain was cancelled") from None
            finally:
                del self._awaiting[seq_id]
            self._check_open()
            if len(chain.chain_slots) >= blocks:
                return chain
            if len(chain.chain_slots) <= have_blocks:
                raise NotFound(f"the ticket's chain did not grow for {CHAIN_STALL_TIMEOUT_S:.0f} s: plan again")
            have_blocks = len(chain.chain_slots)

    def stop_waiting(self, seq_id: int) -> None:
        """End a sequence's wait for memory or a chain: its :meth:`open` or :meth:`await_chain` raises NotFound, and its
        ticket is released."""
        for waits in (self._opening, self._awaiting):
            if seq_id in waits:
                waits[seq_id].cancel()

    def release_ticket(self, adopted: AdoptedTicket) -> None:
        """Release an adopted ticket that no sequence uses."""
        self._post_event(Scheduler.release_ticket, adopted)

    def on_released(self, ticket_ids: Iterable[int]) -> None:
        """Record that the node has confirmed the release of these tickets."""
        for ticket_id in ticket_ids:
            freed = self._in_use.pop(ticket_id, None)
            if freed is not None:
                freed.set()

    def retire(self) -> None:
        """End the epoch: the node frees its tickets, and late replies are ignored."""
        self._retired = True
        for seq_id in (*self._opening, *self._awaiting):
            self.stop_waiting(seq_id)
        self.on_released(tuple(self._in_use))

    def _check_open(self) -> None:
        if self._retired:
            raise Unavailable("the worker's epoch at its KV node has ended")

    async def _claim(self, ticket_id: int) -> None:
        """Mark a ticket as in use, after waiting for the release of its previous use: with two uses, the first release
        would take the other one's slots."""
        while (freed := self._in_use.get(ticket_id)) is not None:
            try:
                async with asyncio.timeout(IN_USE_TIMEOUT_S):
                    await freed.wait()
            except TimeoutError:
                raise NotFound("the ticket is in use on this worker: plan again") from None
        self._check_open()
        self._in_use[ticket_id] = asyncio.Event()

    async def open(
        self,
        seq_id: int,
        block_hashes: bytes,
        total_blocks: int,
        flow: Flow = NO_FLOW,
        **demand: Unpack[TicketDemand],
    ) -> tuple[AdoptedTicket, bytes]:
        """Open and adopt a ticket, and lease all slots that it reserves, in one call, which waits for memory in the
        node's queue. The arguments are those of NodeClient.open_ticket, the result is that of :meth:`adopt`.

        Raises:
            NotFound: fewer than ``expected_blocks`` blocks are present; or :meth:`stop_waiting` was called, in which
                case the client releases a ticket that the node opened.
            DeadlineExceeded: no memory was freed within MEMORY_WAIT_S.
            Overloaded: too many calls wait for memory, or the pool is too small.
            Unavailable: no reply, or the epoch ended; nothing is adopted.
        """
        opening = self._open(block_hashes, total_blocks, flow, **demand)
        task = self._opening[seq_id] = asyncio.create_task(opening)
        try:
            return await task
        except asyncio.CancelledError:
            self._check_open()
            raise NotFound("the wait for the ticket was cancelled") from None
        except PillionError as error:
            raise (error if isinstance(error, DeadlineExceeded) else self._to_caller_error(error)) from None
        finally:
            del self._opening[seq_id]

    async def _open(
        self, block_hashes: bytes, total_blocks: int, flow: Flow = NO_FLOW, **demand: Unpack[TicketDemand]
    ) -> tuple[AdoptedTicket, bytes]:
        self._check_open()
        ticket = await self._node.open_ticket(
            self._epoch,
            block_hashes,
            total_blocks,
            adopt=True,
            flow=flow,
            timeout_s=MEMORY_WAIT_S,
            on_unreleased=self._to_caller_error,
            **demand,
        )
        self._check_open()
        self._in_use[ticket.ticket_id] = asyncio.Event()
        adopted = ticket.adopted
        chain, leased, state = map(tuple, (adopted.chain_slots, adopted.leased_slots, adopted.state_slots))
        return AdoptedTicket(ticket.ticket_id, chain, leased, state, adopted.known_blocks), adopted.last_hash

    @property
    def waiting(self) -> Iterable[int]:
        """Ids of the sequences that wait for memory in the node's queue, in order."""
        return self._opening

    async def resume(self, order: ResumeOrder) -> None:
        """Open a new ticket for a preempted stream."""
        try:
            adopted, _ = await self.open(
                order.seq_id,
                order.block_hashes,
                order.total_blocks,
                order.flow,
                resume=True,
                priority=order.priority,
                state_pages=order.state_pages,
            )
        except PillionError as error:
            if isinstance(error, DeadlineExceeded):
                error = Overloaded(f"a preempted stream waited {MEMORY_WAIT_S:.0f} s for memory")
            self._post_event(Scheduler.fail, order.seq_id, error)
            return
        # If the stream has been cancelled, Scheduler.resumed releases the ticket.
        self._post_event(Scheduler.resumed, order.seq_id, adopted)

    async def open_chain(self, order: ChainOrder) -> None:
        """Open a ticket for a chain of a draft model's KV: it pins the blocks that the node has and reserves none."""
        adopted: AdoptedTicket | None = None
        # Ignore failures: the node's client releases a ticket whose reply was lost, and no stream depends on the chain.
        with contextlib.suppress(PillionError):
            adopted, _ = await self._open(order.block_hashes, 0)
        self._post_event(Scheduler.chain_opened, order.chain_id, adopted)

    def _to_caller_error(self, error: PillionError) -> PillionError:
        """Return the error to raise for a failed call: a refusal itself, or Unavailable. Other errors (an unknown
        outcome, a fence) end the epoch."""
        if self._retired:
            return Unavailable("the worker's epoch at its KV node has ended")
        if isinstance(error, NotFound | Overloaded):
            return error
        self._on_lost(error)
        return Unavailable("the worker lost its KV node")
