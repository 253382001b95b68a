"""Clusters in which faults are drawn: real processes with hooks at their fault points, each kind of its own shape.

small   one worker of each kind, one gateway, standbys
wide    two workers of each kind, two gateways behind one port, draft tokens, a disk tier, standbys
nodes   two KV nodes with their own workers, as on two hosts, two gateways on two ports
hosts   the same on three hosts of a network, whose links are long, narrow, lossy or cut (lab/testbed/networks.py)
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from lab.testbed.cluster import alive, proven_status, served
from lab.testbed.defaults import CLUSTER, DECODE, Defaults
from lab.testbed.faults.board import FaultBoard, hook_environment
from lab.testbed.hosts import EDGE, hosts
from lab.testbed.networks import HostNetwork, network
from pillion import Client
from pillion.errors import Conflict, PillionError
from tests.faults import leftovers
from tests.faults.questions import write_models
from tests.support.drafts import speculative
from tests.support.own_cache import model_cache

# The time that a whole cluster is given to be whole again, and how often that is looked at: each look costs the cores
# that the components start on.
WHOLE_WITHIN_S = 90.0
LOOK_EVERY_S = 0.15
# The hosts of the shape `hosts`: gateways and Redis are on the first one.
NETWORK_HOSTS = (EDGE, "kv-a", "kv-b")
ROLES = ("prefill", "decode", "kvnode", "gateway", "redis-server", "keeper")
# Of each process of two nodes.
MAX_LOG_CHARS = 200_000
# Small prefill steps, so that a prompt has several.
STEPS = ("--chunk-size", "64", "--max-num-batched-prefill-tokens", "64")
FLAGS = ("--dtype", "float32", "--max-model-len", "2048", "--heartbeat-ms", "400", *STEPS)
# Long enough for a machine whose cores are shared with other processes.
TIMEOUT = ("--heartbeat-timeout-ms", "8000")
STANDBYS: Defaults = {CLUSTER: {"standby": True}}
POOL = ("--kv-pool-bytes", "8MiB")
# So small that requests take turns, and that blocks go to disk and come back.
SMALL_POOL = ("--kv-pool-bytes", "3MiB")


def roles_in(shape: str) -> tuple[str, ...]:
    """Roles of the processes of a shape; simulated hosts have no keeper."""
    return tuple(role for role in ROLES if shape not in ("nodes", "hosts") or role != "keeper")


@dataclass(frozen=True, slots=True)
class FaultPlace:
    """A running cluster. ``targets`` are its gateways' addresses, ``names`` its components as the registry should list
    them; ``restarts_counted`` says whether its supervisor gives up where one of them dies too often; ``roles`` are
    those of its processes."""

    targets: tuple[str, ...]
    names: frozenset[str]
    board: FaultBoard
    pids: Callable[[str], list[int]]
    node_addresses: Callable[[], list[str]]
    redis_socket: Callable[[], pathlib.Path]
    log: Callable[[], str]
    restarts_counted: bool = True
    roles: tuple[str, ...] = ROLES
    network: HostNetwork | None = None
    _growth: leftovers.ProcessGrowth = field(default_factory=leftovers.ProcessGrowth)
    _tracebacks: leftovers.NewTracebacks = field(default_factory=leftovers.NewTracebacks)

    def client(self, patience_s: float = 0.0) -> Client:
        """A client of all gateways that waits so long for one that is lost or does not listen."""
        return Client(list(self.targets), resume_timeout_s=patience_s, connect_timeout_s=patience_s)

    def complaints(self) -> list[str]:
        """What is left once all requests have ended; waits until every component is back and nothing is left, for
        WHOLE_WITHIN_S at most. What cannot go away is told at once. A death is a line in the others' logs, and no
        traceback."""
        return [*self._left_at_last(), *self._tracebacks.look(self.log())]

    def _left_at_last(self) -> list[str]:
        until_s = time.monotonic() + WHOLE_WITHIN_S
        while True:
            try:
                wrong = self._left()
            except Conflict as error:
                return [f"no proof of integrity: {error.message}"]
            if not wrong:
                return self._growth.look({pid: role for role in self.roles for pid in self.pids(role)})
            if time.monotonic() >= until_s:
                return [f"after {WHOLE_WITHIN_S:g} s: {what}" for what in wrong]
            time.sleep(LOOK_EVERY_S)

    def _left(self) -> list[str]:
        """What is left now. Raises Conflict where a node cannot prove its integrity."""
        wrong = []
        for target in self.targets:
            try:
                with Client(target) as client:
                    status = client.status()
            except PillionError as error:
                return [f"the gateway at {target} does not answer: {error.message}"]
            known = {one.component_id for one in status.components}
            if known != self.names:
                wrong.append(f"{sorted(self.names - known)} are missing, {sorted(known - self.names)} are too many")
            if status.active_requests:
                wrong.append(f"{status.active_requests} requests are under way at gateways")
            wrong += leftovers.of_components(status.components)
        wrong += leftovers.of_processes({role: self.pids(role) for role in self.roles}, self.names)
        if wrong:
            return wrong
        nodes = {}
        for address in self.node_addresses():
            node = asyncio.run(proven_status(address))
            if node is None:
                return [f"the node at {address} does not answer"]
            nodes[node.node_id] = node
            wrong += leftovers.of_node(node, status.components)
        return wrong or leftovers.of_redis(self.redis_socket(), self.names, nodes)


@contextlib.contextmanager
def fault_place(shape: str, *flags: str) -> Iterator[FaultPlace]:
    """Run a cluster of a shape until the block ends. One of one node can have further ``flags``."""
    with tempfile.TemporaryDirectory(prefix="pil-") as name:
        folder = pathlib.Path(name)
        model = write_models(folder)
        environ = hook_environment(folder / "board", redis_is_sound=False)
        environ["PILLION_CACHE"] = model_cache(folder / "cache")
        board = FaultBoard(folder / "board")
        (folder / "run").mkdir()
        run = folder / "run"
        if shape in ("nodes", "hosts"):
            made = _two_nodes(run, model, environ, board, shape == "hosts")
        else:
            made = _one_node(run, (*model, *flags), environ, board, shape == "wide")
        with made as place:
            yield place


@contextlib.contextmanager
def _one_node(
    folder: pathlib.Path, model: tuple[str, ...], environ: dict[str, str], board: FaultBoard, wide: bool
) -> Iterator[FaultPlace]:
    name, *lora = model
    flags, workers = (*FLAGS, *TIMEOUT, *lora), 1
    flags += SMALL_POOL if wide else POOL
    if wide:
        workers = 2
        flags += ("--prefill-workers", "2", "--decode-workers", "2", "--gateway-workers", "2")
        flags += ("--speculative-config", str(speculative(3)), "--disk-path", str(folder / "disk"))
    names = {f"{role}-{number}" for role in ("prefill", "decode", "gateway") for number in range(workers)}
    with served(folder, name, *flags, environ=environ, forked=True, defaults=STANDBYS) as cluster:
        yield FaultPlace(
            (cluster.target,),
            frozenset(names | {"kvnode-0"}),
            board,
            lambda role: [process.pid for process in cluster.components(role) if alive(process)],
            lambda: [f"unix:{path}" for path in cluster.folder.rglob("kvnode-0.sock")],
            lambda: next(cluster.folder.rglob("redis.sock"), cluster.folder),
            cluster.log.read_text,
        )


@contextlib.contextmanager
def _two_nodes(
    folder: pathlib.Path, model: tuple[str, ...], environ: dict[str, str], board: FaultBoard, apart: bool
) -> Iterator[FaultPlace]:
    name, *lora = model
    enabled, modules = lora[:-2], lora[-2:]
    gateways, nodes = ("gateway-a", "gateway-b"), ("kv-a", "kv-b")
    flags = ("--model", name, "--dtype", "float32", "--max-model-len", "2048")
    with (
        network(*NETWORK_HOSTS) if apart else contextlib.nullcontext() as between,
        hosts(folder, *flags, network=between) as cluster,
    ):
        cluster.environ.update(environ)
        for node in nodes:
            cluster.node(node, *POOL)
        # What decode workers keep of ended answers would look like leaked slots.
        cluster.defaults = {DECODE: {"partial_block_percent": 0}}
        workers = [cluster.worker("decode", node, *enabled) for node in nodes]
        # What it computes for the decode worker of the other node is fetched from its own.
        workers.append(cluster.worker("prefill", nodes[0], "--max-num-batched-prefill-tokens", "64", *enabled))
        edge = ("--chunk-size", "64", *enabled, *modules)
        targets = [cluster.gateway(*edge, name=gateway) for gateway in gateways]
        for target, gateway in zip(targets, gateways, strict=True):
            cluster.sees(target, *workers, gateway=gateway)
        with cluster.supervised():
            yield FaultPlace(
                tuple(targets),
                frozenset({*workers, *gateways, *nodes}),
                board,
                cluster.pids,
                lambda: [cluster.node_address(node) for node in nodes],
                lambda: cluster.redis.socket,
                lambda: cluster.logs(MAX_LOG_CHARS),
                restarts_counted=False,
                roles=roles_in("nodes"),
                network=between,
            )
