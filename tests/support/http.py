"""Raw HTTP: sends exact bytes, and returns replies uninterpreted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Reply:
    """A whole response; header names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        """OpenAI's error object, which has exactly these fields."""
        said = self.json
        assert set(said) == {"error"}
        assert set(said["error"]) == {"message", "type", "param", "code"}
        return said["error"]

    @property
    def events(self) -> list[Any]:
        """Data of each server-sent event, without the final [DONE]."""
        assert self.body.endswith(b"\n\n")
        blocks = self.body.decode().split("\n\n")[:-1]
        assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
        assert blocks[-1] == "data: [DONE]"
        return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


def request_bytes(method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> bytes:
    """Return a request with Connection: close. ``body`` is sent raw if it is bytes, else as JSON."""
    sent = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    said = {
        "Host": "localhost",
        "Connection": "close",
        **({} if body is None else JSON),
        "Content-Length": str(len(sent)),
    }
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in {**said, **(headers or {})}.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + sent


@contextlib.asynccontextmanager
async def connected(address: str, source: str = "") -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect to ``host:port``, optionally from another local address; closes at once on exit."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), local_addr=(source, 0) if source else None)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def send(address: str, raw: bytes) -> Reply:
    """Send bytes and read until the server closes."""
    async with connected(address) as (reader, writer):
        writer.write(raw)
        return parse_reply(await reader.read())


async def call(
    address: str, path: str, body: Any = None, headers: dict[str, str] | None = None, method: str = ""
) -> Reply:
    """Send a GET, or a POST if there is a body."""
    return await send(address, request_bytes(method or ("GET" if body is None else "POST"), path, body, headers))


def parse_reply(raw: bytes) -> Reply:
    """Parse the reply of a closed connection."""
    head, _, rest = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = b""
        while True:
            size, _, rest = rest.partition(b"\r\n")
            if not int(size, 16):
                break
            body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
        rest = body
    return Reply(int(first.split()[1]), headers, rest)


def data_segments(connection: socket.socket) -> int:
    """Return the number of data segments that a TCP connection has received: Linux's ``tcpi_data_segs_in``."""
    return int(struct.unpack_from("I", connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256), 152)[0])
