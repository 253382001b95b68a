"""Tells under which address clients ask the HTTP port, behind a proxy too, and takes a proxy's path away."""

from __future__ import annotations

import re
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

# The Host header is written into pages and commands, so other characters than those of names and addresses are refused.
_HOST = re.compile(r"[A-Za-z0-9.-]{1,253}(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](:[0-9]{1,5})?")
# `pillion serve` listens here unless it is told otherwise.
USUAL_HOST = "127.0.0.1:8000"


def asked_address(host: str, root_path: str, *, encrypted: bool) -> str:
    """Returns the URL, without a slash at its end, under which a client asks this port.

    Args:
        host: the client's Host header; for one that is no name or address, USUAL_HOST stands there.
        root_path: the value of --root-path.
        encrypted: whether the client's connection has TLS.
    """
    shown = host if _HOST.fullmatch(host) else USUAL_HOST
    return f"{'https' if encrypted else 'http'}://{shown}{root_path}"


class BelowPath:
    """Represents an ASGI application that passes calls on to ``app`` without the path prefix of a proxy, whether the
    proxy has taken it away already or not."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> Any:
        if scope["type"] == "http" and scope["path"].startswith(f"{self._root}/"):
            scope = {**scope, "path": scope["path"].removeprefix(self._root)}
        await self._app(scope, receive, send)
