"""Streams of a served model over both of a gateway's addresses during an event: their text and their pauses."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from lab.testbed.conditions import until, wait_for
from pillion import Client
from pillion.types import FinishReason

STREAM_TIMEOUT_S = 300.0
# Pause of a steady load's client between requests: concurrent starts need CPU as well.
THINK_S = 0.1


@dataclass(eq=False)
class WatchedStream:
    """One greedy answer of ``tokens`` tokens at its client; ``pieces``: their times and texts."""

    prompt: str
    tokens: int
    pieces: list[tuple[float, str]] = field(default_factory=list)
    finish: FinishReason | None = None

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.pieces)

    @property
    def pause_s(self) -> float:
        """Longest time between two pieces."""
        times = [at for at, _ in self.pieces]
        return max((after - before for before, after in itertools.pairwise(times)), default=0.0)

    def over_grpc(self, target: str) -> None:
        """Read it by the SDK."""
        with Client(target) as client:
            asked = {"max_tokens": self.tokens, "temperature": 0.0, "ignore_eos": True, "timeout_s": STREAM_TIMEOUT_S}
            for delta in client.generate(self.prompt, **asked):
                self._take(delta.text, delta.finish_reason)

    def over_http(self, address: str, model: str) -> None:
        """Read it by raw HTTP, without a client library that retries."""
        connection = http.client.HTTPConnection(address, timeout=STREAM_TIMEOUT_S)
        asked = {"model": model, "prompt": self.prompt, "max_tokens": self.tokens, "temperature": 0, "stream": True}
        with contextlib.closing(connection):
            body = json.dumps({**asked, "ignore_eos": True})
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            assert reply.status == 200, reply.read()
            for line in reply:
                said = line.decode().removeprefix("data: ").strip()
                if said == "[DONE]":
                    return
                if said:
                    event = json.loads(said)
                    assert "error" not in event, event
                    (choice,) = event["choices"]
                    self._take(choice["text"], choice["finish_reason"])
        raise ConnectionError("the answer broke off")

    def _take(self, text: str, finish: object) -> None:
        if text:
            self.pieces.append((time.monotonic(), text))
        if finish:
            self.finish = FinishReason(finish)


@dataclass(frozen=True)
class Addresses:
    """A gateway's two addresses, as host:port, and the requested model."""

    grpc: str
    http: str
    model: str

    @property
    def grpc_host(self) -> str:
        return self.grpc.rpartition(":")[0]

    @property
    def http_host(self) -> str:
        return self.http.rpartition(":")[0]

    @contextlib.contextmanager
    def streams(self, prompts: Sequence[str], tokens: int) -> Iterator[list[WatchedStream]]:
        """Begin a stream per prompt, every second one over HTTP. The block runs once each has output; afterwards all
        are read to their end. Raises errors of streams."""
        watched = [WatchedStream(prompt, tokens) for prompt in prompts]
        with ThreadPoolExecutor(len(watched)) as pool:
            asked = [
                pool.submit(stream.over_http, self.http, self.model)
                if number % 2
                else pool.submit(stream.over_grpc, self.grpc)
                for number, stream in enumerate(watched)
            ]
            wait_for(
                "the first piece of every stream",
                lambda: all(stream.pieces or read.done() for stream, read in zip(watched, asked, strict=True)),
                STREAM_TIMEOUT_S,
            )
            yield watched
            for read in asked:
                read.result(STREAM_TIMEOUT_S)


class SteadyLoad:
    """Clients that request known ``texts`` again and again, over both addresses, one at a time each.

    ``addresses`` returns the target of a new request, as a load balancer does. Nothing is retried: a refused or broken
    request is listed in ``lost``.
    """

    def __init__(self, addresses: Callable[[], Addresses], tokens: int, texts: Mapping[str, str]) -> None:
        self.answers: list[WatchedStream] = []
        self.lost: list[str] = []
        self._doors = addresses
        self._tokens = tokens
        self._texts = texts
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._reading: dict[int, tuple[Addresses, WatchedStream]] = {}

    async def arrived(self, address: str) -> None:
        """Wait until the requests in flight to this address have output or ended. Later ones are not waited for."""
        with self._lock:
            sent = [
                stream
                for addresses, stream in self._reading.values()
                if address in (addresses.grpc_host, addresses.http_host)
            ]

        def there() -> bool:
            with self._lock:
                reading = [stream for _, stream in self._reading.values()]
            return all(stream.pieces or stream not in reading for stream in sent)

        await until(f"requests to arrive at {address}", there, STREAM_TIMEOUT_S)

    def has(self, answers: int) -> bool:
        """Return True if this number of answers have come, or one has been lost."""
        return bool(self.lost) or len(self.answers) >= answers

    @property
    def differing(self) -> int:
        """Number of answers whose text changed."""
        return sum(stream.text != self._texts[stream.prompt] for stream in self.answers)

    @property
    def pause_s(self) -> float:
        """Longest time between two pieces of an answer."""
        return max(stream.pause_s for stream in self.answers)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Send requests during the block, with one client per text; those in flight are read to their end."""
        with ThreadPoolExecutor(len(self._texts)) as pool:
            for number in range(len(self._texts)):
                pool.submit(self._ask, number)
            try:
                yield
            finally:
                self._over.set()

    def _ask(self, number: int) -> None:
        for prompt in itertools.islice(itertools.cycle(self._texts), number, None):
            if self._over.wait(THINK_S):
                return
            with self._lock:
                stream, addresses = WatchedStream(prompt, self._tokens), self._doors()
                self._reading[number] = addresses, stream
            try:
                if number % 2:
                    stream.over_http(addresses.http, addresses.model)
                else:
                    stream.over_grpc(addresses.grpc)
            except Exception as error:
                self.lost.append(f"{addresses}: {type(error).__name__}: {error}")
            else:
                self.answers.append(stream)
            finally:
                with self._lock:
                    del self._reading[number]
