"""Adapters' files for workers whose machine lacks them: out of this machine's model cache, or another node's.

worker --ReadAdapter--> its node --the files are here--> pieces
                           '--they are not--> ReadAdapter at each other node, until one has them --> pieces

The node neither understands the files nor keeps what it passes on: the worker verifies them by their digest and keeps
them in the model cache of its machine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import BinaryIO

from pillion.adapter_folders import ADAPTER_FILES, ADAPTERS, cache_root, is_adapter_digest
from pillion.errors import InvalidRequest, NotFound, Overloaded, PillionError
from pillion.kvstore.client.node_client import NodeClient
from pillion.v1.kvnode_pb2 import AdapterPiece

log = logging.getLogger("pillion.kvnode")

# Adapters that are read here at once, those that are passed on included.
MAX_READS = 16
MAX_PIECE_BYTES = 2**19
# Nodes that are asked for one adapter.
MAX_ASKED_NODES = 16


class AdapterFileReads:
    """The reads of one node. ``addresses`` returns the address of each live node, by its id.

    Attributes:
        root: the model cache's folder.
        reading: reads that are under way.
    """

    def __init__(self, node_id: str, addresses: Callable[[], Awaitable[Mapping[str, str]]]) -> None:
        self._node_id = node_id
        self._addresses = addresses
        self.root = cache_root()
        self.reading = 0

    async def pieces(self, digest: str, ask_others: bool) -> AsyncGenerator[AdapterPiece, None]:
        """Yields the files of an adapter. Raises NotFound where no node that was asked has them, Overloaded where
        MAX_READS are under way, InvalidRequest for what is no digest."""
        if not is_adapter_digest(digest):
            raise InvalidRequest(f"{digest[:80]!r} is no digest of an adapter")
        if self.reading >= MAX_READS:
            raise Overloaded(f"{self._node_id} reads {MAX_READS} adapters already")
        self.reading += 1
        try:
            files = await asyncio.to_thread(_open_files, self.root / ADAPTERS / digest)
            async with aclosing(_read(files) if files else self._from_others(digest, ask_others)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            self.reading -= 1

    async def _from_others(self, digest: str, ask_others: bool) -> AsyncGenerator[AdapterPiece, None]:
        nodes = await self._addresses() if ask_others else {}
        for node_id in sorted(nodes.keys() - {self._node_id})[:MAX_ASKED_NODES]:
            client = NodeClient(nodes[node_id], self._node_id)
            begun = False
            try:
                async with aclosing(client.read_adapter(digest, ask_others=False)) as pieces:
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


def _open_files(folder: Path) -> list[BinaryIO]:
    """An adapter's files, open, so that the folder may be removed from now on; none where one of them is missing."""
    files: list[BinaryIO] = []
    try:
        files.extend((folder / name).open("rb") for name in ADAPTER_FILES)
    except OSError:
        for file in files:
            file.close()
        return []
    return files


async def _read(files: list[BinaryIO]) -> AsyncGenerator[AdapterPiece, None]:
    try:
        total_bytes = sum(file.seek(0, 2) for file in files)
        for name, file in zip(ADAPTER_FILES, files, strict=True):
            file.seek(0)
            yield AdapterPiece(file_name=name, total_bytes=total_bytes)
            total_bytes = 0
            while data := await asyncio.to_thread(file.read, MAX_PIECE_BYTES):
                yield AdapterPiece(data=data)
    finally:
        for file in files:
            file.close()
