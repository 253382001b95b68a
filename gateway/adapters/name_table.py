"""Table of adapter names. Sans-IO (I9).

Names of --lora-modules are fixed. Other names are added and removed at all gateways: each change has a timestamp, the
latest one wins, and changes that the registry has lost are sent again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from pillion.host.adapter_folders import is_adapter_digest
from pillion.kvstore.index.shared_names import StampedValue

MAX_NAMES = 1024
# Max names in the table, including removed ones; the oldest removed ones are dropped.
MAX_CHANGES = 4 * MAX_NAMES
# Age at which removed names are dropped: a gateway that was disconnected for longer may bring them back.
FORGET_MS = 24 * 3600 * 1000


class NamedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter as clients name it.

    Attributes:
        parent: name of its model.
        digest: SHA-256 of its content, hexadecimal (I2).
        rank: largest rank of its matrices; 1 if it has none.
        path: folder that it was loaded from.
    """

    name: str
    parent: str
    digest: str
    rank: int
    path: str


class NameTable:
    """Adapters by name. Changes never affect those in ``fixed``."""

    def __init__(self, fixed: Iterable[NamedAdapter] = ()) -> None:
        self.fixed = {adapter.name: adapter for adapter in fixed}
        self._adapters = dict(self.fixed)
        # Latest change of each name, removals included.
        self._changes: dict[str, StampedValue] = {}
        self._unsent: set[str] = set()

    def find(self, name: str) -> NamedAdapter | None:
        """Return the adapter with this name, or None."""
        return self._adapters.get(name)

    def all(self) -> list[NamedAdapter]:
        """Return all adapters, by name."""
        return sorted(self._adapters.values(), key=lambda adapter: adapter.name)

    def put(self, adapter: NamedAdapter, now_ms: int) -> None:
        """Map a name to this adapter, unless the name is fixed."""
        self._change(adapter.name, msgspec.json.encode(adapter), now_ms)

    def remove(self, name: str, now_ms: int) -> None:
        """Remove a name."""
        self._change(name, b"", now_ms)

    def unsent(self) -> list[tuple[str, StampedValue]]:
        """Return the changes that the registry may lack."""
        return [(name, self._changes[name]) for name in sorted(self._unsent)]

    def merge(
        self, sent: Iterable[tuple[str, StampedValue]], registered: Mapping[str, StampedValue] | None, now_ms: int
    ) -> None:
        """Merge the registry's answer to the changes in ``sent``: ``registered`` is all of its names, or None if they
        have not changed since the last answer."""
        for name, change in sent:
            if self._changes.get(name) == change:
                self._unsent.discard(name)
        if registered is None:
            return
        for name, change in registered.items():
            own = self._changes.get(name)
            if own is None or own < change:
                self._apply(name, change)
                self._unsent.discard(name)
        for name, change in list(self._changes.items()):
            other = registered.get(name)
            if other is not None and other >= change:
                continue
            if change.value or change.stamp_ms > now_ms - FORGET_MS:
                self._unsent.add(name)
            else:
                del self._changes[name]
                self._unsent.discard(name)

    def _change(self, name: str, value: bytes, now_ms: int) -> None:
        before = self._changes.get(name)
        # Gateways' clocks differ: a later change must not lose to an earlier one.
        stamp_ms = now_ms if before is None else max(now_ms, before.stamp_ms + 1)
        self._apply(name, StampedValue(stamp_ms, value))
        self._unsent.add(name)

    def _apply(self, name: str, change: StampedValue) -> None:
        self._changes[name] = change
        if len(self._changes) > MAX_CHANGES:
            self._drop_oldest_removal(keep=name)
        if name in self.fixed:
            return
        self._adapters.pop(name, None)
        if change.value:
            try:
                adapter = msgspec.json.decode(change.value, type=NamedAdapter)
            except msgspec.DecodeError:
                return  # Written by a gateway of a newer version.
            # A writer to the registry must not be able to make workers fetch anything but a digest.
            if adapter.name == name and is_adapter_digest(adapter.digest):
                self._adapters[name] = adapter

    def _drop_oldest_removal(self, keep: str) -> None:
        """Drop the oldest removed name except ``keep``, as the registry does."""
        removed = [
            (change.stamp_ms, name) for name, change in self._changes.items() if not change.value and name != keep
        ]
        if removed:
            _, name = min(removed)
            del self._changes[name]
            self._unsent.discard(name)

    def check_integrity(self) -> None:
        """Raise AssertionError if the adapters do not follow from the changes and the fixed names."""
        assert self._unsent <= self._changes.keys()
        assert self._adapters.keys() <= self._changes.keys() | self.fixed.keys()
        assert all(self._adapters[name] == adapter for name, adapter in self.fixed.items())
        assert all(adapter.name == name for name, adapter in self._adapters.items())
