"""Runs the local cluster of `pillion serve`: its processes, their flags and their order.

flags, files and ports checked -> model prepared -> pool size checked -> runtime directory -> redis -> kvnode ->
workers -> gateway; stopped in reverse order, from the point that the start has reached
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pillion.cli.checks import check_flags
from pillion.cli.console import Notices
from pillion.cli.flags import subset, to_argv
from pillion.config import (
    DecodeFlags,
    KVNodeFlags,
    ModelFlags,
    OfflineFlags,
    PrefillFlags,
    PrepareFlags,
    ServeFlags,
)
from pillion.errors import ConfigError
from pillion.host.core_lending_table import CoreLendingTable
from pillion.host.cores import MAX_CPU_THREADS, parse_cores, usable_cores
from pillion.supervisor import embedded_redis as redis
from pillion.supervisor import probes
from pillion.supervisor.child_process import ChildProcess, child_environ
from pillion.supervisor.component_process import PREPARED, STOP_GRACE_S, preloaded_modules, require_server_packages
from pillion.supervisor.down_records import register_down
from pillion.supervisor.fence_watch import watch_fences
from pillion.supervisor.gateway_processes import PublicPorts, component_spec, gateway_specs, probe_address
from pillion.supervisor.pool_fit import PoolFit, fit_pool
from pillion.supervisor.preflight import bind_port, check_files, wait_for_redis
from pillion.supervisor.runtime_dir import RuntimeDir
from pillion.supervisor.standbys.fork_server import ForkServer
from pillion.supervisor.start_lines import show_model
from pillion.supervisor.supervisor import ERROR_PREFIX, PROBE_INTERVAL_MS, ProcessSpec, Supervisor
from pillion.tasks import end_tasks

# Max wait until the gateways know all prefill workers, for a heartbeat and a read of the registry on a busy machine.
PREFILL_KNOWN_S = 30.0
# Max time that a worker may stay fenced, including its drain, before it is killed.
FENCE_KILL_AFTER_S = 30.0
NODE_SOCKET = "kvnode-0.sock"
KEEPER_SOCKET = "keeper.sock"


class LocalCluster:
    """The cluster of `pillion serve`. Use: ``await prepare()``, ``await start()``, and always ``await stop()``.

    ``flags``: as passed at first; :meth:`prepare` replaces "auto" and port 0 by real values.
    """

    def __init__(
        self,
        flags: ServeFlags,
        notices: Notices,
        *,
        standby: bool = True,
        fence_kill_after_s: float = FENCE_KILL_AFTER_S,
    ) -> None:
        self.flags = flags
        self._standby, self._fence_kill_after_s = standby, fence_kill_after_s
        self.notices = notices
        self.supervisor: Supervisor | None = None
        self.runtime: RuntimeDir | None = None
        self._redis_binary: Path | None = None
        self._ports = PublicPorts()
        self._fork_server: ForkServer | None = None
        self._ending = contextlib.AsyncExitStack()
        self._ending.callback(self._ports.close)

    @property
    def target(self) -> str:
        """Address of the public gRPC service for a client on this machine."""
        return f"{probes.reachable_host(self.flags.host)}:{self.flags.grpc_port}"

    async def prepare(self) -> None:
        """Resolve the flags, prepare the model and print the lines about it. Raises ConfigError, after ending every
        process that it started."""
        check_flags(self.flags)
        require_server_packages()
        from pillion.engine.backends.devices import resolved
        from pillion.engine.checkpoints.model_files import folder_of

        resolved_flags = resolved(self.flags)
        check_files(resolved_flags)
        components = resolved_flags.gateway_workers + 1 + resolved_flags.prefill_workers + resolved_flags.decode_workers
        for number in range(components if resolved_flags.metrics_port else 0):
            port = resolved_flags.metrics_port + number
            bind_port(resolved_flags.metrics_host, "metrics_host", "metrics_port", port).close()
        self.flags = self._ports.reserve(resolved_flags)
        if resolved_flags.redis_url:
            await wait_for_redis(resolved_flags.redis_url, self.notices)
        else:
            self._redis_binary = redis.find_redis()
        with self.notices.progress(f"preparing model {self.flags.model}") as step:
            for size in sorted(set(ranks_of(self.flags).values())):
                await prepare_in_child(subset(PrepareFlags, self.flags, tensor_parallel_size=size), step)
        speculation = self.flags.speculative_config
        if speculation.method == "eagle3":
            with self.notices.progress(f"looking for EAGLE-3 head {speculation.model}"):
                await asyncio.to_thread(folder_of, speculation.model, speculation.revision)
        elif speculation.model:
            with self.notices.progress(f"preparing draft model {speculation.model}") as step:
                await prepare_in_child(speculation.model_flags(subset(PrepareFlags, self.flags)), step)
        self._start_fork_server()
        prepared, fit = prepared_model(self.flags)
        check_stages(self.flags, prepared)
        if fit is not None and fit.max_model_len_tokens < prepared.max_model_len:
            self.flags = replace(self.flags, max_model_len=fit.max_model_len_tokens)
            prepared = replace(prepared, max_model_len=fit.max_model_len_tokens)
        show_model(self.notices, self.flags, prepared, fit, threads_of(self.flags))

    async def start(self) -> Supervisor:
        """Start every process; return when requests can be served. Raises PillionError; then call :meth:`stop`."""
        self.runtime = RuntimeDir.create()
        self._ending.callback(self.runtime.remove)
        lending_table = core_lending_table(self.flags)
        if lending_table is not None:
            self._ending.callback(lending_table.close)
        specs = process_specs(self.flags, self.runtime.path, self._redis_binary, lending_table, standby=self._standby)
        redis_url = redis_url_of(self.flags, self.runtime.path)
        launch = self._fork_server.launch if self._fork_server is not None else None
        self.supervisor = Supervisor(specs, self.notices, launch=launch)
        self._ending.push_async_callback(self.supervisor.stop)
        await self.supervisor.start()
        if self.flags.prefill_workers:
            gateways = [probe_address(self.runtime.path, number) for number in range(self.flags.gateway_workers)]
            workers = [spec.component_id for spec in specs if spec.kind == "prefill"]
            if missing := await until_prefill_is_known(gateways, workers):
                self.notices.say(
                    f"{', '.join(missing)}: not known to the gateways after {PREFILL_KNOWN_S:g} s; until then other"
                    " workers compute all prompts",
                    "bold yellow",
                )
        node = f"unix:{self.runtime.path}/{NODE_SOCKET}"
        watch = watch_fences(node, self._fence_kill_after_s, self.supervisor.kill_component, self.notices)
        register = register_down(self.supervisor.down, redis_url, self.flags)
        fences = asyncio.create_task(watch, name="fence watch")
        records = asyncio.create_task(register, name="down records")
        self._ending.push_async_callback(end_tasks, fences, records)
        return self.supervisor

    async def stop(self) -> None:
        """Stop all processes and leave nothing behind, even after a failed start. Idempotent."""
        await self._ending.aclose()

    def _start_fork_server(self) -> None:
        """Start the fork server. It has the workers' OpenMP settings, which OpenMP reads when torch is imported."""
        environ = child_environ(os.environ, "") | compute_environ(threads_of(self.flags))
        show = partial(self.notices.component, "fork-server")
        modules = (*preloaded_modules(self.flags.device), line_of_tokenizer(self.flags))
        self._fork_server = ForkServer(modules, environ, show)
        self._ending.push_async_callback(self._fork_server.stop)
        self._fork_server.start()

    def left_behind(self) -> list[str]:
        """Return process groups and files that still exist after :meth:`stop`; empty unless there is a bug."""
        leaks = [f"process group {pid}" for pid in self.supervisor.living()] if self.supervisor else []
        if self._fork_server is not None and not self._fork_server.has_exited():
            leaks.append("the fork server")
        if self.runtime is not None and self.runtime.path.exists():
            leaks.append(str(self.runtime.path))
        return leaks


async def until_prefill_is_known(gateways: Sequence[str], workers: Sequence[str]) -> list[str]:
    """Wait, at most PREFILL_KNOWN_S, until the gateways at these probe addresses know all prefill ``workers``; return
    the workers that are still unknown. Requests are served without them, too, by decode workers."""
    pending = [(address, worker) for worker in workers for address in gateways]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PREFILL_KNOWN_S):
            while pending:
                if await probes.is_serving(pending[0][0], service=pending[0][1]):
                    del pending[0]
                else:
                    await asyncio.sleep(PROBE_INTERVAL_MS / 1000)
    return list(dict.fromkeys(worker for _, worker in pending))


def keeper_spec(socket: Path, environ: Mapping[str, str]) -> ProcessSpec:
    """Return the spec of the process that preserves the pools of KV nodes when a node dies."""
    argv = (sys.executable, "-m", "pillion", "keeper", str(socket))
    probe = partial(probes.accepts, socket)
    return ProcessSpec(component_id="keeper", level=0, argv=argv, environ=environ, probe=probe, spare=True)


def process_specs(
    flags: ServeFlags,
    folder: Path,
    redis_binary: Path | None,
    lending_table: CoreLendingTable | None = None,
    *,
    standby: bool = True,
) -> list[ProcessSpec]:
    """Return the specs of all processes, for resolved flags. ``redis_binary`` is None if ``flags.redis_url`` is set."""
    from pillion.engine.backends.devices import pool_device

    environ = child_environ(os.environ, redis_url_of(flags, folder))
    threads = threads_of(flags)
    affinities = cores_by_worker(flags, parse_cores(flags.cpu_affinity), threads)
    worker_cores = first_cores(flags, threads)
    compute = environ | compute_environ(threads)
    attach = str(folder / "attach.sock")
    specs = []
    if redis_binary is not None:
        path = folder / "redis.sock"
        specs.append(
            ProcessSpec(
                component_id="redis",
                level=0,
                argv=tuple(redis.command(redis_binary, path)),
                environ=environ,
                probe=partial(probes.accepts, path, redis.PING, redis.PONG),
                # Redis warns at its start that nothing is persistent, which is intended.
                quiet=flags.log_level != "debug",
                spare=True,
            )
        )
    first_port = flags.metrics_port + flags.gateway_workers
    metrics_ports = itertools.count(first_port) if flags.metrics_port else itertools.repeat(0)
    listen = f"unix:{folder}/{NODE_SOCKET}"
    pool = pool_device(flags.device, max(processes_of(flags).values()))
    pool_survives = pool == "cpu" and sys.platform == "linux"
    place = {"node_listen": listen, "attach_socket": attach, "kv_device": pool}
    if pool_survives:
        place["keeper_socket"] = str(folder / KEEPER_SOCKET)
        specs.append(keeper_spec(folder / KEEPER_SOCKET, environ))
    node = subset(KVNodeFlags, flags, metrics_port=next(metrics_ports), **place)
    more = {"environ": environ, "drain_s": node.hand_over_timeout_s, "standby": standby}
    specs.append(component_spec("kvnode", node.node_id, node, listen, level=1, **more))
    kinds = (("prefill", PrefillFlags, flags.prefill_workers), ("decode", DecodeFlags, flags.decode_workers))
    for role, cls, count in kinds:
        for number in range(count):
            component_id = f"{role}-{number}"
            listen = f"unix:{folder}/{component_id}.sock"
            # The gateway drains before its workers, so no request is left when the workers stop.
            place = {"component_id": component_id, "listen": listen, "attach_socket": attach}
            share = {"cpu_threads": threads, "cpu_affinity": next(affinities), "first_core": next(worker_cores)}
            share |= {
                "core_lending_table": lending_table.path if lending_table else "",
                "metrics_port": next(metrics_ports),
            }
            stages = flags.pipeline_parallel_size if role == "prefill" else 1
            share |= {"tensor_parallel_size": ranks_of(flags)[role], "pipeline_parallel_size": stages}
            worker = subset(cls, flags, **place, **share, drain_timeout_s=STOP_GRACE_S)
            # A worker ends at once when its node dies, unless the pool survives; a gateway waits for both to return.
            needs = (node.node_id,)
            survives = pool_survives and processes_of(flags)[role] == 1
            # Without prefill workers, decode workers compute prompts; so prefill workers are spare.
            more = {"environ": compute, "needs": needs, "survives": survives, "standby": standby}
            more |= {"level": 2, "kind": role, "spare": role == "prefill"}
            specs.append(component_spec(role, component_id, worker, listen, **more))
    return specs + gateway_specs(flags, folder, environ, level=3)


def redis_url_of(flags: ServeFlags, folder: Path) -> str:
    """Return the components' Redis URL: a running Redis, or the cluster's own in ``folder``."""
    return flags.redis_url or f"unix://{folder}/redis.sock"


def compute_environ(threads: int) -> dict[str, str]:
    """Return the OpenMP settings of a worker with ``threads`` threads that shares the machine with other workers: a
    waiting thread polls only briefly before it sleeps."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        # Polls of a waiting thread before it sleeps. With two workers of two threads on two cores, the same GEMMs take,
        # in milliseconds alone and side by side: default 41 and 322, passive policy 49 and 81, 1,000 polls 43 and 85.
        "GOMP_SPINCOUNT": "1000",
        "KMP_BLOCKTIME": "0",
    }


def ranks_of(flags: ServeFlags) -> dict[str, int]:
    """Return the number of ranks of a worker by role; prefill workers only if there are any."""
    size = flags.tensor_parallel_size
    return {"decode": size} | ({"prefill": flags.prefill_tensor_parallel_size or size} if flags.prefill_workers else {})


def processes_of(flags: ServeFlags) -> dict[str, int]:
    """Return the number of processes of a worker by role: the ranks of all its stages."""
    return {
        role: ranks * (flags.pipeline_parallel_size if role == "prefill" else 1)
        for role, ranks in ranks_of(flags).items()
    }


def check_stages(flags: ServeFlags, prepared: Any) -> None:
    """Raise ConfigError if the prefill workers cannot have ``--pipeline-parallel-size`` stages. ``prepared`` is the
    PreparedModel."""
    if flags.pipeline_parallel_size == 1:
        return
    from pillion.engine.backends.devices import resolve_device
    from pillion.engine.stages.stage_loading import check_stages

    if not flags.prefill_workers:
        raise ConfigError(f"--pipeline-parallel-size {flags.pipeline_parallel_size} needs --prefill-workers")
    worker = subset(PrefillFlags, flags, tensor_parallel_size=ranks_of(flags)["prefill"])
    check_stages(worker, resolve_device(worker), prepared)


def threads_of(flags: ServeFlags) -> int:
    """Return --cpu-threads, or else each worker's share of the cluster's cores."""
    return flags.cpu_threads or threads_per_worker(flags, len(parse_cores(flags.cpu_affinity)) or usable_cores())


def threads_per_worker(flags: ServeFlags, cores: int) -> int:
    """Return the threads of each worker if ``cores`` are divided among the workers that compute: with split policy
    "colocated", prefill workers are idle."""
    prefill_workers = 0 if flags.split_policy == "colocated" else flags.prefill_workers
    return max(1, cores // (prefill_workers + flags.decode_workers))


def cores_by_worker(flags: ServeFlags, cores: tuple[int, ...], threads: int) -> Iterator[str]:
    """Yield ``--cpu-affinity`` of each worker, prefill workers first: ``threads`` of ``cores``, from its first core.

    Raises ConfigError if there are too few ``cores``.
    """
    firsts = list(first_cores(flags, threads))
    needed = max(firsts) + threads
    if cores and len(cores) < needed:
        raise ConfigError(f"--cpu-affinity names {len(cores)} cores, the workers' threads need {needed}")
    for first in firsts:
        yield ",".join(map(str, cores[first : first + threads]))


def first_cores(flags: ServeFlags, threads: int) -> Iterator[int]:
    """Yield the index of each worker's first core among the cluster's cores, prefill workers first. With split policy
    "colocated", prefill workers share the cores of the first decode worker, because they are idle."""
    idle = flags.prefill_workers if flags.split_policy == "colocated" else 0
    for number in range(flags.prefill_workers + flags.decode_workers):
        yield max(0, number - idle) * threads


def core_lending_table(flags: ServeFlags) -> CoreLendingTable | None:
    """Create the shared table with which workers lend each other idle cores. Returns None on a GPU or outside Linux, if
    the workers have more threads than cores or nothing to lend, or if shared memory cannot be created.

    Without --cpu-threads, workers may also borrow cores that belong to no worker.
    """
    threads, affinity = threads_of(flags), parse_cores(flags.cpu_affinity)
    cores, owned = min(len(affinity) or usable_cores(), MAX_CPU_THREADS), max(first_cores(flags, threads)) + threads
    if flags.device != "cpu" or sys.platform != "linux" or owned > cores:
        return None
    cores = owned if flags.cpu_threads else cores
    if threads == cores:
        return None
    owners = [core // threads * threads if core < owned else core for core in range(cores)]
    try:
        return CoreLendingTable.create(owners, affinity[:cores])
    except OSError:
        return None


async def prepare_in_child(flags: PrepareFlags, step: Callable[[str], None]) -> None:
    """Prepare the model in a child process, so that this one need not import torch and Ctrl-C works at once. Starts no
    child if the model is ready. ``step`` gets each line of progress.

    Raises ConfigError with the child's last line.
    """
    from pillion.engine.load_model import is_ready

    if is_ready(flags):
        return
    last = ""

    def forward(line: str) -> None:
        nonlocal last
        last = line
        if not line.startswith(ERROR_PREFIX) and PREPARED not in line:
            step(line)

    argv = [sys.executable, "-m", "pillion", "prepare", *to_argv(flags)]
    environ = child_environ(os.environ, "") | {"TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}
    child = await ChildProcess.start(argv, environ, forward)
    try:
        code = await child.wait()
    finally:
        await child.stop(STOP_GRACE_S)
    if code:
        after = f", after {last!r}" if last else ""
        message = f"preparing the model ended with status {code}{after}"
        raise ConfigError(last.removeprefix(ERROR_PREFIX) if last.startswith(ERROR_PREFIX) else message)


def line_of_tokenizer(flags: ServeFlags) -> str:
    """Return the fork server's argument "MODULE:FUNCTION=TEXT" to load the prepared model's tokenizer for grammars.

    Raises ConfigError if the model is not prepared and cannot be.
    """
    from pillion.engine.checkpoints.prepare import prepare
    from pillion.engine.grammars.compiler import line_to_read_ahead
    from pillion.engine.models.config_parser import load_config

    prepared = prepare(subset(ModelFlags, flags))
    vocab_size = load_config(prepared.folder).vocab_size
    return line_to_read_ahead(prepared.folder, vocab_size, prepared.eos_token_ids)


def prepared_model(flags: ServeFlags | OfflineFlags) -> tuple[Any, PoolFit | None]:
    """Return the prepared model, and the pool's size if it is known before a GPU has loaded the weights.

    Raises ConfigError if the pool cannot hold one request.
    """
    from pillion.engine.backends.backend import kv_layout
    from pillion.engine.backends.step_memory import steps_bytes
    from pillion.engine.checkpoints.prepare import prepare
    from pillion.kvstore.memory.domain import CPU

    prepared = prepare(subset(ModelFlags, flags))
    if not flags.kv_pool_bytes:
        return prepared, None
    step_bytes = steps_bytes(flags, prepared) if flags.device == CPU else 0
    layout = kv_layout(prepared, flags.block_size, kv_cache_dtype=flags.kv_cache_dtype)
    workers, splits = (flags.decode_workers, flags.prefill_workers) if isinstance(flags, ServeFlags) else (1, 0)
    working_blocks = layout.working_pages * (2 if splits else 1)
    return prepared, fit_pool(flags, layout.block_bytes, prepared.max_model_len, workers, step_bytes, working_blocks)
