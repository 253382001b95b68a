"""Defines the seam at which a room exchanges blocks with other nodes; the plain implementation exchanges none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from pillion.config import KVNodeFlags
from pillion.errors import Unavailable
from pillion.kvstore.ledger.records import PoolShape
from pillion.kvstore.memory.memory import PoolMemory
from pillion.kvstore.node.pool import Pool
from pillion.kvstore.transfer.fetch import BlockSource
from pillion.kvstore.transfer.hand_over import HandOver
from pillion.rooms import Seam, entered_one

# Such a function returns the address of each node's gRPC services by node id.
Addresses = Callable[[], Awaitable[Mapping[str, str]]]
# Such a function asks the index: it returns how many of the first blocks of a chain (32 bytes per hash) each node has.
LookUp = Callable[[bytes], Awaitable[Mapping[str, int]]]
# A service is the name of a gRPC service, and the function that adds it to a server.
Service = tuple[str, Callable[[Any], None]]


class BlockExchange:
    """Exchanges blocks with other nodes: this class fetches none, and lets nobody read any. The node's loop makes all
    calls."""

    @property
    def transport(self) -> str:
        """Gives the name of the transport that moves blocks between nodes."""
        return "none"

    async def start(self) -> None:
        """Begins the exchange when the node starts. Raises ConfigError where the transport that the flags name cannot
        be used."""

    def services(self) -> Sequence[Service]:
        """Returns the gRPC services that the node offers to others."""
        return ()

    def open_pool(self, shape: PoolShape, memory: PoolMemory, pool: Pool) -> None:
        """Notes that the pool has got its shape and its memory, which its owner closes."""

    def source(self, node_id: str) -> BlockSource:
        """Returns another node as a source of blocks. Raises Unavailable."""
        raise Unavailable(f"no blocks come from {node_id}: this installation lacks the room 'transfers'")

    async def run(self) -> None:
        """Does the exchange's background work until it is cancelled."""
        await asyncio.Event().wait()

    async def hand_over(self, plan: HandOver[bytes], look_up: LookUp) -> None:
        """Lets other nodes fetch what a plan wants them to have, until it is over. A failure hands over less."""

    async def leave(self) -> None:
        """Ends all connections, and with them what is fetched. Idempotent."""

    async def aclose(self) -> None:
        """Closes what is left of the exchange; nothing is fetched any more. Idempotent."""


# The room makes a node's exchange from its flags, the other nodes' addresses, and a function that returns this node's
# boot epoch as the index knows it.
MakeExchange = Callable[[KVNodeFlags, Addresses, Callable[[], int]], BlockExchange]
EXCHANGE = Seam[MakeExchange]("kvstore.transfer.exchange")


def exchange_of(flags: KVNodeFlags, addresses: Addresses, boot_epoch: Callable[[], int]) -> BlockExchange:
    """Makes the exchange of a node with other nodes. Raises ConfigError for a transport that the node cannot have."""
    return entered_one(EXCHANGE)(flags, addresses, boot_epoch)
