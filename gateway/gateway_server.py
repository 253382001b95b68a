"""The gateway as a component: both ports, the links, and its heartbeat.

start: read keys and certificates -> prepare models -> load tokenizers -> connect -> gRPC port -> HTTP port ->
heartbeats while it runs: keys and certificates are reloaded when their files change; --probe-listen reports whether it
is ready stop(grace_s): leave the registry, health NOT_SERVING
            -> accept no connections; open ones end after their running requests (GOAWAY, close)
            -> wait for running streams, at most grace_s -> cut the remaining ones -> close tokenizers and links
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass

import msgspec

from pillion.errors import PillionError
from pillion.gateway.admission.api_keys import KeyFile
from pillion.gateway.gateway import Gateway
from pillion.gateway.grpc_api.gateway_servicer import GatewayServicer
from pillion.gateway.http_api.http_server import HttpServer
from pillion.gateway.links.defects import Defects
from pillion.kvstore.index.registry import Registry
from pillion.net import rpc
from pillion.net.watched import WATCH_INTERVAL_S
from pillion.tasks import end_tasks
from pillion.wire.registry import ComponentRecord

log = logging.getLogger("pillion.gateway")

DRAIN_POLL_S = 0.02
READY_POLL_S = 0.1
# Time to send the last messages of ended streams, before health watches are cut.
LAST_MESSAGES_S = 0.5


@dataclass(frozen=True, slots=True)
class Ports:
    """A gateway's servers: both public ports, and that of --probe-listen."""

    grpc: rpc.RunningServer
    http: HttpServer
    probe: rpc.RunningServer | None = None


class GatewayServer:
    """A running gateway. ``address`` and ``grpc_address`` are the gRPC port's, ``http_address`` is the HTTP port's.

    ``background`` ends background work when the gateway drains; ``resources`` are freed after the last call.
    """

    def __init__(
        self,
        record: ComponentRecord,
        gateway: Gateway,
        registry: Registry,
        servicer: GatewayServicer,
        ports: Ports,
        heartbeat_s: float,
        background: AsyncExitStack,
        resources: AsyncExitStack,
        keys: KeyFile | None = None,
    ) -> None:
        self.component_id = record.component_id
        self.address = self.grpc_address = ports.grpc.address
        self.http_address = ports.http.address
        self.gateway = gateway
        self.meters = gateway.meters
        self.not_ready = gateway.not_ready
        self._record = record
        self.cluster = gateway.cluster
        self._registry = registry
        self._servicer = servicer
        self._server, self.http, self._probe = ports.grpc, ports.http, ports.probe
        self._background, self._resources = background, resources
        self._tasks = [
            asyncio.create_task(self._beat(heartbeat_s), name="heartbeat"),
            asyncio.create_task(_warm_up(gateway), name="first grammars"),
        ]
        if keys is not None:
            self._tasks.append(asyncio.create_task(_reload_keys(keys, gateway), name="API keys"))
        if ports.probe is not None:
            self._tasks.append(asyncio.create_task(_report_ready(ports.probe, gateway), name="readiness"))

    async def stop(self, grace_s: float = 2.0) -> None:
        """Drain the gateway: streams may finish for ``grace_s`` seconds, then they are cut and freed."""
        await end_tasks(*self._tasks)
        try:
            await self._registry.leave(self.component_id)
        except PillionError as error:
            log.debug("could not leave the registry: %s", error.message)
        self.gateway.drain()
        await asyncio.gather(*(server.not_serving() for server in (self._server, self._probe) if server is not None))
        # Close connections, so that clients connect to another process on this port or another replica. They would
        # retry a request refused on the old connection on the same connection.
        self._server.close()
        closing = asyncio.create_task(self.http.stop(grace_s))
        await self._background.aclose()
        await self._drained(grace_s)
        await self._server.stop(min(grace_s, LAST_MESSAGES_S))
        await closing
        if self._probe is not None:
            # Kept until now, to show that the process drains and does not hang.
            await self._probe.stop(0)
        await self._resources.aclose()
        await self.gateway.aclose()
        await self.cluster.aclose()

    async def wait_failed(self) -> str:
        """Wait for a failure that ends the gateway, that of its HTTP server; return the reason."""
        await asyncio.wait({self.http.task})
        return "the HTTP server ended"

    async def _drained(self, grace_s: float) -> None:
        """Wait until no stream runs, at most ``grace_s`` seconds."""
        until_s = time.monotonic() + grace_s
        while (self._servicer.streams or self.gateway.active_requests) and time.monotonic() < until_s:  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_POLL_S)

    async def _beat(self, heartbeat_s: float) -> None:
        defects = Defects("the gateway's heartbeat")
        while True:
            totals = self.gateway.totals
            now = msgspec.structs.replace(
                self._record,
                running_requests=self.gateway.active_requests,
                prompt_tokens=totals.prompt_tokens,
                cached_tokens=totals.cached_tokens,
                completion_tokens=totals.completion_tokens,
            )
            accepted = not self._registry.refusal
            try:
                await self._registry.heartbeat(now)
                if not accepted:
                    log.warning("the registry accepts heartbeats again")
            except PillionError as error:
                if accepted:
                    log.warning(
                        "the registry accepts no heartbeats; this gateway continues with the components that it is"
                        " connected to, and finds no new ones: %s",
                        error.message,
                    )
            except Exception as error:  # noqa: BLE001  (without heartbeats, the gateway counts as dead)
                defects.note(error)
            await asyncio.sleep(heartbeat_s)


async def _report_ready(probe: rpc.RunningServer, gateway: Gateway) -> None:
    """Update the health services at --probe-listen: the unnamed one serves if a request would be served now, and one
    per prefill worker, by component id, if this gateway can call the worker."""
    reported = frozenset[str]()
    while True:
        await probe.set_serving(not gateway.not_ready())
        before, reported = reported, gateway.cluster.answering("prefill")
        for names, serving in ((before - reported, False), (reported - before, True)):
            if names:
                await probe.set_serving(serving, tuple(names))
        await asyncio.sleep(READY_POLL_S)


async def _warm_up(gateway: Gateway) -> None:
    # Later than the start, which it would slow down.
    await asyncio.sleep(0.5)
    await gateway.warm_up()


async def _reload_keys(keys: KeyFile, gateway: Gateway) -> None:
    """Reload the API keys when their file changes."""
    while True:
        await asyncio.sleep(WATCH_INTERVAL_S)
        try:
            if await asyncio.to_thread(keys.refresh):
                gateway.replace_keys(keys.ring)
        except Exception:
            # After a bug in a reload, keep reloading: otherwise revoked keys would stay valid.
            log.exception("the keys could not be read again")
