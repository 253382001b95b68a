"""A worker's blocks at its KV node: the free slots, and the commits and releases to send.

Sans-IO (I9): orders gather in an Outcome, which :mod:`pillion.engine.worker.node_updates` sends to the node. One run of
blocks per sequence is sent at a time; the node's answer comes back as :meth:`BlockManager.accept` or as a refusal.

A few free slots, leased ahead, let a decode grow without an RPC in the step.

    KV node --lease--> free slots --take--> a sequence's table --commit--> KV node
       ^                 |  ^                |
       +----give back----+  +------give------+

:class:`FreeSlots` counts the slots to lease and to return; the event loop calls the node. One lease call runs at a
time. A short answer means that the node is *exhausted*, so that a sequence must be preempted; it is valid for
LEASE_RETRY_S, and void once this worker has released memory since the call.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Protocol

from pillion.engine.scheduling.block_chain import AdoptedTicket, BlockChain
from pillion.engine.scheduling.in_flight import InFlightSteps
from pillion.engine.scheduling.sequence import Sequence
from pillion.engine.scheduling.step_plan import CommitOrder, Outcome, ResumeOrder

# Free slots kept beyond the target, so that a stream that ends and one that begins cause no calls.
SPARE_BLOCKS = 8
MAX_LEASE_BLOCKS = 1024
# Delay after a short answer before the node is asked again.
LEASE_RETRY_S = 0.05


class FreeSlots:
    """Free slots leased to this worker: below ``low_blocks`` more are leased, up to ``target_blocks``."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._leaving: list[int] = []
        self.low_blocks = 0
        self.target_blocks = 0
        self._requested_blocks = 0
        self._answer_is_stale = False
        self._recall_blocks = 0
        self._short_until_s = 0.0

    def __len__(self) -> int:
        return len(self._free)

    @property
    def slots(self) -> tuple[int, ...]:
        return (*self._free, *self._leaving)

    @property
    def lease_under_way(self) -> bool:
        return self._requested_blocks > 0

    def exhausted(self, now: float) -> bool:
        """Return whether the node has just answered that it has no more slots."""
        return now < self._short_until_s

    def take(self) -> int | None:
        """Take one slot; None if there is none."""
        return self._free.pop() if self._free else None

    def give(self, slots: Iterable[int]) -> None:
        """Put back slots that no step uses any more."""
        self._free.extend(slots)

    def send_back(self, slots: Iterable[int]) -> None:
        """Return slots to the node soon: those of lost commit races, which it may have promised to a request."""
        self._leaving.extend(slots)

    def aim(self, low_blocks: int, target_blocks: int) -> None:
        """Set the slots that running decodes will need soon (``low_blocks``), and later."""
        self.low_blocks = low_blocks
        self.target_blocks = max(low_blocks, target_blocks)

    def wanted(self, now: float, urgent: bool) -> int:
        """Return the blocks to lease now, 0 for none; the call counts as running until :meth:`granted`. ``urgent``: a
        decode waits for a slot."""
        if self.lease_under_way or len(self._free) >= self.low_blocks or (self.exhausted(now) and not urgent):
            return 0
        self._requested_blocks = min(self.target_blocks - len(self._free), MAX_LEASE_BLOCKS)
        self._answer_is_stale = False
        return self._requested_blocks

    def granted(self, slots: Seq[int], now: float) -> None:
        short = len(slots) < self._requested_blocks
        self._requested_blocks = 0
        self._free.extend(slots)
        self._short_until_s = now + LEASE_RETRY_S if short and not self._answer_is_stale else 0.0

    def memory_is_coming(self) -> None:
        """Void the node's last short answer, since memory was released there."""
        self._short_until_s = 0.0
        self._answer_is_stale = self.lease_under_way

    def recall(self, blocks: int) -> None:
        """Record that the node wants ``blocks`` slots back."""
        self._recall_blocks = blocks

    def surplus(self) -> tuple[int, ...]:
        """Remove and return the slots above the target, which go back to the node."""
        extra = len(self._free) - self.target_blocks
        if self.target_blocks and extra <= SPARE_BLOCKS:
            extra = 0
        recalled = min(self._recall_blocks, len(self._free) - self.low_blocks)
        self._recall_blocks = 0
        count = max(extra, recalled, 0)
        given = (*self._leaving, *self._free[:count])
        self._leaving.clear()
        del self._free[:count]
        return given

    def check_integrity(self) -> None:
        """Raise AssertionError if a slot is free twice."""
        assert len(set(self.slots)) == len(self.slots), f"a slot is free twice: {sorted(self.slots)}"


# Slots are leased when fewer are free than decodes need for FREE_SLOTS_LOW_TOKENS more tokens each, up to what they
# need for FREE_SLOTS_TARGET_TOKENS.
FREE_SLOTS_LOW_TOKENS = 4
FREE_SLOTS_TARGET_TOKENS = 16


class SideBlocks(Protocol):
    """A user of slots besides sequences (partial blocks, states, draft chains), which frees them if memory is short."""

    @property
    def lacking_blocks(self) -> int:
        """Return the slots that it would like to have, leased only if decodes need none."""

    def yield_slots(self, blocks: int, now: float) -> bool:
        """Free at least ``blocks`` slots, because memory is short. Return False if it freed none."""

    def side_chains(self) -> Iterable[BlockChain]:
        """Return its chains of blocks."""

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError if its state contradicts the given sequences, which are all that are not gone."""


class BlockManager:
    """The blocks of one scheduler, of ``block_size`` tokens each, and of its other users of slots.

    Attributes:
        free_slots: the free slots leased to this worker.
        in_flight: the launched steps.
        out: the outcome being gathered; slots to return wait for the steps in flight that may use them.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.in_flight = InFlightSteps()
        self.free_slots = FreeSlots()
        self.out = Outcome()
        self._leased = 0
        self.needed_blocks = 0
        self.beside_blocks = 0
        self.state_pages = 0

    def leased(self, slots: int) -> None:
        self._leased += slots

    def granted(self, slots: Seq[int], now: float) -> None:
        self._leased += len(slots)
        self.free_slots.granted(slots, now)

    def release_ticket(self, ticket: AdoptedTicket) -> None:
        """Release an adopted ticket without a sequence."""
        self._leased += len(ticket.leased_slots)
        self.free_slots.give(ticket.leased_slots)
        self.release(ticket.ticket_id)

    def release(self, ticket_id: int) -> None:
        self.out.releases.append(ticket_id)
        self.free_slots.memory_is_coming()

    def order_resume(self, sequence: Sequence) -> None:
        """Order a ticket for a sequence without one. Its chain ends before the tokens whose logits are needed, at least
        the last token."""
        last = sequence.num_tokens - 1 if sequence.unscored_from is None else sequence.unscored_from
        whole = last // self.block_size
        self.out.resumes.append(
            ResumeOrder(
                seq_id=sequence.seq_id,
                block_hashes=sequence.block_hashes(0, whole),
                total_blocks=sequence.num_tokens // self.block_size + 1 + self.beside_blocks,
                priority=sequence.priority,
                state_pages=self.state_pages,
                flow=sequence.flow,
            )
        )

    def order_commit(self, chain: BlockChain, now: float, *, may_wait: bool = False) -> None:
        """Order the commit of the full blocks not yet at the node, one run at a time. ``may_wait`` is that of the
        order."""
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
        """Record a committed run. If another committer was first, the worker's own slot is returned once no step reads
        it (I2)."""
        replaced = chain.commit(slots)
        self._leased -= len(slots) - len(replaced)
        self.free_slots.send_back(replaced)

    def finish_outcome(self, decodes: Iterable[Sequence], now: float, urgent: bool, wanted_blocks: int) -> Outcome:
        """Return the orders gathered since the last outcome, and begin a new one. Slots are leased if ``decodes`` will
        run short of them (``urgent``: one waits now), and ``wanted_blocks`` beyond that for drafts, states and partial
        blocks."""
        room = [s.num_blocks * self.block_size - s.next_start for s in decodes]
        low = sum(tokens < FREE_SLOTS_LOW_TOKENS for tokens in room)
        self.needed_blocks = low
        target = max(low, sum(tokens < FREE_SLOTS_TARGET_TOKENS for tokens in room))
        self.free_slots.aim(low + wanted_blocks, target + wanted_blocks)
        out, self.out = self.out, Outcome()
        out.returned_slots.extend(self.free_slots.surplus())
        if self.in_flight.hold_back(out):
            self.free_slots.memory_is_coming()
        self._leased -= len(out.returned_slots)
        out.lease_blocks = self.free_slots.wanted(now, urgent=urgent)
        return out

    def check_integrity(self, chains: Iterable[BlockChain]) -> None:
        """Raise AssertionError unless every slot leased to this worker is in exactly one place (I4)."""
        self.free_slots.check_integrity()
        places = [*self.free_slots.slots, *self.in_flight.held_back_slots()]
        for chain in chains:
            places.extend(chain.owned_slots())
        assert len(set(places)) == len(places), "a slot is in two places"
        assert len(places) == self._leased, f"{self._leased} slots are leased, {len(places)} are accounted for"
