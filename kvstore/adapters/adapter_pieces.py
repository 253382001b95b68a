"""Sends and receives adapters' files as a stream of pieces, from machine to machine.

Nothing here reads what is in the files. Whoever asks for an adapter by its digest verifies that they are that
adapter's.
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
# While files are written, the other side may be silent for at most this long.
PIECE_TIMEOUT_S = 60.0


def open_files(folder: Path) -> list[BinaryIO]:
    """Returns an adapter's files, open, so that the folder may be removed from now on; none where one of them is
    missing."""
    files: list[BinaryIO] = []
    try:
        files.extend((folder / name).open("rb") for name in ADAPTER_FILES)
    except OSError:
        for file in files:
            file.close()
        return []
    return files


async def pieces_of(files: list[BinaryIO], digest: str = "") -> AsyncGenerator[AdapterPiece, None]:
    """Yields in pieces the files that :func:`open_files` returned, and closes them; the first piece names
    ``digest``."""
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
    """Returns the next piece of an adapter's files, None at the end. Raises Unavailable where the other side is silent
    for PIECE_TIMEOUT_S."""
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
    """Writes files, on a thread, into the folder that ``room`` yields when it is given their bytes; on the same thread
    that folder is then verified or kept. ``first`` is the first piece, or None where there was none.

    Whichever way it ends, cancelled too, the thread has ended and nobody waits for ``pieces`` any more. Raises
    InvalidRequest where the pieces are no files of an adapter, Unavailable for a silent sender, and what ``pieces`` and
    ``room`` raise.
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
        # The thread may still have to finish writing a file, or checking its folder.
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
                raise InvalidRequest("these are other files of an adapter than their sender said")
            file.write(piece.data)
            piece = next_piece()
    if left_bytes or names:
        raise InvalidRequest("an adapter's files ended too early")
