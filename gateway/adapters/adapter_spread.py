"""Brings the files of adapters that have names to the machines of KV nodes, where their workers find them.

a name is given, a node joins --> which of the adapters does its machine lack? --> it gets those that this gateway has

a gateway learns a name whose files it lacks --> it gets them from a KV node: names outlive the gateways that gave them

On one machine all components share the model cache, so nothing is lacking. What cannot be brought is tried again later;
meanwhile workers ask their nodes, and these each other.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import aclosing
from functools import partial

from pillion.adapter_folders import ADAPTERS, cache_root
from pillion.engine.adapters.adapter_store import AdapterStore
from pillion.errors import NotFound, PillionError
from pillion.gateway.links.defects import Defects
from pillion.gateway.links.node_link import NodeLink
from pillion.kvstore.transfer.adapter_pieces import next_piece, open_files, receive_files

log = logging.getLogger("pillion.gateway")

# How often a node is asked again though nothing has changed: its machine's copies then count as used.
ASK_AGAIN_S = 600.0
# How often it is asked again while it lacks something.
RETRY_S = 5.0
# Nodes that are asked for an adapter, one after the other, while they fail to give it.
MAX_ASKED_NODES = 4


class AdapterSpread:
    """The files of one gateway's adapters.

    Args:
        nodes: returns the links to all KV nodes.
        digests: returns the adapters that have names now.
        store: that of this machine.
    """

    def __init__(
        self, nodes: Callable[[], Iterable[NodeLink]], digests: Callable[[], Iterable[str]], store: AdapterStore
    ) -> None:
        self._nodes = nodes
        self._digests = digests
        self._root = cache_root()
        self._store = store
        # Adapters that this machine has, and when the others are asked for again.
        self._here: set[str] = set()
        self._fetch_again_s = float("-inf")
        # By node: the session and the adapters that it was asked about, and until when that holds.
        self._asked: dict[str, tuple[int, frozenset[str], float]] = {}
        self._spreading = asyncio.Lock()

    async def spread(self) -> None:
        """Brings each node what its machine lacks. Failures are tried again by a later call."""
        async with self._spreading:
            digests = frozenset(self._digests())
            nodes = [node for node in self._nodes() if node.alive]
            self._asked = {node.node_id: self._asked[node.node_id] for node in nodes if node.node_id in self._asked}
            now = time.monotonic()
            asked = [self._bring(node, digests) for node in nodes if digests and not self._knows(node, digests, now)]
            await asyncio.gather(*asked)

    async def fetch(self) -> None:
        """Gets the adapters that have names and that this machine lacks from KV nodes. What fails is tried again."""
        digests = set(self._digests())
        self._here &= digests
        unknown = digests - self._here
        if not unknown or time.monotonic() < self._fetch_again_s:
            return
        complete = True
        for digest in sorted(unknown):
            try:
                await asyncio.to_thread(self._store.find, digest)
            except NotFound:
                if not await self._fetch(digest):
                    complete = False
                    continue
            self._here.add(digest)
        if not complete:
            self._fetch_again_s = time.monotonic() + RETRY_S

    async def _fetch(self, digest: str) -> bool:
        """Whether one of the nodes gave an adapter's files."""
        limits, room = self._store.limits, partial(self._store.receive, digest)
        for node in [node for node in self._nodes() if node.alive][:MAX_ASKED_NODES]:
            try:
                found = node.client.read_adapter(digest, limits.transfer_s)
                async with asyncio.timeout(limits.transfer_s), aclosing(found) as pieces:
                    await receive_files(await next_piece(pieces), pieces, room, limits.file_bytes)
            except (PillionError, OSError, TimeoutError) as error:
                log.info("adapter %s did not come from KV node %s: %s", digest[:12], node.node_id, error)
                if isinstance(error, NotFound):
                    # The node has asked the others.
                    return False
            else:
                log.info("adapter %s came from KV node %s", digest[:12], node.node_id)
                return True
        return False

    async def run(self, interval_s: float) -> None:
        """Spreads and fetches what changes, until it is cancelled."""
        defects = Defects("the spreading of adapters")
        while True:
            try:
                await self.spread()
                await self.fetch()
            except Exception as error:  # noqa: BLE001  (without it, other machines would lack new adapters)
                defects.note(error)
            await asyncio.sleep(interval_s)

    def _knows(self, node: NodeLink, digests: frozenset[str], now: float) -> bool:
        epoch, known, until_s = self._asked.get(node.node_id, (0, frozenset(), 0.0))
        return epoch == node.epoch and digests <= known and now < until_s

    async def _bring(self, node: NodeLink, digests: frozenset[str]) -> None:
        epoch, complete = 0, True
        try:
            epoch = node.epoch
            for digest in await node.client.missing_adapters(sorted(digests)):
                files = await asyncio.to_thread(open_files, self._root / ADAPTERS / digest)
                if files:
                    await node.client.keep_adapter(digest, files, self._store.limits.transfer_s)
                    log.info("adapter %s is on the machine of KV node %s now", digest[:12], node.node_id)
                # Else another gateway has loaded it, and brings it.
                complete = complete and bool(files)
        except (PillionError, OSError) as error:
            log.info("KV node %s did not get the adapters that it lacks: %s", node.node_id, error)
            complete = False
        self._asked[node.node_id] = (epoch, digests, time.monotonic() + (ASK_AGAIN_S if complete else RETRY_S))
