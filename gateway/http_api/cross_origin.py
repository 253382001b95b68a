"""Refuses what pages of other origins make a browser send without asking first.

A browser asks (a preflight, which the port answers by --allowed-origins) before it sends JSON, a DELETE or a key for
a page of another origin. A form, a plain text or an empty body it sends at once: the page cannot read the answer, but
the call is made. So a call that changes something and needs no preflight has to come from no browser, from a page of
this port, or from a page that --allowed-origins names. These are told apart by what browsers say themselves and pages
cannot change, as Go's http.CrossOriginProtection does it: by Sec-Fetch-Site, and where that is missing, on plain
HTTP, by whether the Origin is the Host that was asked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from pillion.gateway.http_api.http_call import JSON_TYPE, HttpCall
from pillion.gateway.http_api.http_errors import ApiError

# Methods that change nothing, and those that a browser never sends for a foreign page without asking.
_SAFE = ("GET", "HEAD", "OPTIONS")
_ASKED_FIRST = ("DELETE", "PUT", "PATCH")


def is_foreign_write(method: str, headers: Mapping[bytes, bytes], allowed: Collection[str]) -> bool:
    """Whether a browser may have sent this call for a page of an origin that is not ``allowed``, without asking first.
    ``headers`` have names in small letters."""
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if method in _SAFE or method in _ASKED_FIRST or kind == JSON_TYPE:
        return False
    origin, site = headers.get(b"origin", b"").decode("latin-1"), headers.get(b"sec-fetch-site", b"")
    if site in (b"same-origin", b"none") or (not site and not origin):
        return False
    if "*" in allowed or origin in allowed:
        return False
    return bool(site) or not _same_host(origin, headers.get(b"host", b"").decode("latin-1"))


def _same_host(origin: str, host: str) -> bool:
    try:
        return bool(host) and urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:
        return False


class OwnPagesWrite:
    """An ASGI application that lets no foreign page's writes through to ``app``."""

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        self._app = app
        self._allowed = frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> Any:
        # The first one counts where a header comes twice, as everywhere on the port.
        known = dict(reversed(scope["headers"])) if scope["type"] == "http" else {}
        if known and is_foreign_write(scope["method"], known, self._allowed):
            text = "a browser sent this for a page of another origin; --allowed-origins names those that may"
            error = ApiError(403, text, kind="permission_error", code="cross_origin")
            await HttpCall(scope, receive, send).fail(error)
            return
        await self._app(scope, receive, send)
