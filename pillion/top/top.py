"""Runs `pillion top`: it asks the gateway and the metrics pages again and again, and prints a frame each time.

    every --interval:  GetStatus (SDK) + pages (HTTP, in parallel) --> ClusterReading --> History --> frame --> terminal

The status works wherever `pillion status` does; pages that cannot be read are left out, with a note.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import select
import signal
import ssl
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import SplitResult, urlsplit

from rich.console import Console
from rich.live import Live

from pillion.client.client import Client
from pillion.client.connection import connect
from pillion.errors import PillionError
from pillion.net.advice import http_advice
from pillion.net.listener import find_listener
from pillion.net.tls import client_context
from pillion.top.top_figures import ClusterReading, History
from pillion.top.top_pages import ComponentPage, locate, parse
from pillion.top.top_view import FrameStyle, frame

# Rates are taken over this time, or over one interval where that is longer.
WINDOW_S = 10.0
# A component answers a scrape within 2 s or not at all.
FETCH_TIMEOUT_S = 3.0
FETCHES_AT_ONCE = 16
MAX_PAGE_BYTES = 8 << 20
# At most this much is read of the keys that were pressed since the last look.
MAX_KEYS_BYTES = 64
NO_PARSER = "pages need prometheus-client: pip install '.[server]'"


@dataclass(frozen=True, slots=True)
class PageReader:
    """Fetches metrics pages.

    Attributes:
        urls: the pages.
        api_key: an operator's API key, which is sent to ``trusted`` alone.
        trusted: the gateway's host.
        tls: the context for https.
    """

    urls: Sequence[str]
    api_key: str
    trusted: str
    tls: ssl.SSLContext

    def read(self) -> tuple[dict[str, ComponentPage], list[str]]:
        """Returns pages by component, and a line for each page that could not be read."""
        if not self.urls:
            return {}, []
        with ThreadPoolExecutor(min(FETCHES_AT_ONCE, len(self.urls))) as threads:
            results = list(threads.map(self._read_one, self.urls))
        pages = {page.component_id: page for page in results if isinstance(page, ComponentPage)}
        return pages, list(dict.fromkeys(trouble for trouble in results if isinstance(trouble, str)))

    def _read_one(self, url: str) -> ComponentPage | str:
        try:
            page = parse(self._fetch(url))
        except ImportError:
            return NO_PARSER
        except ValueError as error:
            return f"{url}: {error}"
        return page if page.component_id else f"{url}: not a page of Pillion's"

    def _fetch(self, url: str) -> str:
        """Returns the text at ``url``, without redirects, which would carry the key elsewhere, and without proxies.

        Raises ValueError, which says in a few words why there is no text.
        """
        place = urlsplit(url)
        host = place.hostname or ""
        connection = http.client.HTTPConnection(host, place.port, timeout=FETCH_TIMEOUT_S)
        if place.scheme == "https":
            connection = http.client.HTTPSConnection(host, place.port, timeout=FETCH_TIMEOUT_S, context=self.tls)
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key and host == self.trusted else {}
        try:
            connection.request("GET", place.path + (f"?{place.query}" if place.query else ""), headers=key)
            answer = connection.getresponse()
            body = answer.read(MAX_PAGE_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            said = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise ValueError(_advice(place, error) or said) from None
        finally:
            connection.close()
        if answer.status in (401, 403):
            where = f"PILLION_API_KEY, sent to {self.trusted or 'nobody'} alone"
            raise ValueError(f"HTTP {answer.status}: it wants an operator's key ({where})")
        if answer.status != 200:
            raise ValueError(f"HTTP {answer.status}")
        if len(body) > MAX_PAGE_BYTES:
            raise ValueError(f"more than {MAX_PAGE_BYTES >> 20} MiB")
        return body.decode(errors="replace")


def _advice(place: SplitResult, error: Exception) -> str:
    """Says what to do about a page that is not reached: its port may be another one, or speak TLS."""
    if isinstance(error, TimeoutError | ssl.SSLCertVerificationError):
        return ""
    listener = find_listener(place.netloc.rpartition("@")[2])
    return http_advice(place.netloc, listener, place.scheme == "https") if listener else ""


def run_top(reach: dict[str, Any], places: Sequence[str], interval_s: float, once: bool) -> int:
    """Shows frames until "q" or Ctrl-C, or one frame. Raises PillionError where the gateway does not answer at first.

    Args:
        reach: arguments of :class:`pillion.Client`.
        places: where metrics pages are, as :func:`pillion.top.top_pages.locate` reads it.
        interval_s: time between frames.
        once: whether to print only one frame, with the rates of one interval.
    """
    target = reach["target"]
    pages, console, history = _page_reader(reach, places), Console(highlight=False), History(WINDOW_S)
    with Client(**reach) as client:

        def read() -> ClusterReading:
            # The time is taken before the pages are read: a page that hangs must not change the other pages' rates.
            status, at_s = client.status(), time.monotonic()
            found, troubles = pages.read()
            return ClusterReading(at_s, status, found, tuple(troubles))

        first = read()
        history.add(first)
        if once:
            time.sleep(interval_s)
            console.print(_frame(console, first, read(), target, screen=False))
            return 0
        with _shown(console) as show, _keyboard(console) as ended, contextlib.suppress(KeyboardInterrupt):
            show(_frame(console, None, first, target, screen=console.is_terminal))
            while not ended(interval_s):
                before, now = _next(read, history)
                show(_frame(console, before, now, target, screen=console.is_terminal))
    return 0


def _next(read: Callable[[], ClusterReading], history: History) -> tuple[ClusterReading | None, ClusterReading]:
    """Returns the next reading; while the gateway does not answer, the last one again, with a note."""
    try:
        now = read()
    except PillionError as error:
        last = history.newest()
        assert last is not None, "the first reading is in the history"
        silent = f"the gateway has not answered for {time.monotonic() - last.at_s:.0f} s: {error.message}"
        return None, replace(last, troubles=(" ".join(silent.split()), *last.troubles))
    return history.add(now), now


def _frame(console: Console, before: ClusterReading | None, now: ClusterReading, target: str, *, screen: bool) -> Any:
    style = FrameStyle(console.size.height if screen else None, console.options.ascii_only)
    return frame(before, now, target, time.strftime("%H:%M:%S"), style)


@contextlib.contextmanager
def _shown(console: Console) -> Iterator[Callable[[Any], None]]:
    """Yields the function that shows a frame. On a terminal it draws in place, on a screen that goes away when the
    ``with`` statement ends; elsewhere it prints one frame after the other."""
    if not console.is_terminal:

        def show(frame: Any) -> None:
            console.print(frame)
            console.print()
            sys.stdout.flush()

        yield show
        return
    # `kill` must leave the terminal as it was, too.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            yield lambda frame: live.update(frame, refresh=True)
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _keyboard(console: Console) -> Iterator[Callable[[float], bool]]:
    """Yields a function that waits for some seconds and returns early, with true, when somebody presses "q". Without a
    terminal the function only waits."""
    if not (console.is_terminal and sys.stdin.isatty()):

        def wait(seconds: float) -> bool:
            time.sleep(seconds)
            return False

        yield wait
        return
    keyboard = sys.stdin.fileno()

    def ended(seconds: float) -> bool:
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            if select.select([keyboard], [], [], left_s)[0]:
                pressed = os.read(keyboard, MAX_KEYS_BYTES)
                # The input ends when the terminal has gone away.
                if not pressed or b"q" in pressed.lower():
                    return True
        return False

    before = termios.tcgetattr(keyboard)
    # Single keys come without Enter, and are not shown; Ctrl-C still interrupts.
    tty.setcbreak(keyboard)
    try:
        yield ended
    finally:
        termios.tcsetattr(keyboard, termios.TCSAFLUSH, before)


def _page_reader(reach: dict[str, Any], places: Sequence[str]) -> PageReader:
    target = reach["target"]
    urls = locate(places, target)
    tls = client_context(reach.get("ca"), reach.get("cert"), reach.get("key"))
    place = urlsplit(target if "://" in target else f"grpc://{target}")
    host = "" if target.startswith("unix:") else place.hostname or ""
    return PageReader(urls, connect(**reach).api_key, host, tls)
