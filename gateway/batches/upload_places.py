"""Gives out the places for uploads: which clients may send files at the same time, and for how long. Sans-IO (I9).

A place is held for GRACE_S, and then for as long as its file comes at MIN_BYTES_PER_S. Where all places of a tenant,
or of the gateway, are taken, a newcomer gets that of the slowest upload that has had YIELD_S and comes at less than
YIELD_BYTES_PER_S. So uploads that drip keep nobody out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# Clients may upload at most MAX_UPLOADS files to one gateway at the same time, and those of one tenant at most
# TENANT_UPLOADS.
MAX_UPLOADS, TENANT_UPLOADS = 16, 4
GRACE_S, MIN_BYTES_PER_S = 60.0, 16 * 2**10
YIELD_S, YIELD_BYTES_PER_S = 10.0, 64 * 2**10


@dataclass(eq=False, slots=True)
class UploadPlace:
    """Represents the right of one client to upload a file now, its place.

    Attributes:
        size_bytes: number of bytes that have come of its body.
        lost: whether a newcomer has the place now.
    """

    tenant: str
    began_s: float
    lose: Callable[[], None]
    size_bytes: int = 0
    lost: bool = False

    @property
    def ends_s(self) -> float:
        """Gives the time when the place ends, unless more of the file comes."""
        return self.began_s + GRACE_S + self.size_bytes / MIN_BYTES_PER_S

    def pace(self, now_s: float) -> float:
        """Returns the bytes per second that have come so far."""
        return self.size_bytes / max(now_s - self.began_s, 1e-9)


class UploadPlaces:
    """Gives out the places for uploads to one gateway."""

    def __init__(self) -> None:
        self._taken: list[UploadPlace] = []

    def begin(self, tenant: str, now_s: float, lose: Callable[[], None]) -> UploadPlace | None:
        """Gives an upload a place; None where all are taken. ``lose`` is called when a newcomer gets the place."""
        mine = [place for place in self._taken if place.tenant == tenant]
        full = mine if len(mine) >= TENANT_UPLOADS else self._taken if len(self._taken) >= MAX_UPLOADS else []
        if full:
            old = [place for place in full if now_s - place.began_s >= YIELD_S]
            slow = [place for place in old if place.pace(now_s) < YIELD_BYTES_PER_S]
            if not slow:
                return None
            slowest = min(slow, key=lambda place: place.pace(now_s))
            slowest.lost = True
            self._taken.remove(slowest)
            slowest.lose()
        self._taken.append(UploadPlace(tenant, now_s, lose))
        return self._taken[-1]

    def end(self, place: UploadPlace) -> None:
        """Gives the place of an upload back."""
        if not place.lost:
            self._taken.remove(place)
