"""Runs one component in this process, until a signal or the component's own end.

waiting, if it was started as a standby (:mod:`pillion.supervisor.standbys`) ---> starting
starting ---> running ---> SIGTERM, SIGINT or a dead supervisor ---> stopping ---> exit 0
   |             |
   |             +---> the component failed by itself (for example, it lost its KV node) ---> stopping ---> exit 1
   +---> ConfigError ---> one line, exit 2           a second signal ---> exit 130 at once
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, TypeVar

from pillion.errors import ConfigError
from pillion.observability.log_format import set_up_logging
from pillion.supervisor import lifeline
from pillion.supervisor.standbys.standby import GPU_LOADER, Standby
from pillion.types import WORKERS

T = TypeVar("T")

log = logging.getLogger("pillion.component")

# Marks the last line of `pillion prepare`, which its parent does not show.
PREPARED = "is ready at"
SERVER_PACKAGES = (
    *("torch", "transformers", "numpy", "msgspec", "redis", "tokenizers", "starlette", "uvicorn", "safetensors"),
    *("jinja2", "xxhash", "prometheus_client", "grpc_health", "grpc_reflection", "huggingface_hub", "gguf"),
    "setproctitle",
)
ROLES = {
    "kvnode": ("pillion.kvstore.assemble", "start_kvnode"),
    "prefill": ("pillion.prefill_service.assemble", "start_prefill"),
    "decode": ("pillion.decode_service.assemble", "start_decode"),
    "gateway": ("pillion.gateway.assemble", "start_gateway"),
}
# Modules that components import lazily, some only after their first requests.
LATER_MODULES = (
    *("pillion.cli.app", "pillion.observability.metrics_export", "pillion.engine.backends.cpu.cpu_backend"),
    *("pillion.kvstore.pool_survival.surviving_memory", "llguidance"),
)
# Time for running requests of a stopping component without --drain-timeout-s, and for the clean-up after them.
STOP_GRACE_S = 2.0
STOP_TIMEOUT_S = 2.0
# Soft limit of open files, if the hard limit permits it. Each API of a gateway accepts up to 4,096 connections, but
# shells and service managers set a soft limit of 1,024, which would refuse most of them.
MAX_OPEN_FILES = 65_536


def require_server_packages(needs: str = "servers need") -> None:
    """Raise ConfigError, in one line, if only the SDK's dependencies are installed.

    ``needs``: beginning of the line, which names what needs the packages.
    """
    missing = [name for name in SERVER_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{needs} {', '.join(missing)}: pip install 'pillion[server]'")


def preloaded_modules(device: str) -> tuple[str, ...]:
    """Return the modules to import before a component of any role is forked, given workers that compute on ``device``.
    None of them starts a thread or uses a GPU."""
    gpu = () if device == "cpu" else (GPU_LOADER,)
    return (*(module for module, _ in ROLES.values()), *LATER_MODULES, *gpu)


def name_of(role: str, flags: Any) -> str:
    """Return the component's name in traces and logs."""
    name = getattr(flags, "component_id", "") or getattr(flags, "node_id", "")
    if isinstance(name, str) and name:
        return name
    return f"{role}-{socket.gethostname()}-{os.getpid()}"


def raise_open_files() -> None:
    """Raise the soft limit of open files to :data:`MAX_OPEN_FILES`, or to the hard limit if that is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # macOS reports a hard limit that it does not grant.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def run_component(role: str, flags: Any) -> int:
    """Run the component of a role until it ends, and return its exit status. Raises ConfigError."""
    from pillion.cli.checks import check_flags
    from pillion.net import rpc, tls
    from pillion.observability import telemetry
    from pillion.supervisor.preflight import check_files

    standby = Standby.of_process()
    name = name_of(role, flags)
    raise_open_files()
    if role == "gateway":
        # While a thread parses a large body, the event loop waits for this long at each of its polls. Python's default
        # is 5 ms.
        sys.setswitchinterval(0.0005)
    set_up_logging(flags.log_level, flags.log_format, name)
    check_flags(flags)
    require_server_packages()
    check_files(flags)
    rpc.use_identity(tls.identity_of(flags.internal_tls_cert, flags.internal_tls_key, flags.internal_tls_ca))
    # Gateways choose a name for the registry themselves, because in containers they may all have process id 1.
    if role != "gateway" and getattr(flags, "component_id", name) != name:
        flags = replace(flags, component_id=name)
    telemetry.setup(name, role)
    module, function = ROLES[role]
    # Imported objects stay alive; scanning them repeatedly would take an eighth of the imports' time.
    gc.disable()
    start = getattr(importlib.import_module(module), function)
    gc.enable()
    if standby is not None and role in WORKERS:
        start = partial(start, backend_factory=standby.load_ahead(), turn=standby)
    elif standby is not None:
        standby.wait()
    try:
        return asyncio.run(_run(name, role, start, flags, standby))
    finally:
        telemetry.shutdown()


def end_process(status: int) -> NoReturn:
    """Flush the output and exit at once, without Python's finalization, after the component has ended.

    Finalization frees all objects. In a fork, this writes to every page shared with the fork server, and so copies
    150 MB: 0.35 s of a core per component, which other components need for their streams.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


async def _run(name: str, role: str, start: Any, flags: Any, standby: Standby | None = None) -> int:
    """Start the component and run it until it fails, a signal arrives or the supervisor dies; return its exit
    status."""
    from pillion.observability.loop_watch import LoopWatch
    from pillion.observability.metrics_export import Exports
    from pillion.supervisor.preflight import ask_redis

    stop = asyncio.Event()
    stop_on_signals(stop)
    watcher = asyncio.create_task(_watch_supervisor(stop))
    exports: Exports | None = None
    if flags.redis_url and (trouble := await ask_redis(flags.redis_url)):
        log.warning("%s; %s starts without it and keeps trying", trouble, name)
    try:
        started = await run_unless(stop.wait(), start(flags), within_s=STOP_GRACE_S + STOP_TIMEOUT_S)
        if not started:
            if standby is not None and standby.waiting:
                # A thread still blocks in Standby.wait(); asyncio.run() would wait for it.
                os._exit(0)
            return 0
        component = started.result()
        # Everything loaded by now stays alive, so garbage collections skip it: a full one would otherwise stall all
        # streams for 50 to 100 ms.
        gc.freeze()
        if standby is not None:
            standby.serves()
        page = {"host": flags.metrics_host, "port": flags.metrics_port}
        not_ready = getattr(component, "not_ready", str)
        exports = Exports(
            component.meters, name, role, **page, not_ready=lambda: "it is stopping" if stop.is_set() else not_ready()
        )
        LoopWatch(component.meters)
        log.info("%s ready at %s", name, component.address)
        grace_s = getattr(flags, "drain_timeout_s", STOP_GRACE_S) + getattr(flags, "hand_over_timeout_s", 0.0)
        return await run_to_end(name, component, stop, grace_s)
    finally:
        watcher.cancel()
        if exports is not None:
            await asyncio.to_thread(exports.close)


async def run_to_end(name: str, component: Any, stop: asyncio.Event, grace_s: float) -> int:
    """Run a started component until ``stop`` is set or it fails by itself; then stop it, with ``grace_s`` seconds for
    its requests. Returns the exit status."""
    failed = await run_unless(stop.wait(), component.wait_failed())
    if failed:
        log.error("%s stops: %s", name, failed.result())
        grace_s = 0.0
    try:
        async with asyncio.timeout(grace_s + STOP_TIMEOUT_S):
            await component.stop(grace_s)
    except TimeoutError:
        log.warning("%s did not stop within %g s", name, grace_s + STOP_TIMEOUT_S)
    return 1 if failed else 0


async def run_unless(
    stop: Coroutine[Any, Any, object], work: Coroutine[Any, Any, T], within_s: float | None = None
) -> asyncio.Task[T] | None:
    """Run ``work``; return its ended task, or None if ``stop`` ended first and ``work`` was cancelled.

    ``within_s`` limits the wait for the end of cancelled work; None sets no limit.
    """
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop)
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return task
        return None
    finally:
        task.cancel()
        stopped.cancel()
        await asyncio.wait({task, stopped}, timeout=within_s)


def stop_on_signals(stop: asyncio.Event) -> None:
    """Make SIGTERM and SIGINT set ``stop``; a second signal ends the process at once."""

    def on_signal() -> None:
        if stop.is_set():
            # The shell's status of a program that SIGINT ended.
            os._exit(130)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)


async def _watch_supervisor(stop: asyncio.Event) -> None:
    """Set ``stop`` when the supervisor has died, on systems where the kernel does not kill this process with it."""
    pid = lifeline.parent_pid()
    while pid and os.getppid() == pid:  # noqa: ASYNC110  (the kernel sends no event)
        await asyncio.sleep(lifeline.PARENT_POLL_MS / 1000)
    if pid:
        stop.set()
