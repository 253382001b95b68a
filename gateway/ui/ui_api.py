"""Handlers of the web page (--ui): its files, which need no key, and for operators the live picture and the
explanations of recorded requests.

The page contains no data and no key. Its content security policy restricts it: it runs only this port's scripts, calls
only this port, cannot be framed, submits no form and writes no HTML from text (Trusted Types).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path

import msgspec
from starlette.routing import Route

from pillion.config import GatewayFlags
from pillion.errors import ConfigError, Unavailable
from pillion.gateway.gateway import Gateway
from pillion.gateway.http_api.http_call import Endpoint, HttpCall
from pillion.gateway.http_api.http_errors import ApiError
from pillion.gateway.http_api.model_calls import ModelCalls
from pillion.gateway.recorder.record_store import key_at, open_records
from pillion.gateway.ui.cluster_picture import ClusterPicture
from pillion.records.bundle import decode
from pillion.records.explanation import explained

FOLDER = Path(__file__).parent / "page"
PAGE = "page.html"
TYPES = {".html": b"text/html", ".css": b"text/css", ".js": b"text/javascript"}
POLICY = b"; ".join(
    (
        b"default-src 'none'",
        b"script-src 'self'",
        b"style-src 'self'",
        b"connect-src 'self'",
        b"img-src data:",
        b"base-uri 'none'",
        b"form-action 'none'",
        b"frame-ancestors 'none'",
        b"require-trusted-types-for 'script'",
        b"trusted-types 'none'",
    )
)
HEADERS = [
    (b"content-security-policy", POLICY),
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]

# Number of newest bundles that the page explains, max size of each, and max size of all explanations.
NEWEST_STORIES = 20
MAX_BUNDLE_BYTES, MAX_STORIES_BYTES = 2**18, 2**20


def read_files() -> dict[str, tuple[bytes, bytes]]:
    """Return name -> (bytes, content type) of the page's files, about 180 KB, which the gateway keeps in memory."""
    return {
        path.name: (path.read_bytes(), TYPES[path.suffix] + b"; charset=utf-8")
        for path in sorted(FOLDER.iterdir())
        if path.suffix in TYPES
    }


def newest_stories(path: str, key_file: str, redis_url: str = "") -> bytes:
    """Return the explanations of the newest bundles at ``path`` (--record-path) as JSON, newest first. Blocks.

    Raises ConfigError, and Unavailable if Redis does not answer.
    """
    stories: list[bytes] = []
    with open_records(path, redis_url) as records:
        for bundle_id, size_bytes in itertools.islice(records.listed(), NEWEST_STORIES):
            try:
                if size_bytes > MAX_BUNDLE_BYTES:
                    raise ConfigError("This bundle is too large for this page; use pillion explain.")
                story = explained(*decode(records.read(bundle_id), bundle_id, key_at(path, key_file)))
            except ConfigError as error:
                story = {"title": bundle_id, "phases": [], "sentences": [error.message]}
            encoded = msgspec.json.encode(story)
            if sum(map(len, stories)) + len(encoded) > MAX_STORIES_BYTES:
                break
            stories.append(encoded)
    return b'{"stories":[' + b",".join(stories) + b"]}"


def ui_routes(calls: ModelCalls, flags: GatewayFlags) -> list[Route]:
    """Return the page's routes if --ui is set, else none."""
    if not flags.ui:
        return []
    ui = UiApi(calls.gateway, flags)
    records = [Route("/ui/records", Endpoint("GET", ui.records, calls.gateway.tenant_of))] if flags.record_path else []
    return [
        Route("/ui", Endpoint("GET", ui.page, None)),
        Route("/ui/cluster", Endpoint("GET", ui.cluster, calls.gateway.tenant_of)),
        *records,
        Route("/ui/{name}", Endpoint("GET", ui.file, None)),
    ]


class UiApi:
    """Handlers of one gateway's web page. Its files are read at construction."""

    def __init__(self, gateway: Gateway, flags: GatewayFlags) -> None:
        self._gateway = gateway
        self._records = flags.record_path, flags.record_key_file, flags.redis_url
        self._reading = asyncio.Lock()
        self._picture = ClusterPicture(gateway.cluster.gateway_id)
        self._files = read_files()

    async def page(self, call: HttpCall) -> None:
        """Show the web page: chat, and a live picture of the cluster. The page itself contains no data."""
        await self._send(call, PAGE)

    async def file(self, call: HttpCall) -> None:
        """Return a style sheet or a script of the web page."""
        await self._send(call, str(call.parameters["name"]))

    async def cluster(self, call: HttpCall) -> None:
        """Return the live picture for operators: components, step budgets, pools, queues and hits; with rates if it was
        read within the last seconds."""
        # Authorize every viewer, even if the cached snapshot is served.
        self._gateway.operators_only(call.tenant)
        picture = self._picture.at(
            time.monotonic(),
            lambda: self._gateway.status(call.tenant),
            lambda: self._gateway.metrics(call.tenant),
        )
        await call.answer(200, msgspec.json.encode(picture), HEADERS)

    async def records(self, call: HttpCall) -> None:
        """Return the explanations of the newest recorded requests for operators, without texts, as `pillion explain`
        prints them."""
        self._gateway.operators_only(call.tenant)
        # One scan at a time, since the folder may be large.
        try:
            async with self._reading:
                body = await asyncio.to_thread(newest_stories, *self._records)
        except ConfigError as error:
            raise Unavailable(error.message) from None
        await call.answer(200, body, HEADERS)

    async def _send(self, call: HttpCall, name: str) -> None:
        if name not in self._files:
            raise ApiError(404, f"there is no {call.path[:200]!r} here", code="not_found")
        body, content_type = self._files[name]
        await call.answer(200, body, HEADERS, content_type=content_type)
