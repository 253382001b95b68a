"""Work of the event loop's thread per callback, in calls and bytes, never seconds."""

from __future__ import annotations

import asyncio.events
import contextlib
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import msgspec
import pytest

_CALLBACK = asyncio.events.Handle._run.__code__


@dataclass
class LoopWork:
    """Max calls of Python and C functions in one callback, and max bytes of JSON in one piece."""

    calls: int = 0
    json_bytes: int = 0


@contextlib.contextmanager
def counted_loop_work(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopWork]:
    """Count the work on this thread, which runs the loop; other threads are ignored."""
    work, calls, most, thread = LoopWork(), 0, 0, threading.get_ident()

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls, most
        if event == "c_call":
            calls += 1
        elif event == "call":
            if frame.f_code is _CALLBACK:
                most = max(most, calls)
                calls = 0
            else:
                calls += 1

    def decode(raw: Any, **options: Any) -> Any:
        if threading.get_ident() == thread:
            work.json_bytes = max(work.json_bytes, len(bytes(raw)))
        return before(raw, **options)

    before = msgspec.json.decode
    monkeypatch.setattr(msgspec.json, "decode", decode)
    sys.setprofile(count)
    try:
        yield work
    finally:
        sys.setprofile(None)
        work.calls = max(most, calls)
        monkeypatch.setattr(msgspec.json, "decode", before)
