"""`pillion serve`: the local cluster from its first line to its last."""

from __future__ import annotations

import asyncio
import logging
import time

from pillion.cli.console import Notices
from pillion.config import ServeFlags
from pillion.observability.log_format import set_up_logging
from pillion.supervisor.components import require_server_packages, stop_on_signals
from pillion.supervisor.local_cluster import LocalCluster, run_until_signal

EXIT_PARTS_DIED = 1


def run_serve(flags: ServeFlags) -> int:
    """Blocks until Ctrl-C, SIGTERM (exit status 0) or until a part died for good (1). Raises PillionError."""
    require_server_packages()
    set_up_logging(flags.log_level if flags.log_level == "debug" else "warning")
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    return asyncio.run(_serve(flags, Notices()))


async def _serve(flags: ServeFlags, notices: Notices) -> int:
    began, stop = time.monotonic(), asyncio.Event()
    stop_on_signals(stop)
    cluster = LocalCluster(flags, notices)
    try:
        if not await until_stopped(cluster, stop):
            return 0
        announce_ready(cluster, notices, time.monotonic() - began)
        reason = await run_until_signal(cluster, stop)
        notices.say(f"stopping: {reason}" if reason else "stopping", "bold red" if reason else "bold")
        return EXIT_PARTS_DIED if reason else 0
    finally:
        await cluster.stop()
        if cluster.supervisor is not None:
            left = cluster.left_behind()
            notices.say(f"left behind: {', '.join(left)}" if left else "stopped, nothing left behind")


async def until_stopped(cluster: LocalCluster, stop: asyncio.Event) -> bool:
    """Prepare and start ``cluster``; False where ``stop`` came first. Raises PillionError."""
    work = asyncio.create_task(_bring_up(cluster))
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not work.done():
        work.cancel()
        await asyncio.wait({work})
        return False
    work.result()
    return True


async def _bring_up(cluster: LocalCluster) -> None:
    notices = cluster.notices
    await cluster.prepare()
    notices.say(cluster.describe(), "bold")
    with notices.progress("starting the parts"):
        await cluster.start()


def announce_ready(cluster: LocalCluster, notices: Notices, seconds: float) -> None:
    """Where to reach it."""
    flags, (host, _, port) = cluster.flags, cluster.target.rpartition(":")
    scheme = "https" if flags.tls_cert else "http"
    notices.say(
        f"ready after {seconds:.1f} s: gRPC {host}:{port}, HTTP {scheme}://{host}:{flags.http_port}", "bold green"
    )
    target = f"grpcs://{cluster.target} --ca FILE" if flags.tls_cert else cluster.target
    key = "PILLION_API_KEY=KEY " if flags.api_keys else ""
    notices.say(f'try: {key}pillion chat --target {target}   or: {key}pillion generate --target {target} "Once"')
