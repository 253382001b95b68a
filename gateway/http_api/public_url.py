"""URL by which clients reach the HTTP port, also behind a proxy, and removal of a proxy's path prefix."""

from __future__ import annotations

import re
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

# Valid Host headers. They are written into pages and commands, so all other characters are refused.
_HOST = re.compile(r"[A-Za-z0-9.-]{1,253}(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](:[0-9]{1,5})?")
DEFAULT_ADDRESS = "127.0.0.1:8000"


def public_url(host: str, root_path: str, *, encrypted: bool) -> str:
    """Return the URL, without a trailing slash, by which a client reaches this port.

    Args:
        host: the client's Host header; if invalid, DEFAULT_ADDRESS is used.
        root_path: the value of --root-path.
        encrypted: whether the client's connection has TLS.
    """
    shown = host if _HOST.fullmatch(host) else DEFAULT_ADDRESS
    return f"{'https' if encrypted else 'http'}://{shown}{root_path}"


class PathPrefixRemover:
    """ASGI application that forwards calls to ``app`` without a proxy's path prefix, whether the proxy has removed it
    or not."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> Any:
        if scope["type"] == "http" and scope["path"].startswith(f"{self._root}/"):
            scope = {**scope, "path": scope["path"].removeprefix(self._root)}
        await self._app(scope, receive, send)
