"""Records what every name of an adapter means now. Sans-IO (I9).

Names of --lora-modules stand as long as the gateway runs. The others come and go on all gateways: each change has a
stamp, the later of two changes stays, and what a registry has lost is brought to it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from pillion.host.adapter_folders import is_adapter_digest
from pillion.kvstore.index.shared_names import StampedValue

MAX_NAMES = 1024
# The table has at most this many names that mean something or once did; of the names that mean nothing any more the
# oldest are forgotten.
MAX_CHANGES = 4 * MAX_NAMES
# A gateway that nobody reaches may come back within this time and will not bring names again that were unloaded
# meanwhile.
FORGET_MS = 24 * 3600 * 1000


class NamedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """Describes an adapter as clients name it.

    Attributes:
        parent: the name of its model.
        digest: SHA-256 of its content, hexadecimal (I2).
        rank: the largest rank of its matrices; 1 where it has none.
        path: the folder that it was loaded from.
    """

    name: str
    parent: str
    digest: str
    rank: int
    path: str


class NameTable:
    """Holds adapters by name. ``fixed`` are the adapters whose names no change may touch."""

    def __init__(self, fixed: Iterable[NamedAdapter] = ()) -> None:
        self.fixed = {adapter.name: adapter for adapter in fixed}
        self._adapters = dict(self.fixed)
        # These are the changes to names while the gateways run; names that were unloaded are among them.
        self._changes: dict[str, StampedValue] = {}
        self._unsent: set[str] = set()

    def find(self, name: str) -> NamedAdapter | None:
        """Returns the adapter that a name means now, or None."""
        return self._adapters.get(name)

    def all(self) -> list[NamedAdapter]:
        """Returns all adapters, by name."""
        return sorted(self._adapters.values(), key=lambda adapter: adapter.name)

    def put(self, adapter: NamedAdapter, now_ms: int) -> None:
        """Makes a name that is not fixed mean this adapter."""
        self._change(adapter.name, msgspec.json.encode(adapter), now_ms)

    def remove(self, name: str, now_ms: int) -> None:
        """Notes that a name means no adapter any more."""
        self._change(name, b"", now_ms)

    def unsent(self) -> list[tuple[str, StampedValue]]:
        """Returns the changes to names that the registry may not have."""
        return [(name, self._changes[name]) for name in sorted(self._unsent)]

    def merge(
        self, sent: Iterable[tuple[str, StampedValue]], found: Mapping[str, StampedValue] | None, now_ms: int
    ) -> None:
        """Takes the registry's answer to changes that were ``sent``: ``found`` is all names that the registry has, or
        None where they have not changed since the last answer."""
        for name, change in sent:
            if self._changes.get(name) == change:
                self._unsent.discard(name)
        if found is None:
            return
        for name, change in found.items():
            mine = self._changes.get(name)
            if mine is None or mine < change:
                self._take(name, change)
                self._unsent.discard(name)
        for name, change in list(self._changes.items()):
            theirs = found.get(name)
            if theirs is not None and theirs >= change:
                continue
            if change.value or change.stamp_ms > now_ms - FORGET_MS:
                self._unsent.add(name)
            else:
                del self._changes[name]
                self._unsent.discard(name)

    def _change(self, name: str, value: bytes, now_ms: int) -> None:
        before = self._changes.get(name)
        # Clocks of gateways differ: a change that was made after another one must not lose to it.
        stamp_ms = now_ms if before is None else max(now_ms, before.stamp_ms + 1)
        self._take(name, StampedValue(stamp_ms, value))
        self._unsent.add(name)

    def _take(self, name: str, change: StampedValue) -> None:
        self._changes[name] = change
        if len(self._changes) > MAX_CHANGES:
            self._forget_one(but=name)
        if name in self.fixed:
            return
        self._adapters.pop(name, None)
        if change.value:
            try:
                adapter = msgspec.json.decode(change.value, type=NamedAdapter)
            except msgspec.DecodeError:
                return  # A gateway of a newer version wrote this adapter, which this one cannot serve.
            # Nobody who can write to the registry may make a worker ask for anything but a digest.
            if adapter.name == name and is_adapter_digest(adapter.digest):
                self._adapters[name] = adapter

    def _forget_one(self, but: str) -> None:
        """Forgets, of the names that were unloaded, the one that was unloaded first, as the registry does."""
        gone = [(change.stamp_ms, name) for name, change in self._changes.items() if not change.value and name != but]
        if gone:
            _, name = min(gone)
            del self._changes[name]
            self._unsent.discard(name)

    def check_integrity(self) -> None:
        """Raises AssertionError where the adapters are not what the changes and the fixed names say."""
        assert self._unsent <= self._changes.keys()
        assert self._adapters.keys() <= self._changes.keys() | self.fixed.keys()
        assert all(self._adapters[name] == adapter for name, adapter in self.fixed.items())
        assert all(adapter.name == name for name, adapter in self._adapters.items())
