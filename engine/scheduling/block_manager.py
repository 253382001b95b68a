"""A worker's slots: free ones, and orders to its KV node to lease, commit, release and return.

Sans-IO (I9): orders gather in an Outcome, which :mod:`pillion.engine.worker.node_updates` sends to the node. One run of
blocks per sequence is sent at a time; the node's answer comes back as :meth:`BlockManager.accept` or as a refusal.

A few free slots, leased ahead, let a decode grow without an RPC in the step.

    KV node --lease--> free slots --allocate--> a sequence's table --commit--> KV node
       ^                 |  ^                     |
       +-----return------+  +--------free---------+

:class:`FreeSlots` counts the slots to lease and to return; the event loop calls the node. One lease call runs at a
time. If the node grants fewer slots than requested, it is *exhausted*, and a sequence must be preempted. That answer
is valid for LEASE_RETRY_S, and void once this worker has released memory since the call.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Protocol

from pillion.engine.scheduling.block_chain import AdoptedTicket, BlockChain
from pillion.engine.scheduling.in_flight import InFlightSteps
from pillion.engine.scheduling.sequence import Sequence
from pillion.engine.scheduling.step_plan import CommitOrder, Outcome, ResumeOrder

# Free slots kept above the target, so that a stream that ends and one that begins cause no calls.
SPARE_BLOCKS = 8
MAX_LEASE_BLOCKS = 1024
# Pause of lease calls after the node granted fewer slots than requested.
LEASE_RETRY_S = 0.05
# Slots are leased if fewer are free than decodes need for their next FREE_SLOTS_LOW_TOKENS tokens, up to what they need
# for their next FREE_SLOTS_TARGET_TOKENS.
FREE_SLOTS_LOW_TOKENS = 4
FREE_SLOTS_TARGET_TOKENS = 16


class FreeSlots:
    """Free slots leased to this worker: if fewer than ``low_blocks``, more are leased, up to ``target_blocks``."""

    def __init__(self) -> None:
        self._free: list[int] = []
        # Slots to return to the node with the next outcome.
        self._to_return: list[int] = []
        self.low_blocks = 0
        self.target_blocks = 0
        # Slots requested by the running lease call; 0 without one.
        self._requested_blocks = 0
        # True if memory was released after that call began.
        self._answer_is_stale = False
        self._recall_blocks = 0
        self._exhausted_until_s = 0.0

    def __len__(self) -> int:
        return len(self._free)

    @property
    def slots(self) -> tuple[int, ...]:
        """All slots, those to return included."""
        return (*self._free, *self._to_return)

    @property
    def lease_under_way(self) -> bool:
        return self._requested_blocks > 0

    def exhausted(self, now: float) -> bool:
        """Return whether the node recently granted fewer slots than requested."""
        return now < self._exhausted_until_s

    def allocate(self) -> int | None:
        """Allocate one slot; None if none is free."""
        return self._free.pop() if self._free else None

    def free(self, slots: Iterable[int]) -> None:
        """Free slots that only launched steps may still access."""
        self._free.extend(slots)

    def return_to_node(self, slots: Iterable[int]) -> None:
        """Return slots to the node with the next outcome: those of lost commit races, which it may have reserved for a
        request."""
        self._to_return.extend(slots)

    def set_target(self, low_blocks: int, target_blocks: int) -> None:
        """Set the number of slots that running decodes will need soon (``low_blocks``), and later."""
        self.low_blocks = low_blocks
        self.target_blocks = max(low_blocks, target_blocks)

    def start_lease(self, now: float, urgent: bool) -> int:
        """Return the number of slots to lease now, 0 for none; the call counts as running until :meth:`granted`.
        ``urgent``: a decode waits for a slot."""
        if self.lease_under_way or len(self._free) >= self.low_blocks or (self.exhausted(now) and not urgent):
            return 0
        self._requested_blocks = min(self.target_blocks - len(self._free), MAX_LEASE_BLOCKS)
        self._answer_is_stale = False
        return self._requested_blocks

    def granted(self, slots: Seq[int], now: float) -> None:
        """Handle the node's answer to a lease call."""
        is_short = len(slots) < self._requested_blocks
        self._requested_blocks = 0
        self._free.extend(slots)
        self._exhausted_until_s = now + LEASE_RETRY_S if is_short and not self._answer_is_stale else 0.0

    def memory_released(self) -> None:
        """Assume that the node is not exhausted any more, since this worker has released memory."""
        self._exhausted_until_s = 0.0
        self._answer_is_stale = self.lease_under_way

    def recall(self, blocks: int) -> None:
        """Record that the node requests ``blocks`` slots back."""
        self._recall_blocks = blocks

    def pop_surplus(self) -> tuple[int, ...]:
        """Remove and return the slots to return to the node: those above the target, recalled ones, and those of
        :meth:`return_to_node`."""
        extra = len(self._free) - self.target_blocks
        if self.target_blocks and extra <= SPARE_BLOCKS:
            extra = 0
        recalled = min(self._recall_blocks, len(self._free) - self.low_blocks)
        self._recall_blocks = 0
        count = max(extra, recalled, 0)
        surplus = (*self._to_return, *self._free[:count])
        self._to_return.clear()
        del self._free[:count]
        return surplus

    def check_integrity(self) -> None:
        """Raise AssertionError if a slot is free twice."""
        assert len(set(self.slots)) == len(self.slots), f"a slot is free twice: {sorted(self.slots)}"


class SideBlocks(Protocol):
    """A feature that uses slots besides sequences (partial blocks, states, draft chains), and frees them if memory is
    short."""

    @property
    def lacking_blocks(self) -> int:
        """Number of slots to lease in addition, if the node has any."""

    def yield_slots(self, blocks: int, now: float) -> bool:
        """Free at least ``blocks`` slots or, if there are fewer, all that can be freed. Return False if none can."""

    def side_chains(self) -> Iterable[BlockChain]:
        """Return the chains that own the slots."""

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError on inconsistency with ``sequences``, the scheduler's."""


class BlockManager:
    """All slots leased to one scheduler, for blocks of ``block_size`` tokens, and its orders to the KV node.

    Attributes:
        free_slots: the free slots leased to this worker.
        in_flight: the launched steps.
        out: the outcome being gathered.
        needed_blocks: slots that decodes will need soon.
        extra_blocks, state_pages: slots for states per new ticket, and pages of one state; 0 without states.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.in_flight = InFlightSteps()
        self.free_slots = FreeSlots()
        self.out = Outcome()
        self._leased = 0
        self.needed_blocks = 0
        self.extra_blocks = 0
        self.state_pages = 0

    def leased(self, slots: int) -> None:
        """Count ``slots`` further slots as leased to this worker."""
        self._leased += slots

    def granted(self, slots: Seq[int], now: float) -> None:
        """Handle the node's answer to a lease call."""
        self._leased += len(slots)
        self.free_slots.granted(slots, now)

    def release_ticket(self, ticket: AdoptedTicket) -> None:
        """Release an adopted ticket without a sequence."""
        self._leased += len(ticket.leased_slots)
        self.free_slots.free(ticket.leased_slots)
        self.release(ticket.ticket_id)

    def release(self, ticket_id: int) -> None:
        """Order the release of a ticket."""
        self.out.releases.append(ticket_id)
        self.free_slots.memory_released()

    def order_resume(self, sequence: Sequence) -> None:
        """Order a new ticket for a RESUMING sequence. Its chain ends before the first token whose logits are needed."""
        last = sequence.num_tokens - 1 if sequence.unscored_from is None else sequence.unscored_from
        whole = last // self.block_size
        self.out.resumes.append(
            ResumeOrder(
                seq_id=sequence.seq_id,
                block_hashes=sequence.block_hashes(0, whole),
                total_blocks=sequence.num_tokens // self.block_size + 1 + self.extra_blocks,
                priority=sequence.priority,
                state_pages=self.state_pages,
                flow=sequence.flow,
            )
        )

    def order_commit(self, chain: BlockChain, now: float, *, may_wait: bool = False) -> None:
        """Order the commit of the chain's full blocks that are not committed, unless a commit is in flight or one was
        refused. ``may_wait``: see :class:`CommitOrder`."""
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
                chunks=chain.take_chunks(end) if isinstance(chain, Sequence) else (),
                may_wait=may_wait,
            )
        )

    def accept(self, chain: BlockChain, slots: Seq[int]) -> None:
        """Record a run as committed in ``slots``. Where another committer was first, the worker's own slot is returned
        to the node once no step reads it (I2)."""
        replaced = chain.commit(slots)
        self._leased -= len(slots) - len(replaced)
        self.free_slots.return_to_node(replaced)

    def finish_outcome(self, decodes: Iterable[Sequence], now: float, urgent: bool, wanted_blocks: int) -> Outcome:
        """Return the outcome gathered since the last call, with slots to return and to lease.

        ``decodes``: running decodes, which need free slots to grow. ``urgent``: one of them waits for a slot.
        ``wanted_blocks``: further slots for drafts, states and partial blocks.
        """
        free_tokens = [s.num_blocks * self.block_size - s.next_start for s in decodes]
        low = sum(tokens < FREE_SLOTS_LOW_TOKENS for tokens in free_tokens)
        self.needed_blocks = low
        target = max(low, sum(tokens < FREE_SLOTS_TARGET_TOKENS for tokens in free_tokens))
        self.free_slots.set_target(low + wanted_blocks, target + wanted_blocks)
        out, self.out = self.out, Outcome()
        out.returned_slots.extend(self.free_slots.pop_surplus())
        if self.in_flight.hold_back(out):
            self.free_slots.memory_released()
        self._leased -= len(out.returned_slots)
        out.lease_blocks = self.free_slots.start_lease(now, urgent=urgent)
        return out

    def check_integrity(self, chains: Iterable[BlockChain]) -> None:
        """Raise AssertionError unless every slot leased to this worker is in exactly one place (I4)."""
        self.free_slots.check_integrity()
        slots = [*self.free_slots.slots, *self.in_flight.held_back_slots()]
        for chain in chains:
            slots.extend(chain.owned_slots())
        assert len(set(slots)) == len(slots), "a slot is in two places"
        assert len(slots) == self._leased, f"{self._leased} slots are leased, {len(slots)} are accounted for"
