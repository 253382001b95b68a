"""Streams adapter files between machines, in pieces.

The contents are not interpreted: the requester of a digest verifies the files.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from pillion.errors import InvalidRequest, Unavailable
from pillion.host.adapter_folders import ADAPTER_FILES, MAX_ADAPTER_BYTES, MAX_CONFIG_BYTES, MAX_HEADER_BYTES
from pillion.v1.kvnode_pb2 import AdapterPiece

MAX_PIECE_BYTES = 2**19
PIECE_TIMEOUT_S = 60.0


def open_files(folder: Path) -> list[BinaryIO]:
    """Open an adapter's files, so that the folder may be removed meanwhile; empty if one of them is missing."""
    files: list[BinaryIO] = []
    try:
        files.extend((folder / name).open("rb") for name in ADAPTER_FILES)
    except OSError:
        for file in files:
            file.close()
        return []
    return files


async def pieces_of(files: list[BinaryIO], digest: str = "") -> AsyncGenerator[AdapterPiece, None]:
    """Yield the files from :func:`open_files` in pieces, and close them; the first piece has ``digest``."""
    try:
        total_bytes = sum(file.seek(0, 2) for file in files)
        for name, file in zip(ADAPTER_FILES, files, strict=True):
            file.seek(0)
            yield AdapterPiece(digest=digest, file_name=name, total_bytes=total_bytes)
            digest, total_bytes = "", 0
            while data := await asyncio.to_thread(file.read, MAX_PIECE_BYTES):
                yield AdapterPiece(data=data)
    finally:
        for file in files:
            file.close()


async def next_piece(pieces: AsyncIterator[AdapterPiece]) -> AdapterPiece | None:
    """Return the next piece, None at the end. Raises Unavailable if the sender is silent for PIECE_TIMEOUT_S."""
    try:
        async with asyncio.timeout(PIECE_TIMEOUT_S):
            return await anext(pieces, None)
    except TimeoutError:
        raise Unavailable(f"the sender of an adapter's files was silent for {PIECE_TIMEOUT_S:.0f} s") from None


async def receive_files(
    first: AdapterPiece | None,
    pieces: AsyncIterator[AdapterPiece],
    room: Callable[[int], AbstractContextManager[Path]],
) -> None:
    """Write files, on a thread, into the folder that ``room`` yields for their total size; ``room`` then verifies or
    stores the folder on the same thread. ``first`` is the first piece, or None if there was none.

    However it ends, cancelled included, the thread has ended and ``pieces`` is not awaited any more. Raises
    InvalidRequest if the pieces are not an adapter's files, Unavailable for a silent sender, and whatever ``pieces``
    and ``room`` raise.
    """
    if first is None or not 0 < first.total_bytes <= MAX_ADAPTER_BYTES + MAX_CONFIG_BYTES + MAX_HEADER_BYTES:
        size_bytes = first.total_bytes if first else 0
        raise InvalidRequest(f"an adapter of {size_bytes} bytes; it may have {MAX_ADAPTER_BYTES}")
    loop = asyncio.get_running_loop()
    reading: asyncio.Task[AdapterPiece | None] | None = None
    over = False

    async def read() -> AdapterPiece | None:
        nonlocal reading
        if over:
            raise asyncio.CancelledError
        reading = asyncio.current_task()
        return await next_piece(pieces)

    def read_next() -> AdapterPiece | None:
        return asyncio.run_coroutine_threadsafe(read(), loop).result()

    def write() -> None:
        with room(first.total_bytes) as folder:
            _write(folder, first, read_next)

    writing = loop.run_in_executor(None, write)
    try:
        await asyncio.shield(writing)
    finally:
        over = True
        if reading is not None:
            reading.cancel()
        # The thread may still be writing a file or checking its folder.
        await asyncio.wait([writing])


def _write(folder: Path, first: AdapterPiece, next_piece: Callable[[], AdapterPiece | None]) -> None:
    left_bytes, names = first.total_bytes, set(ADAPTER_FILES)
    piece: AdapterPiece | None = first
    with contextlib.ExitStack() as stack:
        file: BinaryIO | None = None
        while piece is not None:
            if piece.file_name:
                if piece.file_name not in names:
                    raise InvalidRequest(f"an adapter has no file {piece.file_name[:80]!r}, or only one")
                names.remove(piece.file_name)
                file = stack.enter_context((folder / piece.file_name).open("xb"))
            left_bytes -= len(piece.data)
            if file is None or left_bytes < 0:
                raise InvalidRequest("the files of an adapter differ from what their sender announced")
            file.write(piece.data)
            piece = next_piece()
    if left_bytes or names:
        raise InvalidRequest("an adapter's files ended too early")
