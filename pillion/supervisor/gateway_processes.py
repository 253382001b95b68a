"""Runs several gateway processes behind the same two public ports: ``--gateway-workers``.

    ports reserved (bound, not listening) --> gateway-0 ... gateway-N-1 listen on them --> the kernel distributes
    connections
            |                                     |
     port in use: ConfigError                each has its own socket for readiness probes

The kernel chooses a process per connection (SO_REUSEPORT), so all streams of one connection are in one process. The
processes share only Redis and files.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pillion.cli.flags import secret_environ, subset
from pillion.config import GatewayFlags
from pillion.supervisor import probes
from pillion.supervisor.child_process import component_argv
from pillion.supervisor.preflight import bind_port
from pillion.supervisor.supervisor import ProcessSpec

E = TypeVar("E", bound=GatewayFlags)


class PublicPorts:
    """The two public ports: bound from :meth:`reserve` to :meth:`close`, so that several gateways can share them."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def reserve(self, flags: E) -> E:
        """Return ``flags`` with a free port instead of each 0. Raises ConfigError for a port that is in use."""
        for name in ("http_port", "grpc_port"):
            self._sockets.append(bind_port(flags.host, "host", name, getattr(flags, name)))
        http, grpc = (sock.getsockname()[1] for sock in self._sockets)
        if flags.gateway_workers == 1:
            self.close()
        for sock in self._sockets:
            # The port stays bound, so that no other program gets it while a gateway restarts. From now on gateways can
            # listen on it; this socket never listens, so the kernel gives it no connections.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        return replace(flags, http_port=http, grpc_port=grpc)

    def close(self) -> None:
        """Free both public ports. Idempotent."""
        while self._sockets:
            self._sockets.pop().close()


def component_spec(role: str, component_id: str, flags: Any, address: str, **more: Any) -> ProcessSpec:
    """Return the spec of one component's process, which is ready when it serves at ``address``. ``more``: other fields
    of :class:`ProcessSpec`."""
    probe = partial(probes.is_serving, address)
    return ProcessSpec(component_id=component_id, argv=component_argv(role, flags), probe=probe, **more)


def probe_address(folder: Path, number: int) -> str:
    """Return the address of gateway ``number``'s health service, a Unix socket in ``folder``."""
    return f"unix:{folder}/gateway-{number}.sock"


def gateway_specs(flags: GatewayFlags, folder: Path, environ: Mapping[str, str], *, level: int) -> list[ProcessSpec]:
    """Return the specs of the gateways gateway-0, gateway-1 and so on, whose probe sockets are in ``folder``."""
    specs = []
    for number in range(flags.gateway_workers):
        name, address = f"gateway-{number}", probe_address(folder, number)
        shared = flags.gateway_workers > 1
        metrics_port = flags.metrics_port and flags.metrics_port + number
        changes = {"component_id": name, "probe_listen": address, "share_ports": shared, "metrics_port": metrics_port}
        own_flags = subset(GatewayFlags, flags, gateway_workers=1, **changes)
        secrets = dict(environ) | secret_environ(own_flags)
        spec = component_spec("gateway", name, own_flags, address, level=level, environ=secrets, kind="gateway")
        alive = partial(probes.answers, address)
        specs.append(replace(spec, drain_s=flags.drain_timeout_s, alive=alive))
    return specs
