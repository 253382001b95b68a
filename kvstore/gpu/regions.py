"""Regions: memory beside the pool that workers of one node share under a key, such as weights. Sans-IO (I9).

    requested --first user: fill--> filling --filled--> ready --last user leaves--> idle --room is needed--> gone
                   ^                  |  ^                ^-------- requested --------+
                   |                  |  +-- others wait --> ready, once filled
                   +-- next waiter ---+-- the filler dies: the next waiter fills; without waiters: gone

Exactly one user fills a region, and its connection proves that it is alive. Others only get filled regions. An idle
region stays, so that a restarted worker need not reload its weights.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from pillion.errors import Conflict, Overloaded

MAX_REGIONS = 64
MAX_WAITERS = 256

FILL, READY = "fill", "ready"


@dataclass(frozen=True, slots=True)
class Granted:
    """``user`` gets the region, to fill or to read it: ``state`` is FILL or READY."""

    user: int
    key: str
    state: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """The region has no user any more; free its memory."""

    key: str


Action = Granted | Dropped


@dataclass(slots=True)
class _Region:
    """State of one region. ``filler`` is None once it is filled; ``waiting`` is in order of arrival."""

    size_bytes: int
    filler: int | None
    users: set[int] = field(default_factory=set)
    waiting: OrderedDict[int, None] = field(default_factory=OrderedDict)


class Regions:
    """All regions of a node. A user is one connection, under a number that is never reused."""

    def __init__(self, max_regions: int = MAX_REGIONS, max_waiters: int = MAX_WAITERS) -> None:
        self._max_regions, self._max_waiters = max_regions, max_waiters
        self._regions: OrderedDict[str, _Region] = OrderedDict()
        self._key_of: dict[int, str] = {}

    def ask(self, user: int, key: str, size_bytes: int) -> list[Action]:
        """Request a region for ``user``, which gets it now or later. Raises Conflict if the region exists with another
        size, Overloaded if there are too many regions or waiters."""
        actions: list[Action] = []
        region = self._regions.get(key)
        if region is not None and region.size_bytes != size_bytes:
            raise Conflict(f"the region has {region.size_bytes} bytes, {size_bytes} were asked for")
        if region is not None and region.filler is not None and len(region.waiting) >= self._max_waiters:
            raise Overloaded(f"{self._max_waiters} workers wait for this region already")
        if region is None:
            actions += self._room_for_one()
            region = self._regions[key] = _Region(size_bytes, filler=user)
            region.users.add(user)
            actions.append(Granted(user, key, FILL))
        elif region.filler is None:
            region.users.add(user)
            actions.append(Granted(user, key, READY))
        else:
            region.waiting[user] = None
        self._key_of[user] = key
        return actions

    def filled(self, user: int) -> list[Action]:
        """Mark the region of ``user`` as filled and grant it to all waiters. Raises Conflict for another user."""
        key = self._key_of.get(user, "")
        region = self._regions.get(key)
        if region is None or region.filler != user:
            raise Conflict("this process may not fill the region")
        region.filler = None
        actions: list[Action] = [Granted(waiter, key, READY) for waiter in region.waiting]
        region.users.update(region.waiting)
        region.waiting.clear()
        return actions

    def remove_user(self, user: int) -> list[Action]:
        """Remove ``user`` from the users or waiters of its region. Idempotent."""
        key = self._key_of.pop(user, "")
        region = self._regions.get(key)
        if region is None:
            return []
        region.waiting.pop(user, None)
        region.users.discard(user)
        if region.filler == user:
            if not region.waiting:
                del self._regions[key]
                return [Dropped(key)]
            region.filler = region.waiting.popitem(last=False)[0]
            region.users.add(region.filler)
            return [Granted(region.filler, key, FILL)]
        if not region.users:
            self._regions.move_to_end(key)
        return []

    def state(self, key: str) -> str:
        """Return a region's state: "filling", "ready", "idle", or "gone"."""
        region = self._regions.get(key)
        if region is None:
            return "gone"
        return "filling" if region.filler is not None else "ready" if region.users else "idle"

    def drop_idle(self) -> list[Action]:
        """Drop all idle regions, to free memory."""
        keys = [key for key, region in self._regions.items() if not region.users]
        for key in keys:
            del self._regions[key]
        return [Dropped(key) for key in keys]

    def check_integrity(self) -> None:
        """Raise Conflict on inconsistency."""
        findings = []
        if len(self._regions) > self._max_regions:
            findings.append(f"{len(self._regions)} regions, at most {self._max_regions} may be")
        for key, region in self._regions.items():
            named = {user for user, its_key in self._key_of.items() if its_key == key}
            if named != region.users | region.waiting.keys() or region.users & region.waiting.keys():
                findings.append(f"region {key}: its users and those who name it differ")
            if region.filler is not None and region.users != {region.filler}:
                findings.append(f"region {key}: others than its filler see it before it is filled")
            if region.filler is None and region.waiting:
                findings.append(f"region {key}: {len(region.waiting)} wait for what is ready")
            if len(region.waiting) > self._max_waiters:
                findings.append(f"region {key}: {len(region.waiting)} wait, at most {self._max_waiters} may")
        if set(self._key_of.values()) - self._regions.keys():
            findings.append("a region that is gone has users")
        if findings:
            raise Conflict("; ".join(findings))

    def _room_for_one(self) -> list[Action]:
        if len(self._regions) < self._max_regions:
            return []
        for key, region in self._regions.items():
            if not region.users:
                del self._regions[key]
                return [Dropped(key)]
        raise Overloaded(f"{self._max_regions} regions are in use already")
