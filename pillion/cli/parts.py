"""Runs one part in this process, until a signal or the part's own end.

starting ---> running ---> SIGTERM, SIGINT or a dead supervisor ---> stopping ---> exit 0
   |             |
   |             +---> the part failed by itself (its KV node went away, say) ---> stopping ---> exit 1
   +---> ConfigError ---> one line, exit 2           a second signal ---> exit 130 at once
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pillion.cli import lifeline
from pillion.cli.log_format import set_up_logging
from pillion.errors import ConfigError

if TYPE_CHECKING:
    from pillion.metrics import Meters
    from pillion.metrics_export import Exports

log = logging.getLogger("pillion.part")

# Role -> module and function that start it.
ROLES = {
    "kvnode": ("kvstore.node", "start_kvnode"),
    "prefill": ("prefill_service.part", "start_prefill"),
    "decode": ("decode_service.part", "start_decode"),
    "gateway": ("gateway.part", "start_gateway"),
}
# Time for what runs, where no flag (--drain-timeout-s) says another, and for what is to be done after it.
STOP_GRACE_S = 2.0
STOP_TIMEOUT_S = 2.0
EXIT_HURRIED = 130


def find_server_code() -> Path:
    """The clone's root, put on sys.path if it is not there. Raises ConfigError where only the SDK is installed."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "kvstore" / "__init__.py").is_file():
        raise ConfigError("servers run from a clone of the repository or its container image; this is the SDK alone")
    if str(root) not in map(os.path.abspath, sys.path):
        sys.path.insert(0, str(root))
    return root


def refuse_foreign_kernels() -> None:
    """Raises ConfigError where Hugging Face's distribution ``kernels`` is installed: our package has that name too."""
    try:
        version = importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        return
    raise ConfigError(
        f"the package 'kernels' {version} of Hugging Face is installed and hides Pillion's own package of that name: "
        "pip uninstall kernels, or use an environment without it"
    )


def use_internal_tls(flags: Any) -> None:
    """What this process is to other parts. Raises ConfigError for certificates that cannot be used."""
    from pillion import rpc, tls

    rpc.use_identity(tls.identity_of(flags.internal_tls_cert, flags.internal_tls_key, flags.internal_tls_ca))


def name_of(role: str, flags: Any) -> str:
    """What the part is called in traces and logs."""
    said = getattr(flags, "part_id", "") or getattr(flags, "node_id", "")
    if isinstance(said, str) and said:
        return said
    # Process ids alone are alike in containers: the first process of each is number 1, or the one after its init.
    return f"{role}-{socket.gethostname()}-{os.getpid()}"


def run_part(role: str, flags: Any) -> int:
    """Blocks until the part has ended; returns the exit status. Raises ConfigError."""
    from pillion import telemetry
    from pillion.cli.checks import check_flags

    check_flags(flags)
    find_server_code()
    refuse_foreign_kernels()
    name = name_of(role, flags)
    set_up_logging(flags.log_level, flags.log_format, name)
    use_internal_tls(flags)
    # A gateway chooses a name for the registry itself: gateways in containers may all have process id 1.
    if role != "gateway" and getattr(flags, "part_id", name) != name:
        flags = replace(flags, part_id=name)
    telemetry.setup(name, role)
    module, function = ROLES[role]
    start = getattr(importlib.import_module(module), function)
    try:
        return asyncio.run(_run(name, role, start, flags))
    finally:
        telemetry.shutdown()


async def _run(name: str, role: str, start: Any, flags: Any) -> int:
    stop = asyncio.Event()
    stop_on_signals(stop)
    watcher = asyncio.create_task(_watch_supervisor(stop))
    starting: asyncio.Future[Any] = asyncio.ensure_future(start(flags))
    stopped = asyncio.create_task(stop.wait())
    failed: asyncio.Task[str] | None = None
    exports: Exports | None = None
    try:
        await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting}, timeout=STOP_GRACE_S + STOP_TIMEOUT_S)
            return 0
        part = starting.result()
        exports = _export(part.meters, name, role, flags)
        log.info("%s ready at %s", name, part.address)
        failed = asyncio.create_task(part.wait_failed())
        await asyncio.wait({failed, stopped}, return_when=asyncio.FIRST_COMPLETED)
        reason = failed.result() if failed.done() else ""
        if reason:
            log.error("%s stops: %s", name, reason)
        # What failed has nobody left to wait for.
        await _stop_within(name, part, 0.0 if reason else getattr(flags, "drain_timeout_s", STOP_GRACE_S))
        return 1 if reason else 0
    finally:
        for task in (watcher, stopped, failed):
            if task is not None:
                task.cancel()
        if exports is not None:
            await asyncio.to_thread(exports.close)


def _export(meters: Meters, name: str, role: str, flags: Any) -> Exports:
    from pillion.metrics_export import Exports

    page = {"host": flags.metrics_host, "port": flags.metrics_port, "vllm_names": flags.vllm_metric_names}
    return Exports(meters, name, role, **page)


async def _stop_within(name: str, part: Any, grace_s: float) -> None:
    try:
        await asyncio.wait_for(part.stop(grace_s), grace_s + STOP_TIMEOUT_S)
    except TimeoutError:
        log.warning("%s did not stop within %g s", name, grace_s + STOP_TIMEOUT_S)


def stop_on_signals(stop: asyncio.Event) -> None:
    """SIGTERM and SIGINT set ``stop``; the second one ends the process at once."""

    def hear() -> None:
        if stop.is_set():
            os._exit(EXIT_HURRIED)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, hear)


async def _watch_supervisor(stop: asyncio.Event) -> None:
    """Where the kernel does not kill us with our supervisor, see it die and stop."""
    pid = lifeline.parent_pid()
    while pid and os.getppid() == pid:  # noqa: ASYNC110  (the kernel sends no event)
        await asyncio.sleep(lifeline.PARENT_POLL_MS / 1000)
    if pid:
        stop.set()
