"""Copies the files of named adapters to the machines of KV nodes, where workers find them.

a name is added, a node joins --> ask the node which adapters its machine lacks --> send those that are here
a gateway learns a name whose files it lacks --> fetched from a KV node: names outlive the gateways that added them

On one machine all components share the model cache, so nothing is copied. Failed copies are retried later; meanwhile
workers ask their nodes, and nodes each other.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import aclosing
from functools import partial

from pillion.engine.adapters.adapter_store import AdapterStore
from pillion.errors import NotFound, PillionError
from pillion.gateway.links.defects import Defects
from pillion.gateway.links.node_link import NodeLink
from pillion.host.adapter_folders import ADAPTERS, TRANSFER_TIMEOUT_S, cache_root
from pillion.kvstore.adapters.adapter_pieces import next_piece, open_files, pieces_of, receive_files

log = logging.getLogger("pillion.gateway")

# Interval of queries to a node while nothing changes, which mark its machine's copies as used.
ASK_AGAIN_S = 600.0
RETRY_S = 5.0
MAX_ASKED_NODES = 4


class AdapterSpread:
    """Distribution of one gateway's adapter files.

    Args:
        nodes: returns the links to all KV nodes.
        digests: returns the digests of named adapters.
        store: adapter copies on this machine.
    """

    def __init__(
        self, nodes: Callable[[], Iterable[NodeLink]], digests: Callable[[], Iterable[str]], store: AdapterStore
    ) -> None:
        self._nodes = nodes
        self._digests = digests
        self._root = cache_root()
        self._store = store
        # Digests of adapters on this machine, and when to try again to fetch the others.
        self._local: set[str] = set()
        self._fetch_again_s = float("-inf")
        # Per node: its epoch, the adapters it was asked about, and the expiry of its answer.
        self._asked: dict[str, tuple[int, frozenset[str], float]] = {}
        self._spreading = asyncio.Lock()

    async def spread(self) -> None:
        """Send each node the adapters that its machine lacks. Failures are retried by a later call."""
        async with self._spreading:
            digests = frozenset(self._digests())
            nodes = [node for node in self._nodes() if node.alive]
            self._asked = {node.node_id: self._asked[node.node_id] for node in nodes if node.node_id in self._asked}
            now = time.monotonic()
            asked = [
                self._send_missing(node, digests)
                for node in nodes
                if digests and not self._is_up_to_date(node, digests, now)
            ]
            await asyncio.gather(*asked)

    async def fetch(self) -> None:
        """Fetch the named adapters that this machine lacks from KV nodes. Failures are retried by a later call."""
        digests = set(self._digests())
        self._local &= digests
        unknown = digests - self._local
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
            self._local.add(digest)
        if not complete:
            self._fetch_again_s = time.monotonic() + RETRY_S

    async def _fetch(self, digest: str) -> bool:
        """Fetch an adapter from the first node that has it; return False if none has."""
        room = partial(self._store.receive, digest)
        for node in [node for node in self._nodes() if node.alive][:MAX_ASKED_NODES]:
            try:
                stream = node.client.read_adapter(digest, TRANSFER_TIMEOUT_S)
                async with asyncio.timeout(TRANSFER_TIMEOUT_S), aclosing(stream) as pieces:
                    await receive_files(await next_piece(pieces), pieces, room)
            except (PillionError, OSError, TimeoutError) as error:
                log.info("adapter %s could not be fetched from KV node %s: %s", digest[:12], node.node_id, error)
                if isinstance(error, NotFound):
                    # This node has already asked the others.
                    return False
            else:
                log.info("adapter %s was fetched from KV node %s", digest[:12], node.node_id)
                return True
        return False

    async def run(self, interval_s: float) -> None:
        """Distribute and fetch adapter files until cancelled."""
        defects = Defects("the spreading of adapters")
        while True:
            try:
                await self.spread()
                await self.fetch()
            except Exception as error:  # noqa: BLE001  (without it, other machines would lack new adapters)
                defects.note(error)
            await asyncio.sleep(interval_s)

    def _is_up_to_date(self, node: NodeLink, digests: frozenset[str], now: float) -> bool:
        epoch, known, until_s = self._asked.get(node.node_id, (0, frozenset(), 0.0))
        return epoch == node.epoch and digests <= known and now < until_s

    async def _send_missing(self, node: NodeLink, digests: frozenset[str]) -> None:
        """Send a node the adapters of ``digests`` that its machine lacks and this one has."""
        epoch, complete = 0, True
        try:
            epoch = node.epoch
            for digest in await node.client.missing_adapters(sorted(digests)):
                files = await asyncio.to_thread(open_files, self._root / ADAPTERS / digest)
                if files:
                    await node.client.keep_adapter(pieces_of(files, digest), TRANSFER_TIMEOUT_S)
                    log.info("adapter %s was copied to the machine of KV node %s", digest[:12], node.node_id)
                # Adapters that are not on this machine are sent by the gateway that loaded them.
                complete = complete and bool(files)
        except (PillionError, OSError) as error:
            log.info("copying adapters to KV node %s failed: %s", node.node_id, error)
            complete = False
        self._asked[node.node_id] = (epoch, digests, time.monotonic() + (ASK_AGAIN_S if complete else RETRY_S))
