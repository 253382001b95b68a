"""Learns how long after an answer the next turn of its conversation comes, by tenant and tool, and decides what the
conversation's KV is worth meanwhile. Sans-IO (I9).

    ended --the next turn begins--> its gap is learned          by the hash of the prompt's last whole block, or of the
      '-----nobody comes---------> it counts as one that left   one before it, which the next turn repeats

A template may write the end of a prompt anew in the next turn. A client that rewrites more of the prompt hides that its
conversation goes on. So a tenant's KV is never let go while hardly any of the tenant's next turns were recognized.

An answer that calls tools is followed by their results as soon as they are there; one that calls none ends most agents'
work. What was learned of a key, a tool's name or "" for an answer without calls, is a histogram of gaps in which an
answer counts half after HALF_LIFE later ones, so it follows the traffic and a few odd gaps do not move it. Of several
tools called at once the slowest one counts. A tool that is new gets what the tenant's other tools have.

What KV is worth at an age is Gittins' index (Gittins, Bandit Processes and Dynamic Allocation Indices, 1979): of all
times until which it could stay, the one with most uses for each second in memory, where it leaves when it is used.

    worth(age) = max over t of  P(age < gap <= t)  /  E[min(gap, t) - age]        given that the gap is longer than age

So a call of a quick tool is worth much for a few seconds and little after them, and one that takes minutes little at
first and more when its time comes.

Everything is bounded, by tenant and in all; what was not used for the longest time goes first. A tenant learns from its
own turns alone.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

# So many tenants are remembered, and so many tools and conversations of each. A tool is known by so many characters.
MAX_TENANTS = 1024
MAX_TENANT_TOOLS = 64
MAX_TENANT_CONVERSATIONS = 1024
MAX_CONVERSATIONS = 65_536
MAX_TOOL_CHARS = 64
# Gaps are counted in classes, each STEP times as long as the one before; shorter and longer gaps count for the ends.
LEAST_GAP_S, STEP, CLASSES = 0.05, 1.3, 44
# After so many answers of a key, an older one counts half.
HALF_LIFE = 512
# What is counted in a class counts for those beside it, too, in these parts, as few answers say little of neighbours.
SPREAD = (1 / 9, 2 / 9, 3 / 9, 2 / 9, 1 / 9)
# A worth is computed anew after so many answers of its key; steps that differ by less than WORTH_RATIO are one.
WORTH_ANSWERS, WORTH_RATIO = 8, 1.1
# Nothing is decided by fewer answers than these, apart from what is expected of any tool.
MIN_ANSWERS = 8.0
# What is expected of the tools of a tenant of whom little is known, as if so many had come back after a gap between
# these, and so many had not.
PRIOR_GAPS_S, PRIOR_RETURNS, PRIOR_LEFT = (1.0, 25.0), 1.8, 0.2
# The KV of conversations is let go if a smaller share of them than LEAVE_SHARE go on. This needs LEAVE_SEEN recognized
# next turns of the tenant, which prove that its next turns can be recognized at all.
LEAVE_SHARE, LEAVE_SEEN = 0.1, 8.0
# A conversation has left when it has not come back for PATIENCE times the time within which a share QUANTILE does, and
# for FIRST_PATIENCE_S where that is not known. Nobody is waited for longer than MAX_GAP_S.
QUANTILE, PATIENCE, FIRST_PATIENCE_S, MAX_GAP_S = 0.97, 2.0, 120.0, 3600.0
NO_TOOL = ""
# Where conversations wait for so many different tools, others are taken for one tool of this name.
OTHER_TOOLS = "*"


@dataclass(frozen=True, slots=True)
class KeepUntil:
    """Says what a conversation's KV is worth: from which age in seconds so many uses a second, in order and from 0 on;
    after ``until_s`` seconds nobody is expected any more."""

    worth: tuple[tuple[float, float], ...]
    until_s: float


def until_used(until_s: float) -> KeepUntil:
    """Returns the wish for KV that is used for certain within this time, and nobody knows when."""
    return KeepUntil(((0.0, 2 / until_s),), until_s)


@dataclass(frozen=True, slots=True)
class LetGo:
    """Says that nobody is expected to go on with a conversation; other ones begin with its first ``shared_blocks``."""

    shared_blocks: int


class GapTable:
    """Holds what was learned of one key: how many answers, of late, were followed by a next turn after what gap."""

    __slots__ = ("_since", "_wish", "gaps", "left", "total")

    def __init__(self) -> None:
        self.gaps = [0.0] * CLASSES
        self.total = self.left = 0.0
        self._wish: KeepUntil | None = None
        self._since = 0

    def came(self, gap_s: float) -> None:
        """Learns of a next turn."""
        self._fade()
        self.gaps[_class_of(gap_s)] += 1.0
        self.total += 1.0

    def gone(self) -> None:
        """Learns of a conversation that left."""
        self._fade()
        self.left += 1.0

    @property
    def answers(self) -> float:
        """Gives the number of answers that count."""
        return self.total + self.left

    def quantile_s(self, share: float) -> float:
        """Returns the time within which this share of the next turns came, of those that came at all."""
        wanted, seen = share * self.total, 0.0
        for number, count in enumerate(self.gaps):
            if count and seen + count >= wanted:
                return LEAST_GAP_S * math.pow(STEP, number + (wanted - seen) / count)
            seen += count
        return MAX_GAP_S

    def wish(self) -> KeepUntil:
        """Returns what KV is worth by what was learned, and where that is little by what is expected of any tool."""
        if self._wish is None or self._since >= WORTH_ANSWERS or self.answers < 2 * WORTH_ANSWERS:
            gaps, left = self.gaps, self.left
            if self.answers < MIN_ANSWERS:
                first, last = map(_class_of, PRIOR_GAPS_S)
                each = PRIOR_RETURNS / (last - first)
                gaps = [count + each * (first <= number < last) for number, count in enumerate(gaps)]
                left += PRIOR_LEFT
            self._wish = _kept_by_worth(gaps, left)
            self._since = 0
        return self._wish

    def _fade(self) -> None:
        self._since += 1
        factor = 0.5 ** (1 / HALF_LIFE)
        self.gaps = [count * factor for count in self.gaps]
        self.total *= factor
        self.left *= factor


@dataclass(frozen=True, slots=True)
class OpenTurn:
    """Represents an answer whose conversation may go on.

    Attributes:
        ended_s: when the answer ended.
        key: the key under which the gap until the next turn is learned.
        shared_blocks: how many of the prompt's first blocks other conversations had computed before.
        before: the hash of the prompt's last whole block but one; b"" where other conversations have that block, too.
    """

    ended_s: float
    key: str
    shared_blocks: int
    before: bytes = b""


@dataclass(slots=True)
class TenantGaps:
    """Holds what is known of one tenant: its tables by key and those of all its tools, its open turns by the hash of
    their last block, that hash by the one of the block before it, and for each key the hashes of those that have not
    left yet, the oldest first."""

    tables: OrderedDict[str, GapTable] = field(default_factory=OrderedDict)
    tools: GapTable = field(default_factory=GapTable)
    turns: OrderedDict[bytes, OpenTurn] = field(default_factory=OrderedDict)
    last_hashes: dict[bytes, bytes] = field(default_factory=dict)
    waiting: defaultdict[str, OrderedDict[bytes, None]] = field(default_factory=lambda: defaultdict(OrderedDict))


class TurnGaps:
    """Learns from all conversations of a gateway. ``sees_all`` says whether their next turns come to this gateway for
    certain: where they may go to another one, a conversation that does not come back is no sign that it left."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, TenantGaps] = OrderedDict()
        self._turns = 0

    def turn(
        self, tenant: str, chain: Sequence[bytes], began_s: float, found_blocks: int, *, sees_all: bool = True
    ) -> int:
        """Notes that a turn began, whose prompt has this chain of blocks, of which so many were found in a cache.
        Returns how many of its first blocks belong to other conversations, too: those that the conversation's first
        turn found. O(blocks of the chain)."""
        known = self._tenants.get(tenant)
        if known is None:
            return found_blocks
        self._leave(known, began_s, sees_all)
        for found in reversed(chain):
            block_hash = found if found in known.turns else known.last_hashes.get(found, b"")
            open_turn = known.turns.get(block_hash)
            if open_turn is None or open_turn.ended_s > began_s:
                continue
            self._close(known, block_hash)
            gap_s = began_s - open_turn.ended_s
            self._table(known, open_turn.key).came(gap_s)
            if open_turn.key != NO_TOOL:
                known.tools.came(gap_s)
            return open_turn.shared_blocks
        return found_blocks

    def ended(
        self, tenant: str, chain: Sequence[bytes], tools: Sequence[str], ended_s: float, shared_blocks: int
    ) -> KeepUntil | LetGo | None:
        """Notes that an answer ended that called these tools, after a prompt that has this chain of whole blocks.
        Returns what is to become of the conversation's KV; None: what the pool does with any KV. That is so, too, where
        other conversations have all of the prompt's blocks, by which it is not told apart from them."""
        if len(chain) <= shared_blocks:
            return None
        known = self._tenants.setdefault(tenant, TenantGaps())
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > MAX_TENANTS:
            _, forgotten = self._tenants.popitem(last=False)
            self._turns -= len(forgotten.turns)
        key = self._slowest(known, tools)
        before = chain[-2] if len(chain) - 1 > shared_blocks else b""
        self._open(known, chain[-1], OpenTurn(ended_s, key, shared_blocks, before))
        return self._decided(known, key, shared_blocks)

    @property
    def tenants(self) -> int:
        """Gives the number of tenants that are remembered."""
        return len(self._tenants)

    @property
    def conversations(self) -> int:
        """Gives the number of conversations that may go on."""
        return self._turns

    def _decided(self, known: TenantGaps, key: str, shared_blocks: int) -> KeepUntil | LetGo | None:
        table = known.tables.get(key)
        if table is None or table.answers < MIN_ANSWERS:
            if key == NO_TOOL:
                return None
            table = known.tools
        if table.answers >= MIN_ANSWERS and table.total < LEAVE_SHARE * table.answers:
            seen = sum(one.total for one in known.tables.values())
            return LetGo(shared_blocks) if seen >= LEAVE_SEEN else None
        return table.wish()

    def _slowest(self, known: TenantGaps, tools: Sequence[str]) -> str:
        """Returns the key of an answer that called these tools: the one that takes longest, as far as that is known."""
        names = [tool[:MAX_TOOL_CHARS] or "?" for tool in tools[:MAX_TENANT_TOOLS]]
        if not names:
            return NO_TOOL

        def usual_s(name: str) -> float:
            table = known.tables.get(name)
            return table.quantile_s(0.5) if table is not None and table.total else 0.0

        slowest = max(names, key=usual_s)
        return slowest if slowest in known.waiting or len(known.waiting) < MAX_TENANT_TOOLS else OTHER_TOOLS

    def _table(self, known: TenantGaps, key: str) -> GapTable:
        table = known.tables.get(key)
        if table is None:
            table = known.tables[key] = GapTable()
            if len(known.tables) > MAX_TENANT_TOOLS:
                known.tables.popitem(last=False)
        known.tables.move_to_end(key)
        return table

    def _open(self, known: TenantGaps, last_hash: bytes, turn: OpenTurn) -> None:
        if last_hash in known.turns:
            self._close(known, last_hash)
        known.turns[last_hash] = turn
        if turn.before:
            known.last_hashes[turn.before] = last_hash
        known.waiting[turn.key][last_hash] = None
        self._turns += 1
        if len(known.turns) > MAX_TENANT_CONVERSATIONS:
            self._close(known, next(iter(known.turns)))
        while self._turns > MAX_CONVERSATIONS:
            # The tenant that has not been here for the longest time gives way.
            oldest = next(one for one in self._tenants.values() if one.turns)
            self._close(oldest, next(iter(oldest.turns)))

    def _close(self, known: TenantGaps, last_hash: bytes) -> None:
        turn = known.turns.pop(last_hash)
        if known.last_hashes.get(turn.before) == last_hash:
            del known.last_hashes[turn.before]
        waiting = known.waiting[turn.key]
        waiting.pop(last_hash, None)
        if not waiting:
            del known.waiting[turn.key]
        self._turns -= 1

    def _leave(self, known: TenantGaps, now_s: float, sees_all: bool) -> None:
        """Counts the conversations that have left. Each is counted once, so this takes O(1) a turn on average."""
        for key in list(known.waiting):
            table = known.tables.get(key)
            patience_s = FIRST_PATIENCE_S
            if table is not None and table.total >= MIN_ANSWERS:
                patience_s = min(MAX_GAP_S, PATIENCE * table.quantile_s(QUANTILE))
            waiting = known.waiting[key]
            while waiting and known.turns[next(iter(waiting))].ended_s < now_s - patience_s:
                waiting.popitem(last=False)
                if sees_all:
                    self._table(known, key).gone()
                    if key != NO_TOOL:
                        known.tools.gone()
            if not waiting:
                del known.waiting[key]
        while known.turns and next(iter(known.turns.values())).ended_s < now_s - MAX_GAP_S:
            self._close(known, next(iter(known.turns)))


def _kept_by_worth(gaps: Sequence[float], left: float) -> KeepUntil:
    """Returns Gittins' index by age: for answers of which so many were gone on with after gaps of these classes, and
    ``left`` were not. O(CLASSES^2)."""
    counts = [0.0] * CLASSES
    for number, count in enumerate(gaps):
        for place, part in enumerate(SPREAD if count else ()):
            counts[min(max(0, number + place - len(SPREAD) // 2), CLASSES - 1)] += count * part
    last = max((number for number, count in enumerate(counts) if count), default=-1)
    steps: list[tuple[float, float]] = []
    for first in range(last + 1):
        age_s, worth, uses, seconds = _EDGES_S[first] if first else 0.0, 0.0, 0.0, 0.0
        others = sum(counts[first:]) + left
        for number in range(first, last + 1):
            uses += counts[number]
            others -= counts[number]
            seconds += counts[number] * (_MIDDLES_S[number] - age_s)
            worth = max(worth, uses / (seconds + others * (_EDGES_S[number + 1] - age_s)))
        if not steps or not 1 / WORTH_RATIO < worth / steps[-1][1] < WORTH_RATIO:
            steps.append((age_s, worth))
    return KeepUntil(tuple(steps), min(MAX_GAP_S, _EDGES_S[last + 1]))


def _class_of(gap_s: float) -> int:
    return min(CLASSES - 1, max(0, int(math.log(max(gap_s, LEAST_GAP_S) / LEAST_GAP_S, STEP))))


# The first gap of each class, and one in its middle.
_EDGES_S = [LEAST_GAP_S * STEP**number for number in range(CLASSES + 1)]
_MIDDLES_S = [edge_s * math.sqrt(STEP) for edge_s in _EDGES_S]
