"""Regions: memory outside the pool that workers of one node share by a key, such as weights. Sans-IO (I9).

    requested --first user: fill--> filling --filled--> ready --last user leaves--> idle --room is needed--> gone
                   ^                  |  ^                ^-------- requested --------+
                   |                  |  +-- others wait --> ready, once filled
                   +-- next waiter ---+-- the filler dies: the next waiter fills; without waiters: gone

Exactly one user fills a region, and its connection proves that it is alive. All other users get it filled. An idle
region stays, so that a restarted worker need not reload its weights.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum

from pillion.errors import Conflict, Overloaded

MAX_REGIONS = 64
# Max users waiting for one region.
MAX_WAITERS = 256


class RegionGrant(StrEnum):
    """What a user may do with a region: FILL it, or read it when it is READY."""

    FILL = "fill"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class Granted:
    """``user`` gets the region, to fill or to read it."""

    user: int
    key: str
    state: RegionGrant


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
            actions += self._make_room()
            region = self._regions[key] = _Region(size_bytes, filler=user)
            region.users.add(user)
            actions.append(Granted(user, key, RegionGrant.FILL))
        elif region.filler is None:
            region.users.add(user)
            actions.append(Granted(user, key, RegionGrant.READY))
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
        actions: list[Action] = [Granted(waiter, key, RegionGrant.READY) for waiter in region.waiting]
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
            return [Granted(region.filler, key, RegionGrant.FILL)]
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
            findings.append(f"{len(self._regions)} regions, at most {self._max_regions} are allowed")
        for key, region in self._regions.items():
            named = {user for user, region_key in self._key_of.items() if region_key == key}
            if named != region.users | region.waiting.keys() or region.users & region.waiting.keys():
                findings.append(f"region {key}: its users and the users that name it differ")
            if region.filler is not None and region.users != {region.filler}:
                findings.append(f"region {key}: it has users besides its filler before it is filled")
            if region.filler is None and region.waiting:
                findings.append(f"region {key}: {len(region.waiting)} users wait although it is ready")
            if len(region.waiting) > self._max_waiters:
                findings.append(f"region {key}: {len(region.waiting)} users wait, at most {self._max_waiters} may")
        if set(self._key_of.values()) - self._regions.keys():
            findings.append("a region that is gone has users")
        if findings:
            raise Conflict("; ".join(findings))

    def _make_room(self) -> list[Action]:
        """Make room for one more region, dropping the longest idle one if necessary. Raises Overloaded."""
        if len(self._regions) < self._max_regions:
            return []
        for key, region in self._regions.items():
            if not region.users:
                del self._regions[key]
                return [Dropped(key)]
        raise Overloaded(f"{self._max_regions} regions are in use already")
