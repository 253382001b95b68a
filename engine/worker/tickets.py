"""A worker's tickets: adopted from gateways, or opened for prompts that it computes alone, preempted streams, and
chains of features.

    open, adopt --> adopted, chain awaited --> in use by a sequence --node confirms the release--> free again
                         +-----------------------+--> release_ticket: not needed --------------------^

Answers of the node carry slots that must not be lost. So a call whose answer may carry slots is never cancelled, except
the opening of a ticket, which the client has the node undo. A call with unknown outcome ends the worker's epoch:
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

MEMORY_WAIT_S = 120.0
# Wait for an awaited chain to grow. The gateway, which follows the prefill worker's queue, ends it much sooner if the
# range is silent.
CHAIN_STALL_TIMEOUT_S = 3600.0
# Timeout of a release that a ticket's next use waits for.
IN_USE_TIMEOUT_S = 1.0


class Tickets:
    """The tickets of one epoch. ``post_event`` has a method of Scheduler called between two steps; ``lost`` is called
    with the error of a call that ends the epoch."""

    def __init__(
        self, node: NodeClient, epoch: int, *, post_event: Callable[..., None], lost: Callable[[PillionError], None]
    ) -> None:
        self._node = node
        self._epoch = epoch
        self._post_event: Callable[..., Any] = post_event
        self._lost = lost
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
        """Adopt a ticket and lease the slots that its chain lacks up to ``end_block``; the chain must reach
        ``start_block``.

        The first call leases ``first_lease_blocks``; a second one follows only if these are too few. With
        ``awaited_blocks`` other workers commit the blocks before it: only those after it are leased, and
        :meth:`await_chain` follows.
        Return the ticket and the hash of the chain's last block, empty for none. The ticket must end in a sequence or
        in :meth:`release_ticket`, so shield this call from cancellation.

        Raises:
            NotFound: no such ticket, in use here, or its chain is too short: plan again.
            Overloaded: too few slots at the node beyond the reservation.
            Unavailable: no answer, or the epoch ended; nothing is adopted.
        """
        await self._claim(ticket_id)
        try:
            after = end_block - awaited_blocks if awaited_blocks else first_lease_blocks
            first = await self._node.adopt(self._epoch, ticket_id, after)
            self._check_open()
        except PillionError as error:
            self.released((ticket_id,))
            raise self._judge(error) from None
        chain, leased, state = map(tuple, (first.chain_slots, first.leased_slots, first.state_slots))
        try:
            if len(chain) < start_block:
                raise NotFound(f"the ticket holds {len(chain)} blocks, {start_block} are needed: plan again")
            missing = end_block - max(len(chain), awaited_blocks) - len(leased)
            if missing > 0:
                leased += tuple((await self._node.adopt(self._epoch, ticket_id, missing)).leased_slots)
                self._check_open()
        except PillionError as error:
            self.release_ticket(AdoptedTicket(ticket_id, chain, leased))
            raise self._judge(error) from None
        return AdoptedTicket(ticket_id, chain, leased, state, first.known_blocks), first.last_hash

    async def await_chain(self, seq_id: int, adopted: AdoptedTicket, blocks: int) -> tuple[AdoptedTicket, bytes]:
        """Wait until other workers have committed a chain of ``blocks`` blocks. Return the ticket with that chain, and
        the hash of its last block.

        Raise, with the ticket released, NotFound if the chain does not grow for CHAIN_STALL_TIMEOUT_S or
        :meth:`stop_waiting` was called, Overloaded if too many calls wait at the node, Unavailable if the epoch ends.
        """
        try:
            chain = await self._grown(seq_id, adopted.ticket_id, blocks, len(adopted.chain_slots))
        except PillionError as error:
            self.release_ticket(adopted)
            raise self._judge(error) from None
        except BaseException:
            self.release_ticket(adopted)
            raise
        grown = replace(adopted, chain_slots=tuple(chain.chain_slots), state_slots=tuple(chain.state_slots))
        return grown, chain.last_hash

    async def _grown(self, seq_id: int, ticket_id: int, blocks: int, have_blocks: int) -> AwaitChainReply:
        """Return the chain once it has ``blocks`` blocks. The calls carry no slots and may be cancelled."""
        while True:
            waiting = asyncio.create_task(
                self._node.await_chain(self._epoch, ticket_id, blocks, timeout_s=CHAIN_STALL_TIMEOUT_S)
            )
            self._awaiting[seq_id] = waiting
            try:
                chain = await waiting
            except asyncio.CancelledError:
                self._check_open()
                raise NotFound("the ticket's chain is not awaited any more") from None
            finally:
                del self._awaiting[seq_id]
            self._check_open()
            if len(chain.chain_slots) >= blocks:
                return chain
            if len(chain.chain_slots) <= have_blocks:
                raise NotFound(f"the ticket's chain stood still for {CHAIN_STALL_TIMEOUT_S:.0f} s: plan again")
            have_blocks = len(chain.chain_slots)

    def stop_waiting(self, seq_id: int) -> None:
        """End a sequence's wait for memory or a chain: :meth:`open` or :meth:`await_chain` raises NotFound, with
        nothing adopted."""
        for waits in (self._opening, self._awaiting):
            if seq_id in waits:
                waits[seq_id].cancel()

    def release_ticket(self, adopted: AdoptedTicket) -> None:
        """Release an adopted ticket that no sequence uses."""
        self._post_event(Scheduler.release_ticket, adopted)

    def released(self, ticket_ids: Iterable[int]) -> None:
        """Record that the node has confirmed the release of these tickets."""
        for ticket_id in ticket_ids:
            freed = self._in_use.pop(ticket_id, None)
            if freed is not None:
                freed.set()

    def retire(self) -> None:
        """End the epoch: the node frees its tickets, and late answers are ignored."""
        self._retired = True
        for seq_id in (*self._opening, *self._awaiting):
            self.stop_waiting(seq_id)
        self.released(tuple(self._in_use))

    def _check_open(self) -> None:
        if self._retired:
            raise Unavailable("the worker's epoch at its KV node has ended")

    async def _claim(self, ticket_id: int) -> None:
        """Mark a ticket as in use, once its last use has ended: each use would release the other's."""
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
        """Open a ticket and lease all that it reserves, in one call, which waits in the node's queue for memory. For
        arguments see NodeClient.open_ticket, for the result :meth:`adopt`.

        Raises:
            NotFound: fewer than ``expected_blocks`` are present; or :meth:`stop_waiting` was called, and the client
                undoes a grant.
            DeadlineExceeded: no memory was freed within MEMORY_WAIT_S.
            Overloaded: too many calls wait for memory, or the pool is too small.
            Unavailable: no answer, or the epoch ended; nothing is adopted.
        """
        opening = self._open(block_hashes, total_blocks, flow, **demand)
        task = self._opening[seq_id] = asyncio.create_task(opening)
        try:
            return await task
        except asyncio.CancelledError:
            self._check_open()
            raise NotFound("nobody waits for the ticket any more") from None
        except PillionError as error:
            raise (error if isinstance(error, DeadlineExceeded) else self._judge(error)) from None
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
            on_unreleased=self._judge,
            **demand,
        )
        self._check_open()
        self._in_use[ticket.ticket_id] = asyncio.Event()
        adopted = ticket.adopted
        chain, leased, state = map(tuple, (adopted.chain_slots, adopted.leased_slots, adopted.state_slots))
        return AdoptedTicket(ticket.ticket_id, chain, leased, state, adopted.known_blocks), adopted.last_hash

    @property
    def waiting(self) -> Iterable[int]:
        """The sequences in the node's queue for memory, in order."""
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
        # If the stream is cancelled now, Scheduler.resumed lets go of the slots.
        self._post_event(Scheduler.resumed, order.seq_id, adopted)

    async def open_chain(self, order: ChainOrder) -> None:
        """Opens a ticket for a feature's own chain, which pins what the node has of it and reserves nothing."""
        adopted: AdoptedTicket | None = None
        # A failure is ignored: the node's client gives back a ticket whose answer was lost, and no stream needs a
        # feature's chain.
        with contextlib.suppress(PillionError):
            adopted, _ = await self._open(order.block_hashes, 0)
        self._post_event(Scheduler.chain_opened, order.chain_id, adopted)

    def _judge(self, error: PillionError) -> PillionError:
        """Return the error for the caller. A refusal is passed on; an unknown outcome or a fence ends the epoch."""
        if self._retired:
            return Unavailable("the worker's epoch at its KV node has ended")
        if isinstance(error, NotFound | Overloaded):
            return error
        self._lost(error)
        return Unavailable("the worker lost its KV node")
