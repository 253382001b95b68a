"""What a component's log holds at each level."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import asyncio, logging, sys
from pillion.observability.log_format import set_up_logging
set_up_logging(sys.argv[1])
import grpc.aio
async def call():
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        logging.getLogger("pillion.gateway").debug("a line of ours")
        logging.getLogger("asyncio").debug("a line of asyncio's")
        logging.getLogger("urllib3.connectionpool").debug("a line of urllib3's")
        logging.getLogger("urllib3.connectionpool").warning("a warning of theirs")
asyncio.run(call())
"""


def lines(level: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", SCRIPT, level], capture_output=True, text=True, check=True)
    return [line.split(": ", 1)[1] for line in done.stderr.splitlines()]


def test_debug_is_for_our_own_lines() -> None:
    assert lines("debug") == ["a line of ours", "a warning of theirs"]
    assert lines("info") == ["a warning of theirs"]
    assert lines("error") == []
