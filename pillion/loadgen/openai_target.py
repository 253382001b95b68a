"""Client of a server with OpenAI's HTTP API, for load. It uses asyncio's streams directly, to need little CPU time.

Each stream in flight has an HTTP/1.1 connection, which is reused after a complete answer.

    pick a connection (idle or new) -> send -> read: head | events ... | end -> reuse it
                                                     '- anything else -> close it, TargetError
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.parse
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from pillion.errors import ConfigError
from pillion.loadgen.target import AnswerMessage, AnswerRequest, TargetError, TokenCounts
from pillion.net.tls import client_context

READ_BYTES = 1 << 16
MAX_HEAD_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 22
ERROR_TEXT_BYTES = 500
CONNECT_TIMEOUT_S = 10.0
DESCRIBE_TIMEOUT_S = 10.0
DATA, DONE, BREAK = b"data:", b"[DONE]", b"\r\n"


class EventReader:
    """Parser of one HTTP/1.1 response and the payloads of its server-sent events (RFC 9112, 6 and 7.1). Sans-IO.

    Attributes:
        status: the response's status; 0 until the head is complete.
        done: True once the body is complete.
        reusable: whether the connection can then be reused.
    """

    def __init__(self) -> None:
        self.status = 0
        self.done = False
        self.reusable = True
        self._raw = b""
        self._line = b""
        self._left: int | None = None
        self._chunked = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the payloads that ``data`` completes: of events, or the lines of another body. Raises ValueError."""
        self._raw += data
        if not self.status and not self._head():
            return
        for data in self._body():
            *lines, self._line = (self._line + data).split(b"\n")
            if len(self._line) > MAX_LINE_BYTES:
                raise ValueError(f"a line of more than {MAX_LINE_BYTES} bytes")
            yield from (line[len(DATA) :].strip() for line in lines if line.startswith(DATA) or not self._events)
        if self.done and self._line:
            yield self._line[len(DATA) if self._events else 0 :].strip()
            self._line = b""

    def end(self) -> None:
        """Handle the end of the connection. Raises ValueError if the response is incomplete."""
        if not self.status or self._chunked or self._left:
            raise ValueError("the connection ended in the middle of the answer")
        self.done, self.reusable = True, False

    def _head(self) -> bool:
        head, found, rest = self._raw.partition(b"\r\n\r\n")
        if not found:
            if len(self._raw) > MAX_HEAD_BYTES:
                raise ValueError(f"a head of more than {MAX_HEAD_BYTES} bytes")
            return False
        first, *lines = head.decode("latin-1").split("\r\n")
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        version, status = first.split(" ", 2)[:2]
        self.status, self._raw = int(status), rest
        self._events = fields.get("content-type", "").startswith("text/event-stream")
        self._chunked = fields.get("transfer-encoding", "").lower() == "chunked"
        length = fields.get("content-length")
        self._left = None if length is None or self._chunked else int(length)
        self.reusable = fields.get("connection", "").lower() != "close" and version == "HTTP/1.1"
        self.done = self._left == 0
        return True

    def _body(self) -> Iterator[bytes]:
        if not self._chunked:
            data, self._raw = self._raw, b""
            if self._left is not None:
                self._left -= len(data)
                self.done = self._left <= 0
            yield data
        while self._chunked and not self.done:
            size, found, rest = self._raw.partition(BREAK)
            if not found:
                return
            length = int(size.split(b";")[0], 16)
            if len(rest) < length + len(BREAK):
                return
            self._raw = rest[length + len(BREAK) :]
            self.done = length == 0
            yield rest[:length]


class OpenAITarget:
    """An OpenAI server: ``/v1/completions`` for token ids, ``/v1/chat/completions`` for conversations.

    Args:
        url: e.g. ``http://host:8000`` or ``https://host/v1``.
        model: the server's name of the model; empty: the first of ``/v1/models``, after :meth:`describe`.
        ignore_eos: only sent if True, because OpenAI's own service rejects it.
        ca, cert, key: PEM files, for https.

    Raises ConfigError.
    """

    def __init__(
        self,
        model: str,
        ignore_eos: bool,
        temperature: float,
        *,
        target: str,
        api_key: str = "",
        ca: str | None = None,
        cert: str | None = None,
        key: str | None = None,
    ) -> None:
        url = urllib.parse.urlsplit(target)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigError(f"--target {target} is not http://HOST:PORT or https://HOST:PORT")
        if not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("the API key must be printable ASCII")
        self._host, self._port = url.hostname, url.port or (443 if url.scheme == "https" else 80)
        self._path = url.path.rstrip("/")
        self._path += "" if self._path.endswith("/v1") else "/v1"
        self._tls = client_context(ca, cert, key) if url.scheme == "https" else None
        self._fields = f"Host: {url.netloc}\r\nContent-Type: application/json\r\n"
        self._fields += f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._model = model
        self._sampling = {"temperature": temperature, "stream": True, "stream_options": {"include_usage": True}}
        self._sampling |= {"ignore_eos": True} if ignore_eos else {}
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def stream(self, request: AnswerRequest) -> AsyncGenerator[AnswerMessage, None]:
        kind = {"messages": request.messages} if request.messages else {"prompt": list(request.ids)}
        body = {"model": self._model, **kind, "max_tokens": request.output_tokens, **self._sampling}
        path = "/chat/completions" if request.messages else "/completions"
        async with contextlib.aclosing(self._exchange("POST", path, json.dumps(body).encode())) as payloads:
            async for payload in payloads:
                if payload and payload != DONE:
                    yield message_of(payload)

    async def describe(self) -> dict[str, Any]:
        try:
            async with asyncio.timeout(DESCRIBE_TIMEOUT_S):
                body = b"".join([payload async for payload in self._exchange("GET", "/models", b"")])
            models = [model["id"] for model in json.loads(body)["data"]]
            self._model = self._model or models[0]
        except TargetError as error:
            if error.status != "connection":
                raise
            raise TargetError(
                error.status,
                f"{error.message}; is port {self._port} of {self._host} the server's HTTP port (a gateway's is 8000 "
                f"unless --http-port says otherwise), and does it speak {'http' if self._tls is None else 'https'}?",
            ) from None
        except (ValueError, TypeError, LookupError, TimeoutError) as error:
            raise TargetError("models", f"/v1/models returned no list of models: {error!r}; say --model") from None
        return {"models": models}

    async def aclose(self) -> None:
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()

    async def _exchange(self, method: str, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._fields}Content-Length: {len(body)}\r\n\r\n"
        events, reader, writer = EventReader(), None, None
        try:
            reader, writer, data = await self._send(head.encode() + body)
            while data:
                for payload in events.feed(data):
                    if events.status != 200:
                        raise TargetError(f"HTTP {events.status}", payload[:ERROR_TEXT_BYTES].decode(errors="replace"))
                    yield payload
                if events.done:
                    break
                data = await reader.read(READ_BYTES)
            else:
                events.end()
            if events.status != 200:
                raise TargetError(f"HTTP {events.status}", "")
            if events.reusable:
                self._idle.append((reader, writer))
                writer = None
        except (OSError, ValueError) as error:
            raise TargetError("connection", f"{type(error).__name__}: {error}") from None
        finally:
            if writer is not None:
                writer.close()

    async def _send(self, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
        """Send a request on an idle connection, or on a new one if there is none or the server has closed it. Return
        the connection and the response's first bytes."""
        while True:
            reused = bool(self._idle)
            if reused:
                reader, writer = self._idle.pop()
            else:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
            data = b""
            try:
                writer.write(request)
                data = await reader.read(READ_BYTES)
            except ConnectionError:
                if not reused:
                    raise
            finally:
                if not data:
                    writer.close()
            if data:
                return reader, writer, data
            if not reused:
                raise ConnectionResetError("the server closed the connection without an answer")


def message_of(payload: bytes) -> AnswerMessage:
    """Decode the payload of one event. Raises TargetError for an error event and for an event not in OpenAI's form."""
    try:
        event = json.loads(payload)
        if error := event.get("error"):
            raise TargetError("error event", str(error.get("message", error) if isinstance(error, dict) else error))
        counts, usage = None, event.get("usage")
        if usage:
            details = usage.get("prompt_tokens_details") or {}
            counts = TokenCounts(
                usage.get("prompt_tokens", 0), details.get("cached_tokens") or 0, usage.get("completion_tokens", 0)
            )
        if not (choices := event.get("choices")):
            return AnswerMessage("", 0, counts)
        choice = choices[0]
        if (delta := choice.get("delta")) is not None:
            text = delta.get("content") or ""
            # The first event of a chat has a role and no token. An event has a token but no text if that ends within
            # a character.
            shown = text or delta.get("reasoning_content") or delta.get("reasoning")
            empty = "content" not in delta or bool(delta.get("role"))
        else:
            text = shown = choice.get("text") or ""
            empty = False
        return AnswerMessage(text, int(bool(shown) or not (empty or choice.get("finish_reason"))), counts)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        text = payload[:ERROR_TEXT_BYTES].decode(errors="replace")
        raise TargetError("bad event", f"{error!r} in {text}") from None
