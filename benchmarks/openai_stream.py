"""Streams completions over an OpenAI HTTP API with nothing but asyncio: a driver that costs its server little.

One connection per answer. Tokens are counted by ``continuous_usage_stats``, which says with every message how many the
answer has by now; the text would not tell, and a server may put several tokens into one message.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

READ_LIMIT_BYTES = 2**20
DATA, DONE = b"data:", b"[DONE]"


class UsageCounter:
    """Turns lines of a server-sent event stream into tokens per message."""

    def __init__(self) -> None:
        self.tokens = 0

    def line(self, line: bytes) -> int:
        """New tokens that ``line`` brings; 0 for what is no message, or one without a token.

        Raises RuntimeError for an error in the stream, or a message without usage.
        """
        if not line.startswith(DATA):
            return 0
        text = line.removeprefix(DATA).strip()
        if text == DONE:
            return 0
        message: dict[str, Any] = json.loads(text)
        if "error" in message:
            raise RuntimeError(f"the server answers {message['error']}")
        if not message.get("usage"):
            raise RuntimeError("a message says no usage: the server does not know continuous_usage_stats")
        before, self.tokens = self.tokens, int(message["usage"]["completion_tokens"])
        return self.tokens - before


@dataclass(frozen=True, slots=True)
class OpenAIStream:
    """``POST /v1/completions`` at a host and port, greedy, of exactly so many tokens."""

    host: str
    port: int
    model: str

    async def __call__(self, prompt: Sequence[int], max_tokens: int) -> AsyncIterator[int]:
        """Tokens of each message. Raises RuntimeError for any answer that is no stream."""
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=READ_LIMIT_BYTES)
        try:
            writer.write(self._request(prompt, max_tokens))
            await read_head(reader)
            counter, rest = UsageCounter(), b""
            async for chunk in chunks(reader):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if tokens := counter.line(line):
                        yield tokens
        finally:
            writer.close()

    def _request(self, prompt: Sequence[int], max_tokens: int) -> bytes:
        asked = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        body = json.dumps(asked).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + body


async def read_head(reader: asyncio.StreamReader) -> None:
    """Read up to the body. Raises RuntimeError unless it is a 200 of chunks."""
    head = await reader.readuntil(b"\r\n\r\n")
    status = head.split(b" ", 2)[1]
    if status != b"200":
        said = await reader.read(2000)
        raise RuntimeError(f"the server answers {status.decode()}: {said.decode(errors='replace')}")
    if b"transfer-encoding: chunked" not in head.lower():
        raise RuntimeError("the server's answer is no stream")


async def chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The pieces of a chunked body (RFC 9112, 7.1), without trailers."""
    while size := int((await reader.readline()).split(b";")[0], 16):
        piece = await reader.readexactly(size + 2)
        yield piece[:-2]
