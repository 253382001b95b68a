"""`python -m lab.benchmarks.edge`: the throughput of the gateway itself, and the latency that it adds.

A decode worker that computes nothing sends batches of one token for each stream; the real gateway, pinned to one core,
makes server-sent events or gRPC messages of them; the clients share the other core with the worker and only count.
Throughput is measured at full speed, and latency, from the worker's send to the client's read, at a fixed rate.

On a machine with two cores the worker and the clients can be the limit. So each rate is given twice: by the clock, and
by the processor time of the gateway's process, which is the rate that the gateway could carry on a core of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import contextlib
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import psutil
from rich.table import Table

from lab.benchmarks.edge_processes import MODEL
from lab.benchmarks.report import save, show_table
from lab.testbed.redis import running_redis
from pillion.loadgen.figures import percentile
from pillion.v1 import common_pb2, gateway_pb2

START_TIMEOUT_S = 30.0
GATEWAY_CORE, OTHER_CORE = 0, 1
# A token of the worker is one letter, so the letters of an event are its tokens, however many were merged.
TEXT = re.compile(rb'"text":"([^"]*)"')
END = b"data: [DONE]"


@dataclass(slots=True)
class ReceivedStream:
    """A stream as its client received it: raw data with times, which is parsed only when all streams have ended.

    After parsing, ``arrived`` has the time of each token and ``messages`` the number of events or messages.
    """

    came: list[tuple[float, bytes]] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)
    messages: int = 0
    ended: float = 0.0

    def read_events(self) -> None:
        """Parses server-sent events, which may be cut anywhere."""
        ends = list(itertools.accumulate(len(data) for _, data in self.came))
        for event in TEXT.finditer(b"".join(data for _, data in self.came)):
            moment = self.came[bisect.bisect_left(ends, event.end())][0]
            self._add(moment, len(event[1]))

    def read_messages(self) -> None:
        """Parses gRPC messages."""
        for moment, data in self.came:
            self._add(moment, len(gateway_pb2.GenerateResponse.FromString(data).token_ids))

    def _add(self, moment: float, tokens: int) -> None:
        self.arrived += [moment] * tokens
        self.messages += 1


class SseClient(asyncio.Protocol):
    """A client of one completion that keeps the raw answer, with next to no work of its own."""

    def __init__(self, body: bytes, stream: ReceivedStream) -> None:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self._request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        self._stream = stream
        self._last = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        """Sends the request."""
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Keeps the data with its time."""
        now = time.monotonic()
        self._stream.came.append((now, data))
        # The terminating event may be cut in two.
        self._last = self._last[-len(END) :] + data[-2 * len(END) :]
        if END in self._last:
            self._stream.ended = now
            self._transport.close()
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fails the stream if the connection ends before the last event."""
        if not self.done.done():
            self.done.set_exception(exc or RuntimeError("the gateway closed the connection"))


async def read_sse(address: str, tokens: int, stream: ReceivedStream) -> None:
    """Reads one stream of server-sent events."""
    host, _, port = address.rpartition(":")
    asked = {"model": MODEL, "prompt": "hello", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(lambda: SseClient(json.dumps(asked).encode(), stream), host, int(port))
    await client.done


async def read_grpc(channel: grpc.aio.Channel, tokens: int, stream: ReceivedStream) -> None:
    """Reads one stream of gRPC messages and keeps them serialized."""
    sampling = common_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True)
    request = gateway_pb2.GenerateRequest(model=MODEL, text="hello", sampling=sampling)
    generate: Any = channel.unary_stream("/pillion.v1.Gateway/Generate")
    call = generate(request.SerializeToString())
    async for data in call:
        stream.came.append((time.monotonic(), data))
    stream.ended = time.monotonic()


async def read_all(kind: str, ports: dict[str, str], streams: int, tokens: int) -> list[ReceivedStream]:
    """Reads all streams at once."""
    received = [ReceivedStream() for _ in range(streams)]
    if kind == "sse":
        await asyncio.gather(*(read_sse(ports["http"], tokens, stream) for stream in received))
    else:
        async with grpc.aio.insecure_channel(ports["grpc"]) as channel:
            await asyncio.gather(*(read_grpc(channel, tokens, stream) for stream in received))
    return received


def read(kind: str, received: list[ReceivedStream], tokens: int) -> None:
    """Parses all received streams. Raises RuntimeError where a stream has not all of its tokens."""
    for stream in received:
        stream.read_events() if kind == "sse" else stream.read_messages()
        if len(stream.arrived) != tokens:
            raise RuntimeError(f"a stream of {tokens} tokens brought {len(stream.arrived)}")


@contextlib.contextmanager
def running(streams: int, step_s: float) -> Iterator[tuple[pathlib.Path, psutil.Process]]:
    """Runs Redis, the worker and the gateway; yields their folder and the gateway's process."""
    with tempfile.TemporaryDirectory(prefix="edge-") as name, running_redis() as redis:
        folder = pathlib.Path(name)
        commands = {
            "worker": (OTHER_CORE, [str(streams), str(step_s)]),
            "gateway": (GATEWAY_CORE, list[str]()),
        }
        started: list[subprocess.Popen[bytes]] = []
        try:
            for role, (core, rest) in commands.items():
                command = [sys.executable, "-m", "lab.benchmarks.edge_processes", role, name, redis.url, *rest]
                started.append(subprocess.Popen(command, env={**os.environ, "EDGE_CORE": str(core)}))
            await_file(folder / "ports.json", started)
            yield folder, psutil.Process(started[1].pid)
        finally:
            for process in started:
                process.kill()
                process.wait()


def await_file(path: pathlib.Path, processes: list[subprocess.Popen[bytes]]) -> Any:
    """Returns a JSON file's content as soon as the file is there. Raises RuntimeError where a process fails."""
    until = time.monotonic() + START_TIMEOUT_S
    while not path.exists():
        if time.monotonic() > until or any(process.poll() is not None for process in processes):
            raise RuntimeError(f"no {path.name}: a process of the benchmark has failed")
        time.sleep(0.02)
    return json.loads(path.read_text())


def throughput(kind: str, streams: int, tokens: int) -> dict[str, Any]:
    """Measures the rate of ``streams`` streams at full speed, once."""
    with running(streams, 0.0) as (folder, gateway):
        ports = json.loads((folder / "ports.json").read_text())
        before = sum(gateway.cpu_times()[:2])
        received = asyncio.run(read_all(kind, ports, streams, tokens))
        cpu_s = sum(gateway.cpu_times()[:2]) - before
    read(kind, received, tokens)
    first, last = min(stream.arrived[0] for stream in received), max(stream.ended for stream in received)
    messages, total = sum(stream.messages for stream in received), streams * tokens
    return {
        "kind": kind,
        "streams": streams,
        "tokens": total,
        "tokens_per_s": round(total / (last - first)),
        "messages_per_s": round(messages / (last - first)),
        "tokens_per_gateway_cpu_s": round(total / cpu_s),
        "messages_per_gateway_cpu_s": round(messages / cpu_s),
    }


def latency(kind: str, streams: int, tokens: int, tokens_per_s: int) -> dict[str, Any]:
    """Measures the time from the worker's send to the client's read, at a fixed rate over all streams."""
    with running(streams, streams / tokens_per_s) as (folder, _):
        ports = json.loads((folder / "ports.json").read_text())
        received = asyncio.run(read_all(kind, ports, streams, tokens))
        sent = await_file(folder / "times.json", [])
    read(kind, received, tokens)
    # The first tokens compete with the admission of the requests.
    pairs = [list(zip(stream.arrived, sent, strict=True))[8:] for stream in received]
    added = [(came - went) * 1000 for stream in pairs for came, went in stream]
    return {
        "kind": kind,
        "streams": streams,
        "tokens_per_s": tokens_per_s,
        "tokens_per_message": round(streams * tokens / sum(stream.messages for stream in received), 3),
        "added_ms": {f"p{percent}": round(percentile(added, percent), 3) for percent in (50, 90, 99)},
    }


def show(rates: list[dict[str, Any]], waits: list[dict[str, Any]]) -> None:
    """Prints a table of rates and a table of latencies."""
    table = Table(title="As fast as it goes, gateway on one core")
    for column in ("", "streams", "tokens/s", "messages/s", "tokens per gateway CPU s", "messages per gateway CPU s"):
        table.add_column(column, justify="right")
    for row in rates:
        figures = (row["streams"], row["tokens_per_s"], row["messages_per_s"])
        by_cpu = (row["tokens_per_gateway_cpu_s"], row["messages_per_gateway_cpu_s"])
        table.add_row(row["kind"], *(f"{value:,}" for value in (*figures, *by_cpu)))
    show_table(table)
    table = Table(title="Added on the way from worker to client, ms")
    for column in ("", "streams", "tokens/s", "p50", "p90", "p99"):
        table.add_column(column, justify="right")
    for row in waits:
        added = (f"{value:.2f}" for value in row["added_ms"].values())
        table.add_row(row["kind"], str(row["streams"]), f"{row['tokens_per_s']:,}", *added)
    show_table(table)


def main() -> None:
    """Measure, print, write results/edge.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=4000, help="tokens of each stream at full speed")
    parser.add_argument("--rate", type=int, default=1000, help="tokens/s over all streams, for latencies")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each latency run")
    parser.add_argument("--only", choices=("sse", "grpc"), help="one of the two protocols")
    parser.add_argument("--no-save", action="store_true")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {OTHER_CORE})
    kinds = (arguments.only,) if arguments.only else ("sse", "grpc")
    rates = [throughput(kind, arguments.streams, arguments.tokens) for kind in kinds]
    waits = [
        latency(kind, streams, max(16, int(arguments.rate * arguments.seconds / streams)), arguments.rate)
        for kind in kinds
        for streams in (16, arguments.streams)
    ]
    show(rates, waits)
    if not arguments.no_save:
        print(f"saved {save('edge', {'throughput': rates, 'latency': waits})}")


if __name__ == "__main__":
    main()
