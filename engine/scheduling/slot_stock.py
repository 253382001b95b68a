"""The small stock of leased free slots that lets a decode grow without an RPC in the step.

    KV node --lease--> stock --take--> a sequence's table --commit--> KV node
       ^                 |  ^                |
       +----give back----+  +------give------+

Sans-IO: the stock computes how many slots it wants and which it can spare; asyncio's side calls the node. One lease
call is under way at a time. A short answer means that the node is *exhausted*, and then a sequence must be preempted;
the answer counts for LEASE_RETRY_S, and not at all once this worker has let go of memory since the call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# Slots above the target that stay in the stock, so that a stream that ends and one that begins cause no calls.
SPARE_BLOCKS = 8
# Most slots of one lease call.
MAX_LEASE_BLOCKS = 1024
# Time for which a short answer counts, and after which the node is asked again.
LEASE_RETRY_S = 0.05


class SlotStock:
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
        """Whether the node answered a moment ago that it has no more slots."""
        return now < self._short_until_s

    def take(self) -> int | None:
        """Take one slot out; None when the stock is empty."""
        return self._free.pop() if self._free else None

    def give(self, slots: Iterable[int]) -> None:
        """Put back slots that no step uses any more."""
        self._free.extend(slots)

    def send_back(self, slots: Iterable[int]) -> None:
        """Return slots to the node soon: those of lost commit races, which the node may have promised to a request."""
        self._leaving.extend(slots)

    def aim(self, low_blocks: int, target_blocks: int) -> None:
        """Set how many slots the running decodes will need soon, and somewhat later."""
        self.low_blocks = low_blocks
        self.target_blocks = max(low_blocks, target_blocks)

    def wanted(self, now: float, urgent: bool) -> int:
        """Blocks to lease now, 0 for none; under way until :meth:`granted`. ``urgent``: a decode waits for a slot."""
        if self.lease_under_way or len(self._free) >= self.low_blocks or (self.exhausted(now) and not urgent):
            return 0
        self._requested_blocks = min(self.target_blocks - len(self._free), MAX_LEASE_BLOCKS)
        self._answer_is_stale = False
        return self._requested_blocks

    def granted(self, slots: Sequence[int], now: float) -> None:
        short = len(slots) < self._requested_blocks
        self._requested_blocks = 0
        self._free.extend(slots)
        self._short_until_s = now + LEASE_RETRY_S if short and not self._answer_is_stale else 0.0

    def memory_is_coming(self) -> None:
        """Memory was let go at the node: its earlier answer about its memory is void."""
        self._short_until_s = 0.0
        self._answer_is_stale = self.lease_under_way

    def recall(self, blocks: int) -> None:
        """The node asks for ``blocks`` slots back."""
        self._recall_blocks = blocks

    def surplus(self) -> tuple[int, ...]:
        """Slots to give back now; they leave the stock. Without a target nothing is kept."""
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
        """Raises AssertionError when a slot is here twice."""
        assert len(set(self.slots)) == len(self.slots), f"a slot is in the stock twice: {sorted(self.slots)}"
