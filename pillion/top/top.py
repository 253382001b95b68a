"""`pillion top`: asks the gateway and the pages again and again, and draws what `top_view` makes of it.

    every --interval:  GetStatus (SDK) + pages (HTTP, side by side) --> Look --> History --> frame --> terminal

The status always works where `pillion status` does; pages are what can be had beside it.
"""

from __future__ import annotations

import contextlib
import http.client
import signal
import ssl
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pillion.client.client import Client
from pillion.client.connection import connect
from pillion.errors import ConfigError, PillionError
from pillion.top.top_figures import ClusterReading
from pillion.top.top_pages import ComponentPage, locate, parse

if TYPE_CHECKING:
    from rich.console import Console

# Rates are taken over so much time, or over one interval where that is longer.
WINDOW_S = 10.0
# A part answers a scrape within 2 s or not at all.
FETCH_TIMEOUT_S = 3.0
FETCHES_AT_ONCE = 16
MAX_PAGE_BYTES = 8 << 20
NO_PARSER = "pages need prometheus-client: pip install '.[server]'"


class PageError(Exception):
    """A page that could not be read; the message says why, in a few words."""


@dataclass(frozen=True, slots=True)
class PageReader:
    """How pages are fetched.

    Attributes:
        urls: of them all.
        api_key: goes to ``trusted`` alone: other hosts have no business with it.
        trusted: the gateway's host.
        tls: for https.
    """

    urls: Sequence[str]
    api_key: str
    trusted: str
    tls: ssl.SSLContext

    def read(self) -> tuple[dict[str, ComponentPage], list[str]]:
        """Pages by part, and a line for each that could not be read."""
        if not self.urls:
            return {}, []
        with ThreadPoolExecutor(min(FETCHES_AT_ONCE, len(self.urls))) as threads:
            answers = list(threads.map(self._one, self.urls))
        pages = {answer.component_id: answer for answer in answers if isinstance(answer, ComponentPage)}
        return pages, list(dict.fromkeys(answer for answer in answers if isinstance(answer, str)))

    def _one(self, url: str) -> ComponentPage | str:
        try:
            page = parse(self._text(url))
        except ImportError:
            return NO_PARSER
        except (PageError, ValueError) as error:
            return f"{url}: {error}"
        return page if page.component_id else f"{url}: not a page of Pillion's"

    def _text(self, url: str) -> str:
        """Without redirects, which would carry the key elsewhere, and without proxies."""
        components = urlsplit(url)
        host = components.hostname or ""
        connection = (
            http.client.HTTPSConnection(host, components.port, timeout=FETCH_TIMEOUT_S, context=self.tls)
            if components.scheme == "https"
            else http.client.HTTPConnection(host, components.port, timeout=FETCH_TIMEOUT_S)
        )
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key and host == self.trusted else {}
        try:
            connection.request(
                "GET", components.path + (f"?{components.query}" if components.query else ""), headers=key
            )
            answer = connection.getresponse()
            body = answer.read(MAX_PAGE_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            raise PageError(getattr(error, "strerror", None) or str(error) or type(error).__name__) from None
        finally:
            connection.close()
        if answer.status in (401, 403):
            where = f"PILLION_API_KEY, sent to {self.trusted or 'nobody'} alone"
            raise PageError(f"HTTP {answer.status}: it wants an operator's key ({where})")
        if answer.status != 200:
            raise PageError(f"HTTP {answer.status}")
        if len(body) > MAX_PAGE_BYTES:
            raise PageError(f"more than {MAX_PAGE_BYTES >> 20} MiB")
        return body.decode(errors="replace")


class History:
    """Looks of the last seconds, oldest first."""

    def __init__(self) -> None:
        self._looks: deque[ClusterReading] = deque()

    def add(self, look: ClusterReading) -> ClusterReading | None:
        """Returns the look that rates are taken from: the oldest one of the window, at least the one before."""
        before = [old for old in self._looks if look.at_s - old.at_s <= WINDOW_S] or list(self._looks)[-1:]
        self._looks = deque([*before, look])
        return before[0] if before else None

    def newest(self) -> ClusterReading | None:
        """The last one that there is."""
        return self._looks[-1] if self._looks else None


def run_top(reach: dict[str, Any], said: Sequence[str], interval_s: float, once: bool) -> int:
    """Until Ctrl-C, or for one frame. Raises PillionError where the gateway does not answer at first."""
    from rich.console import Console

    target = reach["target"]
    pages, console, history = _pages(reach, said), Console(highlight=False), History()
    with Client(**reach) as client:

        def look() -> ClusterReading:
            # Before the pages are asked: one that hangs delays the answer, not what the others say.
            status, at_s = client.status(), time.monotonic()
            read, troubles = pages.read()
            return ClusterReading(at_s, status, read, tuple(troubles))

        first = look()
        history.add(first)
        if once:
            time.sleep(interval_s)
            console.print(_frame(console, first, look(), target, screen=False))
            return 0
        with _shown(console) as show, contextlib.suppress(KeyboardInterrupt):
            show(_frame(console, None, first, target, screen=console.is_terminal))
            while True:
                time.sleep(interval_s)
                before, now = _next(look, history)
                show(_frame(console, before, now, target, screen=console.is_terminal))
    return 0


def _next(look: Callable[[], ClusterReading], history: History) -> tuple[ClusterReading | None, ClusterReading]:
    """The next look; the last one again, with a note, while the gateway does not answer."""
    try:
        now = look()
    except PillionError as error:
        last = history.newest()
        assert last is not None, "the first look was one"
        silent = f"the gateway has not answered for {time.monotonic() - last.at_s:.0f} s: {error.message}"
        return None, replace(last, troubles=(" ".join(silent.split()), *last.troubles))
    return history.add(now), now


def _frame(console: Console, before: ClusterReading | None, now: ClusterReading, target: str, *, screen: bool) -> Any:
    from pillion.top.top_view import FrameStyle, frame

    style = FrameStyle(console.size.height if screen else None, console.options.ascii_only)
    return frame(before, now, target, time.strftime("%H:%M:%S"), style)


@contextlib.contextmanager
def _shown(console: Console) -> Iterator[Callable[[Any], None]]:
    """On a terminal the frames take turns on a screen of their own, which goes away with the block; elsewhere they
    follow each other."""
    if not console.is_terminal:

        def show(frame: Any) -> None:
            console.print(frame)
            console.print()
            sys.stdout.flush()

        yield show
        return
    from rich.live import Live

    # A terminal is left as it was by `kill` too.
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            yield lambda frame: live.update(frame, refresh=True)
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _pages(reach: dict[str, Any], said: Sequence[str]) -> PageReader:
    target = reach["target"]
    urls = locate(said, target)
    try:
        tls = ssl.create_default_context(cafile=reach.get("ca"))
        if reach.get("cert"):
            tls.load_cert_chain(reach["cert"], reach.get("key"))
    except OSError as error:
        raise ConfigError(f"TLS of the pages: {error}") from None
    place = urlsplit(target if "://" in target else f"grpc://{target}")
    host = "" if target.startswith("unix:") else place.hostname or ""
    return PageReader(urls, connect(**reach).api_key, host, tls)
