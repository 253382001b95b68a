"""What every name of an adapter means now. Sans-IO (I9).

Names of --lora-modules stand as long as the gateway runs. The others come and go on all gateways: each change has a
stamp, the later of two changes stays, and what a registry has lost is brought to it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from pillion.adapter_folders import is_adapter_digest
from pillion.kvstore.index.shared_names import StampedValue

MAX_NAMES = 1024
# Names that mean something, and those that do not any more; of these, the oldest are forgotten where there are more.
MAX_CHANGES = 4 * MAX_NAMES
# How long a gateway that nobody reaches may come back without bringing again what was unloaded meanwhile.
FORGET_MS = 24 * 3600 * 1000


class NamedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter as clients name it.

    Attributes:
        parent: the name of its model.
        digest: SHA-256 of its content, hexadecimal (I2).
        rank: its largest rank.
        path: the folder that it was loaded from.
    """

    name: str
    parent: str
    digest: str
    rank: int
    path: str


class NameTable:
    """Adapters by name. ``fixed`` are those that no change touches."""

    def __init__(self, fixed: Iterable[NamedAdapter] = ()) -> None:
        self.fixed = {adapter.name: adapter for adapter in fixed}
        self._adapters = dict(self.fixed)
        # What changed while the gateways run, unloaded ones included.
        self._changes: dict[str, StampedValue] = {}
        self._unsent: set[str] = set()

    def find(self, name: str) -> NamedAdapter | None:
        """What a name means now."""
        return self._adapters.get(name)

    def all(self) -> list[NamedAdapter]:
        """All adapters, by name."""
        return sorted(self._adapters.values(), key=lambda adapter: adapter.name)

    def put(self, adapter: NamedAdapter, now_ms: int) -> None:
        """Gives a name that is not fixed a new meaning."""
        self._change(adapter.name, msgspec.json.encode(adapter), now_ms)

    def remove(self, name: str, now_ms: int) -> None:
        """Takes a name's meaning away."""
        self._change(name, b"", now_ms)

    def unsent(self) -> list[tuple[str, StampedValue]]:
        """The changes that the registry may not have."""
        return [(name, self._changes[name]) for name in sorted(self._unsent)]

    def merge(
        self, sent: Iterable[tuple[str, StampedValue]], found: Mapping[str, StampedValue] | None, now_ms: int
    ) -> None:
        """Takes the registry's answer to changes that were ``sent``: ``found`` is all that it has, None where that is
        what it had before."""
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
        # Clocks of gateways differ: a change that was made behind another one must not lose to it.
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
                return  # A newer gateway's, which this one cannot serve.
            # Whoever may write to the registry must not make a worker ask for anything else.
            if adapter.name == name and is_adapter_digest(adapter.digest):
                self._adapters[name] = adapter

    def _forget_one(self, but: str) -> None:
        """Forgets the name that was unloaded first, as the registry does."""
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
