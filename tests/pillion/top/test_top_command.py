"""`pillion top` as a user runs it: pages over real HTTP, one frame for scripts, and a terminal that is left clean."""

from __future__ import annotations

import contextlib
import http.server
import os
import pathlib
import pty
import select
import signal
import ssl
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from prometheus_client import generate_latest

from pillion.observability import metric_catalog as names
from pillion.observability import metrics_export
from pillion.observability.metrics import Meters
from pillion.top.top import NO_PARSER, WINDOW_S, PageReader
from pillion.top.top_figures import ClusterReading, History
from pillion.types import ClusterStatus, ComponentStatus
from pillion.v1 import gateway_pb2_grpc
from pillion.wire.public import status_to_pb
from testbed.conditions import WITHIN_S
from testbed.ports import free_port
from tests.support.processes import started

ROOT = pathlib.Path(__file__).resolve().parents[3]
STATUS = ClusterStatus(
    version="1",
    components=(
        ComponentStatus(component_id="gateway-0", role="gateway"),
        ComponentStatus(component_id="decode-0", role="decode"),
    ),
    active_requests=0,
    prompt_tokens=0,
    cached_tokens=0,
    completion_tokens=0,
    index_available=True,
)


def test_rates_are_taken_over_the_window() -> None:
    history, looks = History(WINDOW_S), [ClusterReading(at_s, STATUS) for at_s in (0, 4, 8, 12, 12 + 2 * WINDOW_S)]
    assert history.newest() is None
    assert [before and before.at_s for before in map(history.add, looks)] == [None, 0, 0, 4, 12]
    assert history.newest() is looks[-1]
    # Where only so old a reading is wanted, one after a rest has none before it.
    short = History(WINDOW_S, WINDOW_S)
    assert [before and before.at_s for before in map(short.add, looks)] == [None, 0, 0, 4, None]
    assert short.newest() is looks[-1]


@contextlib.contextmanager
def serving_pages(bodies: dict[str, tuple[int, bytes]]) -> Iterator[tuple[int, list[str]]]:
    """A real HTTP server; yields its port and the Authorization of each request."""
    keys: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            keys.append(self.headers.get("Authorization", ""))
            code, body = bodies[self.path]
            self.send_response(code)
            self.send_header("Location", "/good")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_address[1], keys
        finally:
            server.shutdown()
            thread.join()


def good_page() -> bytes:
    meters = Meters()
    meters.watch(lambda: [(names.BUILD, ("1", "gateway", "gateway-0"), 1.0)])
    return generate_latest(metrics_export.MetricsPage(meters.collect, vllm_names=True).registry())


def test_pages_that_cannot_be_read_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = {
        "/good": (200, good_page()),
        "/moved": (302, b""),
        "/key": (403, b""),
        "/html": (200, b"<html>hello {</html>"),
        "/other": (200, b"up 1\n"),
    }
    with serving_pages(bodies) as (port, keys):
        urls = [f"http://127.0.0.1:{port}{path}" for path in bodies] + [f"http://127.0.0.1:{free_port()}/x"]
        pages, troubles = PageReader(urls, "secret", "elsewhere", ssl.create_default_context()).read()
        assert list(pages) == ["gateway-0"]
        wanted = ["HTTP 302", "an operator's key", "html: ", "not a page of Pillion's", "Connection refused"]
        assert len(troubles) == len(wanted)
        assert all(component in line for component, line in zip(wanted, troubles, strict=True))
        # The gateway's key is for the gateway's host alone.
        assert set(keys) == {""}
        PageReader(urls[:1], "secret", "127.0.0.1", ssl.create_default_context()).read()
        assert keys[-1] == "Bearer secret"
        monkeypatch.setitem(sys.modules, "prometheus_client.parser", None)
        assert PageReader(urls[:2], "", "", ssl.create_default_context()).read()[1][0] == NO_PARSER


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    """A gateway's door that answers GetStatus alone."""

    class Door(gateway_pb2_grpc.GatewayServicer):
        def GetStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
            return status_to_pb(STATUS)

    server = grpc.server(futures.ThreadPoolExecutor(2))
    gateway_pb2_grpc.add_GatewayServicer_to_server(Door(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "pillion", "top", "--interval", "0.2", *argv]


def test_one_frame_for_scripts(target: str) -> None:
    with serving_pages({"/metrics": (200, good_page())}) as (port, _):
        argv = command("--once", "--target", target, "--pages", f"127.0.0.1:{port}")
        done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert "tokens/s generated 0, prompts 0" in done.stdout
    argv = command("--once", "--target", f"127.0.0.1:{free_port()}")
    silent = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert (silent.returncode, silent.stdout, len(silent.stderr.splitlines())) == (1, "", 1)


def test_without_a_terminal_frames_follow_each_other(target: str) -> None:
    with started(command("--target", target), stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        lines: list[str] = []
        while sum(line.startswith("requests/s") for line in lines) < 2:
            lines.append(process.stdout.readline())
            assert lines[-1], "it ended"
        process.send_signal(signal.SIGINT)
        assert process.wait(WITHIN_S) == 0
    assert "\x1b" not in "".join(lines)
    assert sum(line.startswith("pillion 1 ") for line in lines) == 2


def read_until_closed(terminal: int, seen: Callable[[bytes], None]) -> bytes:
    """All that comes out of ``terminal``; ``seen`` hears of it each time."""
    out, deadline_s = b"", time.monotonic() + 2 * WITHIN_S
    # Linux says EIO where the other side is closed.
    with contextlib.suppress(OSError):
        while select.select([terminal], [], [], WITHIN_S)[0] and (got := os.read(terminal, 65536)):
            assert time.monotonic() < deadline_s, "it does not stop"
            out += got
            seen(out)
    return out


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, b"q", b"Q"])
def test_the_terminal_is_left_as_it_was(target: str, end: signal.Signals | bytes) -> None:
    environ = os.environ | {"TERM": "xterm", "LINES": "24", "COLUMNS": "80"}
    argv, asked = command("--target", target), threading.Event()
    with contextlib.ExitStack() as stack:
        ours, theirs = pty.openpty()
        stack.callback(os.close, ours)
        before = termios.tcgetattr(ours)
        with contextlib.closing(os.fdopen(theirs, "wb", buffering=0)) as side:
            pipes = {"stdin": side, "stdout": side, "stderr": side}
            process = stack.enter_context(started(argv, env=environ, cwd=ROOT, **pipes))

        def ask(out: bytes) -> None:
            if not asked.is_set() and out.count(b"requests/s") >= 2:
                if isinstance(end, bytes):
                    os.write(ours, b"x" + end)
                else:
                    process.send_signal(end)
                asked.set()

        out = read_until_closed(ours, ask)
        assert process.wait(WITHIN_S) == 0
        assert termios.tcgetattr(ours) == before
    assert b"Traceback" not in out
    for on, off in ((b"\x1b[?1049h", b"\x1b[?1049l"), (b"\x1b[?25l", b"\x1b[?25h")):
        assert out.count(on) == out.count(off) == 1
        assert out.index(on) < out.rindex(off)
