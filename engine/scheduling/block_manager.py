"""A worker's blocks at its KV node: the stock of slots, the commits and releases that the node will be asked for.

Sans-IO (I9): orders gather in an Outcome, which :mod:`pillion.engine.worker.node_updates` carries to the node. One run
of blocks per sequence is under way at a time; its answer comes back as :meth:`BlockManager.accept` or as a refusal.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from pillion.engine.scheduling.block_chain import BlockChain, Holding
from pillion.engine.scheduling.in_flight import InFlightSteps
from pillion.engine.scheduling.sequence import Sequence
from pillion.engine.scheduling.slot_stock import SlotStock
from pillion.engine.scheduling.step_plan import CommitOrder, Outcome, ResumeOrder

# The stock asks for slots when it lacks what decodes need within the first many tokens, and fills up to the second.
STOCK_LOW_TOKENS = 4
STOCK_TARGET_TOKENS = 16


class BlockManager:
    """The blocks of one scheduler.

    Attributes:
        stock: free slots leased to this worker.
        out: the outcome being gathered; what leaves for the node waits for the steps ``in_flight`` that may use it.
    """

    def __init__(self, block_size: int, in_flight: InFlightSteps) -> None:
        self._block_size = block_size
        self._in_flight = in_flight
        self.stock = SlotStock()
        self.out = Outcome()
        self._leased = 0
        # Slots that stay in the stock for decodes.
        self.needed_blocks = 0

    # Slots.

    def leased(self, slots: int) -> None:
        self._leased += slots

    def granted(self, slots: Seq[int], now: float) -> None:
        self._leased += len(slots)
        self.stock.granted(slots, now)

    def let_go(self, holding: Holding) -> None:
        """Give up an adopted ticket that no sequence holds."""
        self._leased += len(holding.leased_slots)
        self.stock.give(holding.leased_slots)
        self.release(holding.ticket_id)

    def release(self, ticket_id: int) -> None:
        """End this worker's hold on a ticket."""
        self.out.releases.append(ticket_id)
        self.stock.memory_is_coming()

    def order_resume(self, sequence: Sequence) -> None:
        """Order a ticket for one that has none. What needs logits is left to compute, the last token at least."""
        last = sequence.num_tokens - 1 if sequence.unscored_from is None else sequence.unscored_from
        whole = last // self._block_size
        self.out.resumes.append(
            ResumeOrder(
                seq_id=sequence.seq_id,
                block_hashes=sequence.block_hashes(0, whole),
                total_blocks=sequence.num_tokens // self._block_size + 1,
                priority=sequence.spec.priority,
            )
        )

    # Commits.

    def order_commit(self, chain: BlockChain, now: float) -> None:
        """Order the commit of the full blocks that the node has not got, one run at a time."""
        start, end = chain.num_committed, chain.full_blocks
        if end <= start or chain.in_commit or not chain.may_commit:
            return
        chain.send(end)
        self.out.commits.append(
            CommitOrder(
                seq_id=chain.seq_id,
                ticket_id=chain.ticket_id,
                slots=chain.slots(start, end),
                block_hashes=chain.block_hashes(start, end),
                ordered_s=now,
                chunks=chain.take_chunks(end),
            )
        )

    def accept(self, chain: BlockChain, slots: Seq[int]) -> None:
        """The node took a run. Where another committer was first, the worker's own slot goes back when no step reads it
        any more (I2)."""
        replaced = chain.commit(slots)
        self._leased -= len(slots) - len(replaced)
        self.stock.send_back(replaced)

    # The outcome.

    def finish_outcome(self, decodes: Iterable[Sequence], now: float, urgent: bool, draft_blocks: int) -> Outcome:
        """Return what gathered since the last outcome. ``decodes`` will grow; ``urgent``: one of them lacks a slot.
        Drafts lack ``draft_blocks``, which they get where decodes need none."""
        room = [s.num_blocks * self._block_size - s.next_start for s in decodes]
        low = sum(tokens < STOCK_LOW_TOKENS for tokens in room)
        self.needed_blocks = low
        target = max(low, sum(tokens < STOCK_TARGET_TOKENS for tokens in room))
        self.stock.aim(low + draft_blocks, target + draft_blocks)
        out, self.out = self.out, Outcome()
        out.give_back.extend(self.stock.surplus())
        if self._in_flight.hold_back(out):
            self.stock.memory_is_coming()
        self._leased -= len(out.give_back)
        out.lease_blocks = self.stock.wanted(now, urgent=urgent)
        return out

    def check_integrity(self, chains: Iterable[BlockChain]) -> None:
        """Raises AssertionError unless every slot leased to this worker is in exactly one place (I4)."""
        self.stock.check_integrity()
        places = [*self.stock.slots, *self._in_flight.held_back_slots()]
        for chain in chains:
            places.extend(chain.owned_slots())
        assert len(set(places)) == len(places), "a slot is in two places"
        assert len(places) == self._leased, f"{self._leased} slots are leased, {len(places)} are accounted for"
