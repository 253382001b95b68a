"""Gateway processes behind the same two public ports: ``--gateway-workers``.

    ports held (bound, not listening) --> gateway-0 ... gateway-N-1 listen on them --> the system spreads connections
            |                                     |
     somebody else's port: ConfigError       each says on a socket of its own whether it is ready, and that it lives

The system chooses a process per connection (SO_REUSEPORT), so all streams of one connection are in one process.
Processes share nothing but Redis and files: see docs/architecture.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from pillion.cli.checks import check_flags
from pillion.cli.console import Notices
from pillion.cli.flags import subset
from pillion.config import GatewayFlags
from pillion.errors import ConfigError
from pillion.observability.log_format import set_up_logging
from pillion.supervisor import probes
from pillion.supervisor.child_command import child_environ, component_argv
from pillion.supervisor.components import require_server_packages, stop_on_signals
from pillion.supervisor.runtime_dir import RuntimeDir
from pillion.supervisor.supervisor import ProcessSpec, Supervisor

E = TypeVar("E", bound=GatewayFlags)


class PublicPorts:
    """The two ports, chosen and checked; held while several processes share them. ``close`` lets go of them."""

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def take(self, flags: E) -> E:
        """``flags`` with the ports that are used, where they say 0. Raises ConfigError for one that is taken."""
        for name in ("http_port", "grpc_port"):
            self._held.append(bind_port(flags.host, name, getattr(flags, name)))
        http, grpc = (held.getsockname()[1] for held in self._held)
        if flags.gateway_workers == 1:
            self.close()
        for held in self._held:
            # Bound, so that nobody else gets the port while one of ours is started again. Our processes may listen on
            # it from now on; this socket never does, so no connection comes here.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        return replace(flags, http_port=http, grpc_port=grpc)

    def close(self) -> None:
        """Idempotent."""
        while self._held:
            self._held.pop().close()


def bind_port(host: str, name: str, port: int) -> socket.socket:
    """A socket on ``port``, or on a free one for 0. Raises ConfigError where it is taken.

    The gateway binds it later; chosen here, it stays the same when the gateway is started again.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        flag = "--" + name.replace("_", "-")
        raise ConfigError(f"{flag} {port} on {host} cannot be used: {error.strerror}") from None
    return bound


def gateway_specs(
    flags: GatewayFlags, folder: Path, environ: Mapping[str, str], *, level: int, prefix: str = "", alone: bool = False
) -> list[ProcessSpec]:
    """The gateways, named gateway-0 and so on behind ``prefix``; each has a socket of its own for probes under
    ``folder``. ``alone``: ready when it listens, as workers come and go elsewhere; else when it would serve."""
    specs = []
    for number in range(flags.gateway_workers):
        name, address = f"{prefix}gateway-{number}", f"unix:{folder}/gateway-{number}.sock"
        shared = flags.gateway_workers > 1
        page = flags.metrics_port and flags.metrics_port + number
        mine = {"component_id": name, "probe_listen": address, "share_ports": shared, "metrics_port": page}
        own = subset(GatewayFlags, flags, gateway_workers=1, **mine)
        spec = ProcessSpec(
            component_id=name,
            level=level,
            argv=component_argv("gateway", own),
            environ=environ,
            probe=partial(probes.answers if alone else probes.is_serving, address),
            drain_s=flags.drain_timeout_s,
            alive=partial(probes.answers, address),
        )
        specs.append(spec)
    return specs


def run_gateways(flags: GatewayFlags) -> int:
    """`pillion gateway --gateway-workers N`: blocks until a signal (exit status 0) or until they cannot be kept alive
    (1). Raises PillionError."""
    check_flags(flags)
    require_server_packages()
    set_up_logging(flags.log_level)
    return asyncio.run(_run(flags))


async def _run(flags: GatewayFlags) -> int:
    stop, notices = asyncio.Event(), Notices()
    stop_on_signals(stop)
    with contextlib.ExitStack() as stack:
        ports = PublicPorts()
        stack.callback(ports.close)
        flags = ports.take(flags)
        runtime = RuntimeDir.create()
        stack.callback(runtime.remove)
        # Their names are told apart from those of other machines'.
        prefix = f"{flags.component_id or secrets.token_hex(3)}-"
        environ = child_environ(os.environ, flags.redis_url)
        specs = gateway_specs(flags, runtime.path, environ, level=0, prefix=prefix, alone=True)
        supervisor = Supervisor(specs, notices)
        try:
            return await _keep(supervisor, notices, stop)
        finally:
            await supervisor.stop()


async def _keep(supervisor: Supervisor, notices: Notices, stop: asyncio.Event) -> int:
    """Starts them and waits for whatever ends them."""
    stopped = asyncio.create_task(stop.wait())
    starting = asyncio.create_task(supervisor.start())
    failed = asyncio.create_task(supervisor.failed())
    try:
        await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if stopped.done():
            return 0
        starting.result()
        notices.say("all gateways listen", "bold green")
        await asyncio.wait({failed, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not failed.done():
            return 0
        notices.say(f"stopping: {failed.result()}", "bold red")
        return 1
    finally:
        for task in (stopped, starting, failed):
            task.cancel()
