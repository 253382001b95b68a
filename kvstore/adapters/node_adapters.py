"""Serves adapter files to workers whose machine lacks them, from this machine's model cache or another node's.

worker --ReadAdapter--> its node --the files are here--> pieces
                           '--missing--> ReadAdapter at each other node, until one has them --> pieces

gateway --FindAdapters--> adapters missing here --KeepAdapter--> the model cache of this machine

The node does not interpret the files, and does not store those that it forwards. Workers verify all files by digest,
received or read from the model cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path

from pillion.config import KVNodeFlags
from pillion.errors import InvalidRequest, NotFound, Overloaded, PillionError
from pillion.host.adapter_folders import (
    ADAPTERS,
    STORE_BYTES,
    TRANSFER_TIMEOUT_S,
    cache_root,
    is_adapter_digest,
    temporary_folder,
)
from pillion.kvstore.adapters.adapter_pieces import next_piece, open_files, pieces_of, receive_files
from pillion.kvstore.client.node_client import NodeClient
from pillion.kvstore.index.registry import Addresses
from pillion.v1.kvnode_pb2 import AdapterPiece

log = logging.getLogger("pillion.kvnode")

# Adapters being read or stored at the same time.
MAX_READS = 16
# Other nodes asked for an adapter that this machine lacks.
MAX_ASKED_NODES = 16
MAX_ASKED_DIGESTS = 4096


class NodeAdapters:
    """Reads and stores the adapters in the model cache of one node's machine.

    Attributes:
        addresses: returns node id -> address of the live nodes.
        root: the model cache's folder.
        reading: number of adapters being read or stored.
    """

    def __init__(self, flags: KVNodeFlags, addresses: Addresses) -> None:
        self._node_id = flags.node_id
        self.addresses = addresses
        self.root = cache_root()
        self._store_bytes = STORE_BYTES
        self.reading = 0

    async def pieces(self, digest: str, ask_others: bool) -> AsyncGenerator[AdapterPiece, None]:
        """Yield an adapter's files in pieces. Raises NotFound if neither this machine nor, with ``ask_others``, another
        node has them, Overloaded beyond MAX_READS, and InvalidRequest for an invalid digest."""
        with self._counted(digest):
            files = await asyncio.to_thread(open_files, self.root / ADAPTERS / digest)
            async with aclosing(pieces_of(files) if files else self._fetch_from_nodes(digest, ask_others)) as pieces:
                async for piece in pieces:
                    yield piece

    async def missing(self, digests: Sequence[str]) -> list[str]:
        """Return the digests of the adapters that this machine lacks, and mark the present ones as used now. Raises
        InvalidRequest for an invalid digest or too many digests."""
        if len(digests) > MAX_ASKED_DIGESTS or not all(map(is_adapter_digest, digests)):
            raise InvalidRequest(f"expected at most {MAX_ASKED_DIGESTS} adapter digests, each of 64 hexadecimal digits")
        return await asyncio.to_thread(lambda: [digest for digest in digests if not self._touch(digest)])

    def _touch(self, digest: str) -> bool:
        """Mark an adapter as used now; return False if this machine lacks it."""
        with contextlib.suppress(OSError):
            os.utime(self.root / ADAPTERS / digest)
            return True
        return False

    async def keep(self, pieces: AsyncIterator[AdapterPiece]) -> None:
        """Store an adapter's files under the digest in the first piece. Raises InvalidRequest for files that are not
        an adapter, Unavailable for a silent sender, Overloaded beyond MAX_READS or if the disk is full."""
        first = await next_piece(pieces)
        digest = first.digest if first is not None else ""
        with self._counted(digest):
            try:
                await receive_files(first, pieces, partial(self._new_folder, digest))
            except OSError as error:
                raise Overloaded(f"{self._node_id} cannot store an adapter: {error.strerror or error}") from None
        log.info("adapter %s is stored on this machine", digest[:12])

    @contextlib.contextmanager
    def _counted(self, digest: str) -> Iterator[None]:
        """Count one adapter in ``reading`` within the block. Raises InvalidRequest for an invalid digest, Overloaded
        beyond MAX_READS."""
        if not is_adapter_digest(digest):
            raise InvalidRequest(f"{digest[:80]!r} is not an adapter's digest")
        if self.reading >= MAX_READS:
            raise Overloaded(f"{self._node_id} reads {MAX_READS} adapters already")
        self.reading += 1
        try:
            yield
        finally:
            self.reading -= 1

    @contextlib.contextmanager
    def _new_folder(self, digest: str, size_bytes: int) -> Iterator[Path]:
        """Yield a temporary folder, and rename it to the adapter's folder at the end, so that other processes never see
        a partial adapter."""
        target = self.root / ADAPTERS / digest
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(target.parent, size_bytes, self._store_bytes) as draft:
            yield draft
            try:
                draft.rename(target)
            except OSError:
                # Another process has stored the adapter meanwhile.
                if not target.is_dir():
                    raise

    async def _fetch_from_nodes(self, digest: str, ask_others: bool) -> AsyncGenerator[AdapterPiece, None]:
        nodes = await self.addresses() if ask_others else {}
        for node_id in sorted(nodes.keys() - {self._node_id})[:MAX_ASKED_NODES]:
            client = NodeClient(nodes[node_id], self._node_id)
            begun = False
            try:
                async with aclosing(client.read_adapter(digest, TRANSFER_TIMEOUT_S, ask_others=False)) as pieces:
                    async for piece in pieces:
                        begun = True
                        yield piece
            except PillionError as error:
                if begun:
                    raise
                log.info("%s does not have adapter %s: %s", node_id, digest[:12], error.message)
            else:
                return
            finally:
                await client.aclose()
        raise NotFound(f"no KV node that was asked has the files of adapter {digest[:12]}")
