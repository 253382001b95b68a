"""Defines the seam at which a room pins prefixes in a KV node's pool, as tenants ask for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from pillion.config import KVNodeFlags
from pillion.errors import InvalidRequest
from pillion.kvstore.ledger.ledger import Ledger
from pillion.kvstore.ledger.ledger_pins import LedgerPins
from pillion.kvstore.ledger.tree import BlockTree
from pillion.rooms import Seam, entered_one
from pillion.v1.kvnode_pb2 import (
    ListPrefixPinsReply,
    ListPrefixPinsRequest,
    PinPrefixRequest,
    PrefixPin,
    UnpinPrefixRequest,
)


class PoolPins:
    """Answers callers of a KV node about prefix pins. This class pins none, and refuses all calls with
    InvalidRequest."""

    def pin_prefix(self, request: PinPrefixRequest) -> PrefixPin:
        """Pins a chain for a tenant."""
        self._refuse()

    def drop(self, request: UnpinPrefixRequest) -> bool:
        """Ends a prefix pin; returns whether it existed."""
        self._refuse()

    def listed(self, request: ListPrefixPinsRequest) -> ListPrefixPinsReply:
        """Returns the prefix pins of an owner."""
        self._refuse()

    def ending_in(self, chain: Sequence[bytes]) -> list[PinPrefixRequest]:
        """Returns the prefix pins whose last block is one of a chain, as requests that would make them elsewhere."""
        return []

    async def run(self) -> None:
        """Ends pins whose time is over, until it is cancelled; this class only waits. It is called when the pool has
        its shape."""
        await asyncio.Event().wait()

    async def aclose(self) -> None:
        """Ends this object's background work after the last call. Idempotent."""

    def _refuse(self) -> NoReturn:
        raise InvalidRequest("this KV node pins no prefixes: it was installed without (docs/rooms.md)")


class PinMakers(NamedTuple):
    """Makes the two objects that pin prefixes: a ledger's, from its tree, and a pool's, from its ledger."""

    of_tree: Callable[[BlockTree], LedgerPins]
    of_ledger: Callable[[Ledger], PoolPins]


NO_PINS = PinMakers(lambda tree: LedgerPins(), lambda ledger: PoolPins())
PINS = Seam[Callable[[KVNodeFlags], PinMakers]]("kvstore.node.pins")


def pins_of(flags: KVNodeFlags) -> PinMakers:
    """Returns the makers of the objects that pin prefixes, by a node's flags."""
    return entered_one(PINS)(flags)
