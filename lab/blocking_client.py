"""Generator of pillion/client/client.py, the blocking client, from async_client.py: `make client`.

The generated file is committed; a test regenerates and compares it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "pillion" / "client"
# Applied in this order. Text without a match is an error, so the list cannot go stale.
REPLACEMENTS = (
    ("The SDK's asyncio client. :mod:`pillion.client.client` is", "The SDK's blocking client,"),
    ("this file by `make client`", "async_client.py by `make client`: edit that file"),
    ("Client of a cluster for one event loop; streams", "Blocking client of a cluster. Thread-safe; streams"),
    ("call: an asyncio channel belongs to the running loop.", "call; threads share it."),
    ("import grpc.aio\n", ""),
    ("grpc.aio.AioRpcError", "grpc.RpcError"),
    ("grpc.aio.Channel", "grpc.Channel"),
    ("AsyncGenerator[Delta, None]", "Generator[Delta, None, None]"),
    ("AsyncGenerator[Delta[Value], None]", "Generator[Delta[Value], None, None]"),
    ("AsyncGenerator", "Generator"),
    ("AsyncClient", "Client"),
    ("_AsyncStream", "_BlockingStream"),
    ("__aenter__", "__enter__"),
    ("__aexit__", "__exit__"),
    ("run_batch_async", "run_batch"),
    ("open_async", "open"),
    ("pause_async", "pause"),
    ("state_async", "state"),
    ("end_with_async", "end_with"),
    ("async def", "def"),
    ("async for", "for"),
    ("async with", "with"),
    ("await ", ""),
)


def blocking(text: str) -> str:
    """Return the blocking client's source from the asyncio client's. Raises ValueError for a stale replacement."""
    for old, new in REPLACEMENTS:
        if old not in text:
            raise ValueError(f"{old!r} does not occur in async_client.py")
        text = text.replace(old, new)
    if left := re.search(r"\b(async|await|aio)\b", text.partition('"""\n\n')[2]):
        raise ValueError(f"{left[0]!r} is left in the blocking client")
    for command in (["check", "--fix", "--select", "I"], ["format"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--quiet", "--stdin-filename", str(FOLDER / "client.py"), "-"]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout  # noqa: S603
    return text


if __name__ == "__main__":
    (FOLDER / "client.py").write_text(blocking((FOLDER / "async_client.py").read_text()))
