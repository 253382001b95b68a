"""A worker's tickets: it adopts them for new work, and opens new ones for preempted streams and for drafts.

    adopt --> held, and its chain awaited --> in use: a sequence holds it --the node has the release--> free again
                    +---------------------------+--> let_go: not wanted after all ---------------------^

The node's answers carry slots, and slots must end up somewhere. So a call whose answer may carry slots is never
cancelled, and a call whose outcome is unknown ends the worker's epoch: callers that wait here then get Unavailable, and
the node frees everything when the worker has drained, or is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from pillion.engine.scheduling.block_chain import Holding
from pillion.engine.scheduling.scheduler import Scheduler
from pillion.engine.scheduling.step_plan import DraftOrder, ResumeOrder
from pillion.errors import DeadlineExceeded, NotFound, Overloaded, PillionError, Unavailable
from pillion.kvstore.client.node_client import NodeClient
from pillion.v1.kvnode_pb2 import AwaitChainReply, OpenTicketReply

# Longest time that a preempted stream waits in the node's queue for memory.
RESUME_TIMEOUT_S = 120.0
# Longest time in which an awaited chain may stand still. The gateway, which hears from the prefill worker whether the
# span waits in its line, gives up on a silent one much sooner, and ends this wait.
CHAIN_STALL_TIMEOUT_S = 3600.0
# Longest time that a ticket which is being released keeps its next use waiting.
IN_USE_TIMEOUT_S = 1.0


class Tickets:
    """The tickets of one epoch. ``post_event`` has a method of Scheduler called between two steps; ``lost`` is called
    with the error of a call that the epoch cannot survive."""

    def __init__(
        self, node: NodeClient, epoch: int, *, post_event: Callable[..., None], lost: Callable[[PillionError], None]
    ) -> None:
        self._node = node
        self._epoch = epoch
        self._post_event: Callable[..., Any] = post_event
        self._lost = lost
        self._retired = False
        self._in_use: dict[int, asyncio.Event] = {}
        self._opening: dict[int, asyncio.Task[OpenTicketReply]] = {}
        self._awaiting: dict[int, asyncio.Task[AwaitChainReply]] = {}

    async def adopt(
        self, ticket_id: int, end_block: int, *, start_block: int = 0, awaited_blocks: int = 0, guess_blocks: int = 1
    ) -> tuple[Holding, bytes]:
        """Hold a ticket and lease what its chain lacks up to ``end_block``; the chain must reach ``start_block``.

        ``guess_blocks`` are leased with the first call; only where that is too few is there a second one. Other workers
        commit the blocks before ``awaited_blocks``: what lies behind them is leased at once, and the caller goes on
        with :meth:`await_chain`. Returns the holding and the hash of the chain's tail (empty for an empty chain).
        The holding must end up in a sequence or in :meth:`let_go`, so shield this call from cancellation.

        Raises:
            NotFound: no such ticket, it is in use here, or its chain is too short: plan again.
            Overloaded: the node has not enough slots beyond the reservation.
            Unavailable: the node did not answer, or the epoch ended meanwhile; nothing is held then.
        """
        await self._claim(ticket_id)
        try:
            behind = end_block - awaited_blocks if awaited_blocks else guess_blocks
            first = await self._node.adopt(self._epoch, ticket_id, behind)
            self._check_open()
        except PillionError as error:
            self.released((ticket_id,))
            raise self._judge(error) from None
        chain, leased = tuple(first.chain_slots), tuple(first.leased_slots)
        try:
            if len(chain) < start_block:
                raise NotFound(f"the ticket holds {len(chain)} blocks, {start_block} are needed: plan again")
            missing = end_block - max(len(chain), awaited_blocks) - len(leased)
            if missing > 0:
                leased += tuple((await self._node.adopt(self._epoch, ticket_id, missing)).leased_slots)
                self._check_open()
        except PillionError as error:
            self.let_go(Holding(ticket_id, chain, leased))
            raise self._judge(error) from None
        return Holding(ticket_id, chain, leased), first.tail_hash

    async def await_chain(self, holding: Holding, blocks: int) -> tuple[Holding, bytes]:
        """Wait until other workers have committed a chain of ``blocks`` blocks. Returns the holding with that chain,
        and the hash of its tail.

        Raises, with the holding let go, NotFound where the chain stands still for CHAIN_STALL_TIMEOUT_S or
        :meth:`stop_awaiting` was called, Overloaded where too many wait at the node, Unavailable where the epoch ends.
        """
        try:
            chain = await self._grown(holding.ticket_id, blocks, len(holding.chain_slots))
        except PillionError as error:
            self.let_go(holding)
            raise self._judge(error) from None
        return replace(holding, chain_slots=tuple(chain.chain_slots)), chain.tail_hash

    async def _grown(self, ticket_id: int, blocks: int, have_blocks: int) -> AwaitChainReply:
        """The chain once it has ``blocks`` blocks. These calls carry no slots, so they may be cancelled."""
        while True:
            waiting = asyncio.create_task(
                self._node.await_chain(self._epoch, ticket_id, blocks, timeout_s=CHAIN_STALL_TIMEOUT_S)
            )
            self._awaiting[ticket_id] = waiting
            try:
                chain = await waiting
            except asyncio.CancelledError:
                self._check_open()
                raise NotFound("the ticket's chain is not awaited any more") from None
            finally:
                del self._awaiting[ticket_id]
            self._check_open()
            if len(chain.chain_slots) >= blocks:
                return chain
            if len(chain.chain_slots) <= have_blocks:
                raise NotFound(f"the ticket's chain stood still for {CHAIN_STALL_TIMEOUT_S:.0f} s: plan again")
            have_blocks = len(chain.chain_slots)

    def stop_awaiting(self, ticket_id: int) -> None:
        """End the wait for a chain: :meth:`await_chain` lets go of the ticket and raises NotFound."""
        waiting = self._awaiting.get(ticket_id)
        if waiting is not None:
            waiting.cancel()

    @contextlib.contextmanager
    def watched(self, holding: Holding) -> Iterator[None]:
        """Lets go of an adopted ticket where a defect ends the block. Whoever raises a PillionError has done so."""
        try:
            yield
        except PillionError:
            raise
        except BaseException:
            self.let_go(holding)
            raise

    def let_go(self, holding: Holding) -> None:
        """Give up an adopted ticket."""
        self._post_event(Scheduler.let_go, holding)

    def released(self, ticket_ids: Iterable[int]) -> None:
        """The node has answered that this worker holds these tickets no more."""
        for ticket_id in ticket_ids:
            freed = self._in_use.pop(ticket_id, None)
            if freed is not None:
                freed.set()

    def retire(self) -> None:
        """The epoch has ended: the node frees what it held, and answers that still come are ignored."""
        self._retired = True
        for waiting in self._awaiting.values():
            waiting.cancel()
        self.released(tuple(self._in_use))

    def _check_open(self) -> None:
        if self._retired:
            raise Unavailable("the worker's epoch at its KV node has ended")

    async def _claim(self, ticket_id: int) -> None:
        """Mark a ticket as in use, once its last use has ended: each use would release the other's hold."""
        while (freed := self._in_use.get(ticket_id)) is not None:
            try:
                await asyncio.wait_for(freed.wait(), IN_USE_TIMEOUT_S)
            except TimeoutError:
                raise NotFound("the ticket is in use on this worker: plan again") from None
        self._check_open()
        self._in_use[ticket_id] = asyncio.Event()

    async def resume(self, order: ResumeOrder) -> None:
        """Open and adopt a new ticket for a preempted stream; waits in the node's queue, before new prompts."""
        opening = asyncio.create_task(
            self._node.open_ticket(
                self._epoch,
                order.block_hashes,
                order.total_blocks,
                resume=True,
                priority=order.priority,
                timeout_s=RESUME_TIMEOUT_S,
            )
        )
        self._opening[order.seq_id] = opening
        try:
            ticket = await opening
        except asyncio.CancelledError:
            return
        except PillionError as error:
            if isinstance(error, DeadlineExceeded):
                error = Overloaded(f"a preempted stream waited {RESUME_TIMEOUT_S:.0f} s for memory")
            self._post_event(Scheduler.fail, order.seq_id, self._judge(error))
            return
        finally:
            self._opening.pop(order.seq_id, None)
        # From here on answers carry slots: if the stream is cancelled now, Scheduler.resumed lets them go.
        missing = order.total_blocks - ticket.pinned_blocks
        try:
            holding, _ = await self.adopt(ticket.ticket_id, order.total_blocks, guess_blocks=missing)
        except PillionError as error:
            self.let_go(Holding(ticket.ticket_id, (), ()))
            self._post_event(Scheduler.fail, order.seq_id, error)
            return
        self._post_event(Scheduler.resumed, order.seq_id, holding)

    async def open_draft(self, order: DraftOrder) -> None:
        """Open a ticket for a draft model's chain, which pins what the node has of it and reserves nothing."""
        try:
            ticket = await self._node.open_ticket(self._epoch, order.block_hashes, 0)
        except PillionError:
            # The client takes back what an answer that never came has granted, and no stream needs a draft.
            self._post_event(Scheduler.draft_opened, order.chain_id, None)
            return
        try:
            holding, _ = await self.adopt(ticket.ticket_id, 0, guess_blocks=0)
        except PillionError:
            self.let_go(Holding(ticket.ticket_id, (), ()))
            self._post_event(Scheduler.draft_opened, order.chain_id, None)
            return
        self._post_event(Scheduler.draft_opened, order.chain_id, holding)

    def stop_resuming(self, seq_id: int) -> None:
        """Leave the node's queue, if the stream waits there. The client takes back what was granted meanwhile."""
        opening = self._opening.pop(seq_id, None)
        if opening is not None:
            opening.cancel()

    def _judge(self, error: PillionError) -> PillionError:
        """The error for the caller. A refusal is passed on; an unknown outcome, or a fenced epoch, ends the epoch."""
        if self._retired:
            return Unavailable("the worker's epoch at its KV node has ended")
        if isinstance(error, NotFound | Overloaded):
            return error
        self._lost(error)
        return Unavailable("the worker lost its KV node")
