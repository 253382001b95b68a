"""Handles the page for people (--ui): its files, which are open, and the live picture, which operators may see."""

from __future__ import annotations

import time

import msgspec
from starlette.routing import Route

from pillion.config import GatewayFlags
from pillion.gateway.gateway import Gateway
from pillion.gateway.http_api.http_call import Endpoint, HttpCall
from pillion.gateway.http_api.http_errors import ApiError
from pillion.gateway.http_api.model_calls import ModelCalls
from pillion.gateway.ui.cluster_picture import ClusterPicture
from pillion.gateway.ui.ui_files import HEADERS, PAGE, read_files


def ui_routes(calls: ModelCalls, flags: GatewayFlags) -> list[Route]:
    """Returns the page's rows for the table of the HTTP port, with --ui. Its files need no key."""
    if not flags.ui:
        return []
    ui = UiApi(calls.gateway)
    return [
        Route("/ui", Endpoint("GET", ui.page)),
        Route("/ui/cluster", Endpoint("GET", ui.cluster, calls.gateway.tenant_of)),
        Route("/ui/{name}", Endpoint("GET", ui.file)),
    ]


class UiApi:
    """Serves the page for people of one gateway. Its files are read when this object is made."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._picture = ClusterPicture(gateway.cluster.gateway_id)
        self._files = read_files()

    async def page(self, call: HttpCall) -> None:
        """Shows a page for people: chat, and a live picture of the cluster. The page itself holds no data."""
        await self._send(call, PAGE)

    async def file(self, call: HttpCall) -> None:
        """Gives a style sheet or a script of the page for people."""
        await self._send(call, str(call.parameters["name"]))

    async def cluster(self, call: HttpCall) -> None:
        """Gives operators what the live picture shows: parts, steps' budgets, pools, queues and hits, with rates over
        some seconds where it was read that shortly before."""
        # Each viewer is checked, even where another viewer's poll has made the picture.
        self._gateway.operators_only(call.tenant)
        picture = self._picture.at(
            time.monotonic(),
            lambda: self._gateway.status(call.tenant),
            lambda: self._gateway.metrics(call.tenant),
        )
        await call.answer(200, msgspec.json.encode(picture), HEADERS)

    async def _send(self, call: HttpCall, name: str) -> None:
        found = self._files.get(name)
        if found is None:
            raise ApiError(404, f"there is no {call.path[:200]!r} here", code="not_found")
        await call.answer(200, found.body, HEADERS, content_type=found.content_type)
