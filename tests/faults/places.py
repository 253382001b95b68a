"""Clusters in which faults are drawn: real processes with hooks at their fault points, each kind of its own shape.

small   one worker of each kind, one gateway, standbys
wide    two workers of each kind, two gateways behind one port, guessed tokens, a disk tier, standbys
nodes   two KV nodes with their own workers, as on two hosts, two gateways on two ports
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil

from pillion import Client
from pillion.errors import PillionError
from pillion.kvstore.client.node_client import NodeClient
from pillion.types import ClusterStatus
from pillion.v1.kvnode_pb2 import NodeStatus
from testbed.cluster import alive, served
from testbed.conditions import wait_for
from testbed.faults.board import FaultBoard, hook_environment
from tests.faults.questions import write_models
from tests.support.drafts import guessing
from tests.support.own_cache import model_cache
from tests.support.two_nodes import hosts

# The time that a whole cluster is given to be whole again.
WHOLE_WITHIN_S = 180.0
# Small prefill steps, so that a prompt has several; a pool in which a few requests have to take turns.
FLAGS = (
    *("--dtype", "float32", "--max-model-len", "2048", "--chunk-size", "64", "--kv-pool-bytes", "8MiB"),
    *("--max-num-batched-prefill-tokens", "64", "--heartbeat-ms", "400"),
)
# Long enough for a machine whose cores other processes want, too.
TIMEOUT = ("--heartbeat-timeout-ms", "8000")


@dataclass(frozen=True, slots=True)
class FaultPlace:
    """A running cluster. ``names`` are its components as the registry should list them."""

    target: str | list[str]
    names: frozenset[str]
    board: FaultBoard
    pids: Callable[[str], list[int]]
    node_addresses: Callable[[], list[str]]
    log: Callable[[], str]

    def whole(self) -> bool:
        """Whether every component is there and nobody else is, none is fenced, and nobody has work."""
        status = self._status()
        if status is None or status.active_requests:
            return False
        if {one.component_id for one in status.components} != self.names:
            return False
        busy = any(one.running_requests or one.waiting_requests for one in status.components)
        return not busy and not any(one.fenced_components for one in status.components)

    def complaints(self) -> list[str]:
        """What has leaked, once all requests have ended and every component is back; waits for that."""
        try:
            wait_for("every component to be back and idle", self.whole, WHOLE_WITHIN_S)
            wait_for("all slots back", lambda: not self.held(), WHOLE_WITHIN_S)
        except AssertionError as error:
            return [f"{error}; held: {self.held()}; known: {self._status()}"]
        return []

    def held(self) -> list[str]:
        """What nodes hold though nobody works, after they have proved their integrity (I4)."""
        wrong = []
        for address in self.node_addresses():
            try:
                status = asyncio.run(proven_status(address))
            except PillionError as error:
                wrong.append(f"{address}: {error.message}")
                continue
            held = {
                name: getattr(status, name)
                for name in ("tickets", "pinned_blocks", "reserved_blocks", "waiting_tickets", "quarantined_blocks")
                if getattr(status, name)
            }
            wrong += [f"{address}: {held}"] if held else []
        return wrong

    def open_files(self) -> dict[int, int]:
        """How many files each process of a component has open, by its process id."""
        found = {}
        for role in ("gateway", "kvnode", "prefill", "decode"):
            for pid in self.pids(role):
                with contextlib.suppress(psutil.Error):
                    found[pid] = psutil.Process(pid).num_fds()
        return found

    def _status(self) -> ClusterStatus | None:
        with contextlib.suppress(PillionError), Client(self.target) as client:
            return client.status()
        return None


async def proven_status(address: str) -> NodeStatus:
    """A node's status after its integrity was proved. Raises PillionError."""
    client = NodeClient(address, "faults")
    try:
        await client.check_integrity()
        return await client.status()
    finally:
        await client.aclose()


@contextlib.contextmanager
def fault_place(shape: str) -> Iterator[FaultPlace]:
    """Run a cluster of a shape until the block ends."""
    with tempfile.TemporaryDirectory(prefix="pil-") as name:
        folder = pathlib.Path(name)
        model = write_models(folder)
        environ = hook_environment(folder / "board") | {"PILLION_CACHE": model_cache(folder / "cache")}
        board = FaultBoard(folder / "board")
        (folder / "run").mkdir()
        make = _two_nodes if shape == "nodes" else _one_node
        with make(folder / "run", model, environ, board, shape == "wide") as place:
            yield place


@contextlib.contextmanager
def _one_node(
    folder: pathlib.Path, model: tuple[str, ...], environ: dict[str, str], board: FaultBoard, wide: bool
) -> Iterator[FaultPlace]:
    name, *lora = model
    flags, workers = (*FLAGS, *TIMEOUT, "--standby", *lora), 1
    if wide:
        workers = 2
        flags += ("--prefill-workers", "2", "--decode-workers", "2", "--gateway-workers", "2")
        flags += ("--speculative-config", str(guessing(3)), "--disk-path", str(folder / "disk"))
    names = {f"{role}-{number}" for role in ("prefill", "decode", "gateway") for number in range(workers)}
    with served(folder, name, *flags, environ=environ) as cluster:
        yield FaultPlace(
            cluster.target,
            frozenset(names | {"kvnode-0"}),
            board,
            lambda role: [process.pid for process in cluster.components(role) if alive(process)],
            lambda: [f"unix:{next(cluster.folder.rglob('kvnode-0.sock'))}"],
            cluster.log.read_text,
        )


@contextlib.contextmanager
def _two_nodes(
    folder: pathlib.Path, model: tuple[str, ...], environ: dict[str, str], board: FaultBoard, wide: bool
) -> Iterator[FaultPlace]:
    name, *lora = model
    enabled, modules = lora[:-2], lora[-2:]
    gateways, nodes = ("gateway-a", "gateway-b"), ("kv-a", "kv-b")
    with hosts(folder, "--model", name, "--dtype", "float32", "--max-model-len", "2048") as cluster:
        cluster.environ.update(environ)
        for node in nodes:
            cluster.node(node, "--kv-pool-bytes", "8MiB")
        workers = [cluster.worker("decode", node, *enabled) for node in nodes]
        workers += [
            cluster.worker("prefill", node, "--max-num-batched-prefill-tokens", "64", *enabled) for node in nodes
        ]
        edge = ("--chunk-size", "64", *enabled, *modules)
        targets = [cluster.gateway(*edge, name=gateway) for gateway in gateways]
        for target, gateway in zip(targets, gateways, strict=True):
            cluster.sees(target, *workers, gateway=gateway)
        with cluster.supervised():
            yield FaultPlace(
                targets,
                frozenset({*workers, *gateways, *nodes}),
                board,
                lambda role: [one.pid for other, one in cluster.processes.items() if _role(other) == role],
                lambda: [f"unix:{folder}/{node}.sock" for node in nodes],
                cluster.logs,
            )


def _role(name: str) -> str:
    word = name.partition("-")[0]
    return "kvnode" if word == "kv" else word
