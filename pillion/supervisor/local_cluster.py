"""The local cluster of `pillion serve` and `pillion demo`: which processes, with which flags, in which order.

flags and places checked -> model prepared -> pool fits -> runtime directory -> redis -> kvnode -> workers -> gateway
and back in the opposite order, from wherever a start failed
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pillion.cli.checks import check_flags
from pillion.cli.console import Notices
from pillion.cli.flags import subset, to_argv
from pillion.config import DecodeFlags, KVNodeFlags, ModelFlags, PrefillFlags, PrepareFlags, ServeFlags
from pillion.core_board import CoreBoard
from pillion.cores import MAX_CPU_THREADS, parse_cores, usable_cores
from pillion.errors import ConfigError
from pillion.supervisor import embedded_redis as redis
from pillion.supervisor import probes
from pillion.supervisor.child_process import ChildProcess, child_environ
from pillion.supervisor.component_process import PREPARED, STOP_GRACE_S, preloaded_modules, require_server_packages
from pillion.supervisor.down_records import tell_down
from pillion.supervisor.fence_watch import watch_fences
from pillion.supervisor.fork_server import ForkServer
from pillion.supervisor.gateway_processes import PublicPorts, component_spec, gateway_specs, probe_address
from pillion.supervisor.pool_fit import PoolFit, fit_pool
from pillion.supervisor.preflight import check_cluster, wait_for_redis
from pillion.supervisor.runtime_dir import RuntimeDir
from pillion.supervisor.start_lines import tell_model
from pillion.supervisor.supervisor import FAILED, PROBE_INTERVAL_MS, ProcessSpec, Supervisor

PREPARE_STOP_GRACE_S = 2.0
# A worker's first heartbeat, and the gateway's next look at the registry, take a moment, and longer on a busy machine.
PREFILL_KNOWN_S = 30.0
NODE_SOCKET = "kvnode-0.sock"
KEEPER_SOCKET = "keeper.sock"
# Polls of a waiting OpenMP thread before it sleeps. With two workers of two threads on two cores, the same GEMMs take,
# in milliseconds alone and side by side: default 41 and 322, passive policy 49 and 81, 1,000 spins 43 and 85.
GOMP_SPIN_COUNT = 1000


class LocalCluster:
    """Use: ``await prepare()``, ``await start()`` and, whatever happened, ``await stop()``.

    ``flags`` are those that were given, until :meth:`prepare` has settled them: without "auto", with real ports.
    """

    def __init__(self, flags: ServeFlags, notices: Notices) -> None:
        self.flags = flags
        self.notices = notices
        self.supervisor: Supervisor | None = None
        self.runtime: RuntimeDir | None = None
        self._redis_binary: Path | None = None
        self._ports = PublicPorts()
        self._fork_server: ForkServer | None = None
        # What stop() has to do, the last first.
        self._ending = contextlib.AsyncExitStack()
        self._ending.callback(self._ports.close)

    @property
    def target(self) -> str:
        """Address of the public gRPC service, as a client on this machine reaches it."""
        return f"{probes.reachable_host(self.flags.host)}:{self.flags.grpc_port}"

    async def prepare(self) -> None:
        """Settles the flags, makes the model ready and tells about it. Raises ConfigError; no process is left
        then."""
        check_flags(self.flags)
        require_server_packages()
        from pillion.engine.backends.devices import resolved
        from pillion.engine.checkpoints.model_files import head_folder

        settled = resolved(self.flags)
        check_cluster(settled, settled.gateway_workers + 1 + settled.prefill_workers + settled.decode_workers)
        self.flags = self._ports.hold(settled)
        if settled.redis_url:
            await wait_for_redis(settled.redis_url, self.notices)
        else:
            self._redis_binary = redis.find_redis()
        with self.notices.progress(f"preparing model {self.flags.model}") as step:
            for size in sorted(set(ranks_of(self.flags).values())):
                await prepare_in_child(subset(PrepareFlags, self.flags, tensor_parallel_size=size), step)
        speculation = self.flags.speculative_config
        if speculation.method == "eagle3":
            with self.notices.progress(f"looking for EAGLE-3 head {speculation.model}"):
                await asyncio.to_thread(head_folder, speculation.model, speculation.revision)
        elif speculation.model:
            with self.notices.progress(f"preparing draft model {speculation.model}") as step:
                await prepare_in_child(speculation.model_flags(subset(PrepareFlags, self.flags)), step)
        if self.flags.fork_server:
            # Its imports take longer than all that is left to do before the first component starts.
            self._begin_fork_server()
        prepared, fit = prepared_model(self.flags)
        if fit is not None and fit.max_model_len_tokens < prepared.max_model_len:
            # All components have to agree on the length that the pool allows.
            self.flags = replace(self.flags, max_model_len=fit.max_model_len_tokens)
            prepared = replace(prepared, max_model_len=fit.max_model_len_tokens)
        tell_model(self.notices, self.flags, prepared, fit, threads_of(self.flags))

    async def start(self) -> Supervisor:
        """Starts every process; returns when a request would be served. Raises PillionError; then call :meth:`stop`."""
        self.runtime = RuntimeDir.create()
        self._ending.callback(self.runtime.remove)
        board = core_board(self.flags)
        if board is not None:
            self._ending.callback(board.close)
        specs = process_specs(self.flags, self.runtime.path, self._redis_binary, board)
        redis_url = redis_url_of(self.flags, self.runtime.path)
        launch = self._fork_server.launch if self._fork_server is not None else None
        self.supervisor = Supervisor(specs, self.notices, launch=launch)
        self._ending.push_async_callback(self.supervisor.stop)
        await self.supervisor.start()
        if self.flags.prefill_workers:
            gateways = [probe_address(self.runtime.path, number) for number in range(self.flags.gateway_workers)]
            await until_prefill_is_known(gateways)
        node = f"unix:{self.runtime.path}/{NODE_SOCKET}"
        watching = watch_fences(node, self.flags.fence_kill_after_s, self.supervisor.kill_component, self.notices)
        fences = asyncio.create_task(watching, name="fences")
        telling = asyncio.create_task(tell_down(self.supervisor.down, redis_url, self.flags), name="what is down")
        self._ending.push_async_callback(lambda: asyncio.gather(fences, telling, return_exceptions=True))
        self._ending.callback(fences.cancel)
        self._ending.callback(telling.cancel)
        return self.supervisor

    async def stop(self) -> None:
        """Stops everything and leaves nothing behind, also after a start that failed half-way. Idempotent."""
        await self._ending.aclose()

    def _begin_fork_server(self) -> None:
        """OpenMP reads its settings when torch is imported, so the server has those of the workers."""
        environ = child_environ(os.environ, "") | compute_environ(threads_of(self.flags))
        show = partial(self.notices.component, "fork-server")
        modules = (*preloaded_modules(self.flags.device), tokenizer_to_read(self.flags))
        self._fork_server = ForkServer(modules, environ, show)
        self._ending.push_async_callback(self._fork_server.stop)
        self._fork_server.start()

    def left_behind(self) -> list[str]:
        """Process groups and files that still exist after :meth:`stop`; empty unless something is wrong."""
        left = [f"process group {pid}" for pid in self.supervisor.living()] if self.supervisor else []
        if self._fork_server is not None and not self._fork_server.gone():
            left.append("the fork server")
        if self.runtime is not None and self.runtime.path.exists():
            left.append(str(self.runtime.path))
        return left


async def until_prefill_is_known(gateways: Sequence[str]) -> None:
    """Returns when each gateway, by its address for probes, knows a prefill worker, or after PREFILL_KNOWN_S: requests
    are served without one, too, but not as they will be."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PREFILL_KNOWN_S):
            for address in gateways:
                while not await probes.is_serving(address, service="prefill"):  # noqa: ASYNC110
                    await asyncio.sleep(PROBE_INTERVAL_MS / 1000)


def process_specs(
    flags: ServeFlags, folder: Path, redis_binary: Path | None, board: CoreBoard | None = None
) -> list[ProcessSpec]:
    """Every process of the cluster, for settled flags. ``redis_binary`` is None where they name a running Redis."""
    from pillion.engine.backends.devices import pool_device

    environ = child_environ(os.environ, redis_url_of(flags, folder))
    threads = threads_of(flags)
    bound = cores_by_worker(flags, parse_cores(flags.cpu_affinity), threads)
    firsts = first_cores(flags, threads)
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
                probe=partial(redis.answers, path),
                # Redis greets with warnings about persistence, which it does not have here.
                quiet=flags.log_level != "debug",
                spare=True,
            )
        )
    # Pages of metrics: the gateways' first, then one port after the other.
    pages = itertools.count(flags.metrics_port + flags.gateway_workers) if flags.metrics_port else itertools.repeat(0)
    listen = f"unix:{folder}/{NODE_SOCKET}"
    pool = pool_device(flags.device, max(ranks_of(flags).values()))
    kept = flags.keep_pool and pool == "cpu" and sys.platform == "linux"
    place = {"node_listen": listen, "attach_socket": attach, "kv_device": pool}
    if kept:
        keeper = folder / KEEPER_SOCKET
        place["keeper_socket"] = str(keeper)
        argv = (sys.executable, "-m", "pillion", "keeper", str(keeper))
        probe = partial(probes.accepts, keeper)
        specs.append(ProcessSpec(component_id="keeper", level=0, argv=argv, environ=environ, probe=probe, spare=True))
    node = subset(KVNodeFlags, flags, metrics_port=next(pages), **place)
    standby = {"standby": flags.standby}
    specs.append(component_spec("kvnode", node.node_id, node, listen, level=1, environ=environ, **standby))
    kinds = (("prefill", PrefillFlags, flags.prefill_workers), ("decode", DecodeFlags, flags.decode_workers))
    for role, cls, count in kinds:
        for number in range(count):
            component_id = f"{role}-{number}"
            listen = f"unix:{folder}/{component_id}.sock"
            # The gateway drains before its workers: nothing is left to wait for when their turn comes.
            place = {"component_id": component_id, "listen": listen, "attach_socket": attach}
            share = {"cpu_threads": threads, "cpu_affinity": next(bound), "first_core": next(firsts)}
            share |= {"core_board": board.path if board else "", "metrics_port": next(pages)}
            share |= {"tensor_parallel_size": ranks_of(flags)[role]}
            worker = subset(cls, flags, **place, **share, drain_timeout_s=STOP_GRACE_S)
            # A worker without a node ends at once, unless the pool is kept; the gateway waits for both by itself.
            needs = (node.node_id,)
            # Those of several ranks end with their node in any case.
            survives = kept and ranks_of(flags)[role] == 1
            # Decode workers compute prompts where there is no prefill worker.
            more = {"environ": compute, "needs": needs, "survives": survives, "spare": role == "prefill", **standby}
            specs.append(component_spec(role, component_id, worker, listen, level=2, kind=role, **more))
    return specs + gateway_specs(flags, folder, environ, level=3)


def redis_url_of(flags: ServeFlags, folder: Path) -> str:
    """Where the components find Redis: a running one, or the cluster's own in ``folder``."""
    return flags.redis_url or f"unix://{folder}/redis.sock"


def compute_environ(threads: int) -> dict[str, str]:
    """OpenMP's settings for one worker of several on a machine: its own threads, and a short spin when they wait."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "GOMP_SPINCOUNT": str(GOMP_SPIN_COUNT),
        "KMP_BLOCKTIME": "0",
    }


def ranks_of(flags: ServeFlags) -> dict[str, int]:
    """The number of ranks of a worker of each role; of prefill workers only where there are any."""
    size = flags.tensor_parallel_size
    return {"decode": size} | ({"prefill": flags.prefill_tensor_parallel_size or size} if flags.prefill_workers else {})


def threads_of(flags: ServeFlags) -> int:
    """--cpu-threads, else a worker's share of the cores that the cluster may use."""
    return flags.cpu_threads or threads_per_worker(flags, len(parse_cores(flags.cpu_affinity)) or usable_cores())


def threads_per_worker(flags: ServeFlags, cores: int) -> int:
    """A worker's share of ``cores`` among the workers that compute. Co-located, prefill workers are idle."""
    prefill_workers = 0 if flags.split_policy == "colocated" else flags.prefill_workers
    return max(1, cores // (prefill_workers + flags.decode_workers))


def cores_by_worker(flags: ServeFlags, cores: tuple[int, ...], threads: int) -> Iterator[str]:
    """``--cpu-affinity`` of each worker, prefill workers first: the next ``threads`` of ``cores``.

    Raises ConfigError where ``cores`` are too few.
    """
    firsts = list(first_cores(flags, threads))
    needed = max(firsts) + threads
    if cores and len(cores) < needed:
        raise ConfigError(f"--cpu-affinity names {len(cores)} cores, the workers' threads need {needed}")
    for first in firsts:
        yield ",".join(map(str, cores[first : first + threads]))


def first_cores(flags: ServeFlags, threads: int) -> Iterator[int]:
    """The first core of each worker, prefill workers first, among the cores that the cluster may use.

    Co-located, prefill workers share the cores of the first decode worker: they do not compute at the same time.
    """
    idle = flags.prefill_workers if flags.split_policy == "colocated" else 0
    for number in range(flags.prefill_workers + flags.decode_workers):
        yield max(0, number - idle) * threads


def core_board(flags: ServeFlags) -> CoreBoard | None:
    """The board on which workers lend each other cores; None where they have none to lend, have more threads than
    cores, or the system gives no memory for a board.

    A core that no worker owns can be borrowed at any time; with --cpu-threads such cores are left alone.
    """
    threads, bound = threads_of(flags), parse_cores(flags.cpu_affinity)
    cores, owned = min(len(bound) or usable_cores(), MAX_CPU_THREADS), max(first_cores(flags, threads)) + threads
    if not flags.share_cores or flags.device != "cpu" or sys.platform != "linux" or owned > cores:
        return None
    cores = owned if flags.cpu_threads else cores
    if threads == cores:
        return None
    owners = [core // threads * threads if core < owned else core for core in range(cores)]
    try:
        return CoreBoard.create(owners, bound[:cores])
    except OSError:
        return None


async def prepare_in_child(flags: PrepareFlags, step: Callable[[str], None]) -> None:
    """Makes the model ready in a child process, whose imports end with it and which Ctrl-C ends at once. Where it is
    ready already no child is started.

    Raises ConfigError with the child's last line.
    """
    from pillion.engine.backends.loading import is_ready

    if is_ready(flags):
        return
    last = ""

    def forward(line: str) -> None:
        nonlocal last
        last = line
        if not line.startswith(FAILED) and PREPARED not in line:
            step(line)

    argv = [sys.executable, "-m", "pillion", "prepare", *to_argv(flags)]
    # Only the child's own lines are progress, not the libraries' warnings and bars.
    environ = child_environ(os.environ, "") | {"TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}
    child = await ChildProcess.start(argv, environ, forward)
    try:
        code = await child.wait()
    finally:
        await child.stop(PREPARE_STOP_GRACE_S)
    if code:
        raise ConfigError(last.removeprefix(FAILED) or f"preparing the model ended with {code}")


def tokenizer_to_read(flags: ServeFlags) -> str:
    """Returns the "MODULE:FUNCTION=TEXT" with which a fork server reads the prepared model's tokenizer for grammars.

    A decode worker would need longer for that than for all else that it does before it serves. TEXT is JSON: the path
    of the tokenizer, the size of the vocabulary, and the tokens within it that end an answer.

    Raises ConfigError where the model is not prepared and cannot be.
    """
    from pillion.engine.checkpoints.prepare import prepare
    from pillion.engine.models.model_config import load_config

    prepared = prepare(subset(ModelFlags, flags))
    vocab_size = load_config(prepared.folder).vocab_size
    ends = [end for end in prepared.eos_token_ids if end < vocab_size]
    text = json.dumps([str(prepared.folder / "tokenizer.json"), vocab_size, ends])
    return f"pillion.engine.grammars.compiler:read_ahead={text}"


def prepared_model(flags: ServeFlags) -> tuple[Any, PoolFit | None]:
    """The prepared model, and the pool's size where it is known before a GPU has loaded the weights.

    Raises ConfigError where the pool cannot hold one request.
    """
    from pillion.engine.backends.backend import kv_layout
    from pillion.engine.checkpoints.prepare import prepare

    prepared = prepare(subset(ModelFlags, flags))
    if not flags.kv_pool_bytes:
        return prepared, None
    block_bytes = kv_layout(prepared, flags.block_size, kv_cache_dtype=flags.kv_cache_dtype).block_bytes
    return prepared, fit_pool(flags, block_bytes, prepared.max_model_len, flags.decode_workers)
