"""`pillion serve`: starts the local cluster, says where it is, and stops it."""

from __future__ import annotations

import asyncio
import logging
import time

from pillion.cli.console import Notices
from pillion.config import ServeFlags
from pillion.observability.log_format import set_up_logging
from pillion.supervisor.component_process import require_server_packages, run_unless, stop_on_signals
from pillion.supervisor.local_cluster import LocalCluster
from pillion.supervisor.supervisor import Supervisor


def run_serve(flags: ServeFlags) -> int:
    """Blocks until Ctrl-C, SIGTERM (exit status 0) or a component's final death (1). Raises PillionError."""
    require_server_packages()
    set_up_logging(flags.log_level if flags.log_level == "debug" else "warning")
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    return asyncio.run(_serve(flags, Notices()))


async def _serve(flags: ServeFlags, notices: Notices) -> int:
    began, stop = time.monotonic(), asyncio.Event()
    stop_on_signals(stop)
    cluster = LocalCluster(flags, notices)
    try:
        bringing_up = await run_unless(stop.wait(), _bring_up(cluster))
        if not bringing_up:
            return 0
        supervisor = bringing_up.result()
        announce_ready(cluster, notices, time.monotonic() - began)
        failed = await run_unless(stop.wait(), supervisor.failed())
        notices.say(f"stopping: {failed.result()}" if failed else "stopping", "bold red" if failed else "bold")
        return 1 if failed else 0
    finally:
        await cluster.stop()
        if cluster.supervisor is not None:
            left = cluster.left_behind()
            notices.say(f"left behind: {', '.join(left)}" if left else "stopped, nothing left behind")


async def _bring_up(cluster: LocalCluster) -> Supervisor:
    notices = cluster.notices
    await cluster.prepare()
    notices.say(cluster.describe(), "bold")
    with notices.progress("starting the components"):
        return await cluster.start()


def announce_ready(cluster: LocalCluster, notices: Notices, seconds: float) -> None:
    """Prints where the cluster is reached."""
    flags, (host, _, port) = cluster.flags, cluster.target.rpartition(":")
    scheme = "https" if flags.tls_cert else "http"
    notices.say(
        f"ready after {seconds:.1f} s: gRPC {host}:{port}, HTTP {scheme}://{host}:{flags.http_port}", "bold green"
    )
    target = f"grpcs://{cluster.target} --ca FILE" if flags.tls_cert else cluster.target
    key = "PILLION_API_KEY=KEY " if flags.api_keys else ""
    notices.say(f'try: {key}pillion chat --target {target}   or: {key}pillion generate --target {target} "Once"')
