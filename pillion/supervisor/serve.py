"""Runs `pillion serve`: starts the local cluster, prints its addresses, and stops it."""

from __future__ import annotations

import asyncio
import time

from pillion.cli.console import Notices
from pillion.config import ServeFlags
from pillion.observability.log_format import set_up_logging
from pillion.supervisor.component_process import require_server_packages, run_unless, stop_on_signals
from pillion.supervisor.local_cluster import LocalCluster
from pillion.supervisor.start_lines import show_addresses
from pillion.supervisor.supervisor import Supervisor


def run_serve(flags: ServeFlags) -> int:
    """Serve until Ctrl-C, SIGTERM (exit status 0) or a component's final death (1). Raises PillionError."""
    require_server_packages()
    set_up_logging(flags.log_level if flags.log_level == "debug" else "warning", flags.log_format, "pillion")
    return asyncio.run(_serve(flags, Notices(form=flags.log_format)))


async def _serve(flags: ServeFlags, notices: Notices) -> int:
    began, stop = time.monotonic(), asyncio.Event()
    stop_on_signals(stop)
    cluster = LocalCluster(flags, notices)
    try:
        startup = await run_unless(stop.wait(), _start(cluster))
        if not startup:
            return 0
        supervisor = startup.result()
        show_addresses(notices, cluster.flags, time.monotonic() - began)
        failed = await run_unless(stop.wait(), supervisor.failed())
        notices.say(f"stopping: {failed.result()}" if failed else "stopping", "bold red" if failed else "bold")
        return 1 if failed else 0
    finally:
        await cluster.stop()
        if cluster.supervisor is not None:
            leaks = cluster.left_behind()
            notices.say(f"left behind: {', '.join(leaks)}" if leaks else "stopped, nothing left behind")


async def _start(cluster: LocalCluster) -> Supervisor:
    await cluster.prepare()
    with cluster.notices.progress("starting the components"):
        return await cluster.start()
