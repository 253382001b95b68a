"""Streams adapter files between machines, in pieces.

The contents are not interpreted: the requesting side verifies the files against the digest.
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
# Max silence of a sender before the transfer fails.
PIECE_TIMEOUT_S = 60.0


def open_files(folder: Path) -> list[BinaryIO]:
    """Open an adapter's files, which stay readable if the folder is removed; [] if one of them is missing."""
    files: list[BinaryIO] = []
    try:
        files.extend((folder / name).open("rb") for name in ADAPTER_FILES)
    except OSError:
        for file in files:
            file.close()
        return []
    return files


async def pieces_of(files: list[BinaryIO], digest: str = "") -> AsyncGenerator[AdapterPiece, None]:
    """Yield the contents of files from :func:`open_files` in pieces, then close them. The first piece has
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
    """Return the next piece, None at the end. Raises Unavailable if the sender is silent for PIECE_TIMEOUT_S."""
    try:
        async with asyncio.timeout(PIECE_TIMEOUT_S):
            return await anext(pieces, None)
    except TimeoutError:
        raise Unavailable(f"the sender of an adapter's files was silent for {PIECE_TIMEOUT_S:.0f} s") from None


async def receive_files(
    first: AdapterPiece | None,
    pieces: AsyncIterator[AdapterPiece],
    new_folder: Callable[[int], AbstractContextManager[Path]],
) -> None:
    """Write an adapter's files, on a thread, into a folder. ``new_folder`` gets their total bytes, yields the folder,
    and then verifies or stores it on the same thread. ``first`` is the first piece, or None if none was sent.

    When this returns or raises, even if cancelled, the thread has ended and ``pieces`` is no longer awaited. Raises
    InvalidRequest if the pieces are not an adapter's files, Unavailable for a silent sender, and the errors of
    ``pieces`` and ``new_folder``.
    """
    if first is None or not 0 < first.total_bytes <= MAX_ADAPTER_BYTES + MAX_CONFIG_BYTES + MAX_HEADER_BYTES:
        size_bytes = first.total_bytes if first else 0
        raise InvalidRequest(f"an adapter of {size_bytes} bytes; at most {MAX_ADAPTER_BYTES} are allowed")
    loop = asyncio.get_running_loop()
    reader: asyncio.Task[AdapterPiece | None] | None = None
    ended = False

    async def read() -> AdapterPiece | None:
        nonlocal reader
        if ended:
            raise asyncio.CancelledError
        reader = asyncio.current_task()
        return await next_piece(pieces)

    def read_next() -> AdapterPiece | None:
        return asyncio.run_coroutine_threadsafe(read(), loop).result()

    def write() -> None:
        with new_folder(first.total_bytes) as folder:
            _write(folder, first, read_next)

    writer = loop.run_in_executor(None, write)
    try:
        await asyncio.shield(writer)
    finally:
        ended = True
        if reader is not None:
            reader.cancel()
        # The thread may still be writing a file or checking its folder.
        await asyncio.wait([writer])


def _write(folder: Path, first: AdapterPiece, next_piece: Callable[[], AdapterPiece | None]) -> None:
    """Write the files that the pieces contain. Raises InvalidRequest unless they are the ADAPTER_FILES, each once, with
    the announced total size."""
    left_bytes, names = first.total_bytes, set(ADAPTER_FILES)
    piece: AdapterPiece | None = first
    with contextlib.ExitStack() as stack:
        file: BinaryIO | None = None
        while piece is not None:
            if piece.file_name:
                if piece.file_name not in names:
                    raise InvalidRequest(f"{piece.file_name[:80]!r} is not a file of an adapter, or was sent twice")
                names.remove(piece.file_name)
                file = stack.enter_context((folder / piece.file_name).open("xb"))
            left_bytes -= len(piece.data)
            if file is None or left_bytes < 0:
                raise InvalidRequest("the files of an adapter differ from what their sender announced")
            file.write(piece.data)
            piece = next_piece()
    if left_bytes or names:
        raise InvalidRequest("an adapter's files ended too early")
