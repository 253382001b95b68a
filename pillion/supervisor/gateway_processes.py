"""Runs several gateway processes behind the same two public ports: ``--gateway-workers``.

    ports held (bound, not listening) --> gateway-0 ... gateway-N-1 listen on them --> the system spreads connections
            |                                     |
     somebody else's port: ConfigError       each has a socket of its own, where probes ask whether it is ready

The system chooses a process per connection (SO_REUSEPORT), so all streams of one connection are in one process. The
processes share only Redis and files.
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
from typing import Any, TypeVar

from pillion.cli.checks import check_flags
from pillion.cli.console import Notices
from pillion.cli.flags import secret_environ, subset
from pillion.config import GatewayFlags
from pillion.observability.log_format import set_up_logging
from pillion.supervisor import probes
from pillion.supervisor.child_process import child_environ, component_argv
from pillion.supervisor.component_process import require_server_packages, run_unless, stop_on_signals
from pillion.supervisor.down_records import tell_down
from pillion.supervisor.preflight import bind_port, check_files
from pillion.supervisor.runtime_dir import RuntimeDir
from pillion.supervisor.supervisor import ProcessSpec, Supervisor

E = TypeVar("E", bound=GatewayFlags)


class PublicPorts:
    """Holds the two public ports, chosen and checked, until :meth:`close`, while several processes share them."""

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def hold(self, flags: E) -> E:
        """Returns ``flags`` with a free port in place of each 0. Raises ConfigError for a port that is in use."""
        for name in ("http_port", "grpc_port"):
            self._held.append(bind_port(flags.host, "host", name, getattr(flags, name)))
        http, grpc = (held.getsockname()[1] for held in self._held)
        if flags.gateway_workers == 1:
            self.close()
        for held in self._held:
            # The port stays bound, so that nobody else gets it while a gateway is started again. Gateways may listen
            # on it from now on; this socket never does, so no connection comes here.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        return replace(flags, http_port=http, grpc_port=grpc)

    def close(self) -> None:
        """Frees both public ports. Idempotent."""
        while self._held:
            self._held.pop().close()


def component_spec(role: str, component_id: str, flags: Any, address: str, **more: Any) -> ProcessSpec:
    """Describes the process of one component, which is ready when it serves at ``address``."""
    probe = partial(probes.is_serving, address)
    return ProcessSpec(component_id=component_id, argv=component_argv(role, flags), probe=probe, **more)


def probe_address(folder: Path, number: int) -> str:
    """Returns the address at which a gateway's health is asked."""
    return f"unix:{folder}/gateway-{number}.sock"


def gateway_specs(
    flags: GatewayFlags,
    folder: Path,
    environ: Mapping[str, str],
    *,
    level: int,
    prefix: str = "",
    alone: bool = False,
) -> list[ProcessSpec]:
    """Describes the gateways, named ``prefix`` gateway-0 and so on; each has a socket for probes under ``folder``.

    With ``alone``, workers come and go elsewhere, so a gateway is ready when it listens; otherwise it is ready when it
    would serve a request.
    """
    specs = []
    for number in range(flags.gateway_workers):
        name, address = f"{prefix}gateway-{number}", probe_address(folder, number)
        shared = flags.gateway_workers > 1
        page = flags.metrics_port and flags.metrics_port + number
        mine = {"component_id": name, "probe_listen": address, "share_ports": shared, "metrics_port": page}
        own = subset(GatewayFlags, flags, gateway_workers=1, **mine)
        secret = dict(environ) | secret_environ(own)
        spec = component_spec("gateway", name, own, address, level=level, environ=secret, kind="gateway")
        alive = partial(probes.answers, address)
        specs.append(replace(spec, drain_s=flags.drain_timeout_s, alive=alive, probe=alive if alone else spec.probe))
    return specs


def run_gateways(flags: GatewayFlags) -> int:
    """Runs `pillion gateway --gateway-workers N`; returns the exit status.

    The status is 0 after a signal, 1 where the gateways cannot be kept alive. Raises PillionError.
    """
    check_flags(flags)
    require_server_packages()
    set_up_logging(flags.log_level, flags.log_format, "pillion")
    check_files(flags)
    return asyncio.run(_run(flags))


async def _run(flags: GatewayFlags) -> int:
    stop, notices = asyncio.Event(), Notices(form=flags.log_format)
    stop_on_signals(stop)
    async with contextlib.AsyncExitStack() as stack:
        ports = PublicPorts()
        stack.callback(ports.close)
        flags = ports.hold(flags)
        runtime = RuntimeDir.create()
        stack.callback(runtime.remove)
        # The prefix tells these gateways from those of other machines.
        prefix = f"{flags.component_id or secrets.token_hex(3)}-"
        environ = child_environ(os.environ, flags.redis_url)
        specs = gateway_specs(flags, runtime.path, environ, level=0, prefix=prefix, alone=True)
        supervisor = Supervisor(specs, notices)
        stack.push_async_callback(supervisor.stop)
        if not await run_unless(stop.wait(), supervisor.start()):
            return 0
        telling = asyncio.create_task(tell_down(supervisor.down, flags.redis_url, flags), name="what is down")
        stack.push_async_callback(lambda: asyncio.gather(telling, return_exceptions=True))
        stack.callback(telling.cancel)
        notices.say("all gateways listen", "bold green")
        failed = await run_unless(stop.wait(), supervisor.failed())
        if failed:
            notices.say(f"stopping: {failed.result()}", "bold red")
        else:
            notices.say(f"stopping, requests have {flags.drain_timeout_s:g} s to finish", "bold")
        return 1 if failed else 0
