"""Adapters' files from senders that fall silent or end wrongly: nothing hangs, and nothing remains."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest

from lab.testbed.conditions import WITHIN_S, until
from pillion.errors import InvalidRequest, Unavailable
from pillion.kvstore.adapters import adapter_pieces
from pillion.kvstore.adapters.adapter_pieces import next_piece, receive_files
from pillion.v1.kvnode_pb2 import AdapterPiece


class SilentSender:
    """Send one piece and then nothing. ``closed`` says whether its stream was ended properly."""

    def __init__(self) -> None:
        self.silent = asyncio.Event()
        self.closed = False

    async def pieces(self) -> AsyncGenerator[AdapterPiece, None]:
        try:
            yield AdapterPiece(file_name="adapter_config.json", total_bytes=9)
            self.silent.set()
            await asyncio.Event().wait()
        finally:
            self.closed = True


class RoomLeft:
    """A folder for files. ``left`` says whether its writer has gone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.left = False

    @contextlib.contextmanager
    def __call__(self, size_bytes: int) -> Iterator[Path]:
        try:
            yield self.folder
        finally:
            self.left = True


async def receive(sender: SilentSender, room: RoomLeft) -> None:
    async with contextlib.aclosing(sender.pieces()) as pieces:
        await receive_files(await next_piece(pieces), pieces, room)


async def test_a_silent_sender_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_pieces, "PIECE_TIMEOUT_S", 0.05)
    sender, room = SilentSender(), RoomLeft(tmp_path)
    with pytest.raises(Unavailable, match="silent"):
        await asyncio.wait_for(receive(sender, room), WITHIN_S)
    assert sender.closed
    assert room.left


async def test_a_receiver_that_is_cancelled_ends_its_thread_and_its_stream(tmp_path: Path) -> None:
    sender, room = SilentSender(), RoomLeft(tmp_path)
    receiving = asyncio.create_task(receive(sender, room))
    await asyncio.wait_for(sender.silent.wait(), WITHIN_S)
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(receiving, WITHIN_S)
    assert sender.closed
    await until("the end of the thread", lambda: room.left)


async def test_a_sender_that_never_starts_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_pieces, "PIECE_TIMEOUT_S", 0.05)

    async def pieces() -> AsyncGenerator[AdapterPiece, None]:
        await asyncio.Event().wait()
        yield AdapterPiece()

    with pytest.raises(Unavailable, match="silent"):
        await asyncio.wait_for(next_piece(pieces()), WITHIN_S)


async def test_an_adapter_stream_without_pieces_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        await receive_files(None, SilentSender().pieces(), RoomLeft(tmp_path))
