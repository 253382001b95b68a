"""Several KV nodes on one machine, each with its pool, socket and workers, as if on several hosts, or on hosts of a
network of namespaces."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

from lab.testbed.cluster import PATIENT_MS, READY_TIMEOUT_S, HostProcess, proven_status
from lab.testbed.conditions import POLL_S, WITHIN_S, wait_for
from lab.testbed.defaults import Defaults, defaults_environment
from lab.testbed.faults.board import hook_path
from lab.testbed.forks import shared_forks
from lab.testbed.nested_forks import ON_HOST
from lab.testbed.networks import HostNetwork
from lab.testbed.ports import free_port
from lab.testbed.redis import RedisServer, running_redis
from pillion import Client
from pillion.errors import PillionError
from pillion.supervisor.child_process import child_environ
from pillion.supervisor.local_cluster import compute_environ
from pillion.types import ClusterStatus
from pillion.v1.kvnode_pb2 import NodeStatus

# Characters shown of the end of each process's log.
MAX_LOG_CHARS = 3000
# Ports on hosts of a network; EDGE is the host of Redis and the gateways.
NODE_PORT = 50061
WORKER_PORTS = {"prefill": 50100, "decode": 50200}
EDGE = "edge"
EVERYWHERE = "0.0.0.0"


class Hosts:
    """Real processes by name, and their ``redis``.

    Args:
        folder: files and logs; its path must be short, since Unix sockets are in it.
        caches: model cache of a node's machine, shared by its workers, by node; the default is this process's.
        environ: added to the environment of all processes.
        defaults: defaults of the product's parameters in all processes.
        packages: folder with another version's ``pillion`` for a process, by its name; others run this tree.
        forked: processes are forks of a process of their version (:mod:`lab.testbed.forks`).
        network: a node and its workers run on the host of the node's name, Redis and gateways on EDGE. Nodes and
            workers listen on all addresses, so that they survive a change of their host's address.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        redis: RedisServer,
        model: tuple[str, ...],
        network: HostNetwork | None = None,
        forked: bool = True,
    ) -> None:
        self.network = network
        self.folder = folder
        self.redis = redis
        self.processes: dict[str, HostProcess] = {}
        self.caches: dict[str, pathlib.Path] = {}
        self.environ: dict[str, str] = {}
        self.defaults: Defaults = {}
        self.packages: dict[str, pathlib.Path] = {}
        self._commands: dict[str, tuple[tuple[str, ...], str]] = {}
        self._common = ("--redis-url", redis.url, "--heartbeat-ms", "200", "--heartbeat-timeout-ms", str(PATIENT_MS))
        self._model = model
        self._forked = forked

    def keeper(self, name: str = "keeper") -> str:
        """Start a keeper of pools, wait until it listens, and return its socket, for a node's --keeper-socket."""
        path = self.folder / f"{name}.sock"
        self._start(name, "keeper", str(path))
        wait_for(f"{name} to listen", lambda: _listens(path))
        return str(path)

    def node(self, node_id: str, *flags: str) -> None:
        """Start a KV node and wait until it answers."""
        where = self.node_address(node_id) if self.network is None else f"{EVERYWHERE}:{NODE_PORT}"
        listen = ("--node-listen", where, "--attach-socket", self._attach(node_id))
        self._start(node_id, "kvnode", "--node-id", node_id, *listen, *flags, machine=node_id)
        wait_for(f"{node_id} to answer", lambda: self._ask(node_id), READY_TIMEOUT_S)

    def worker(self, role: str, node_id: str, *flags: str) -> str:
        """Begin to start a worker of ``role`` at a node and return its name."""
        name = f"{role}-{node_id}"
        listen = f"unix:{self.folder}/{name}.sock"
        if self.network is not None:
            listen = f"{EVERYWHERE}:{WORKER_PORTS[role]}"
        place = ("--component-id", name, "--listen", listen, "--cpu-threads", "1")
        self._start(name, role, *self._model, *place, "--attach-socket", self._attach(node_id), *flags, machine=node_id)
        return name

    def gateway(self, *flags: str, name: str = "gateway") -> str:
        """Begin to start a gateway and return its target for clients. It keeps the record of a lost worker for its own
        --heartbeat-timeout-ms."""
        target = f"127.0.0.1:{free_port()}"
        if self.network is not None:
            target = f"{self.network.address(EDGE)}:{free_port()}"
            flags = ("--host", self.network.address(EDGE), *flags)
        # Every prompt through a prefill worker; the planner would sometimes skip it.
        edge = ("--grpc-port", target.split(":")[1], "--http-port", "0", "--split-policy", "disaggregated")
        self._start(name, "gateway", *self._model, "--component-id", name, *edge, *flags)
        return target

    @contextlib.contextmanager
    def supervised(self) -> Iterator[None]:
        """Restart every process that ends, including Redis, as a supervisor does, until the block ends."""
        over = threading.Event()

        def supervise() -> None:
            while not over.wait(POLL_S):
                for name, process in tuple(self.processes.items()):
                    if process.poll() is not None:
                        command, machine = self._commands[name]
                        self._start(name, *command, machine=machine)
                if self.redis.process is not None and self.redis.process.poll() is not None:
                    self.redis.start()

        supervisor = threading.Thread(target=supervise, daemon=True)
        supervisor.start()
        try:
            yield
        finally:
            over.set()
            supervisor.join()

    def sees(self, target: str, *names: str, gateway: str = "gateway") -> None:
        """Wait until a gateway serves with exactly these workers."""

        def there() -> bool:
            for name in (gateway, *names):
                assert self.processes[name].poll() is None, f"{name} ended:\n{self._log(name).read_text()}"
            status = self._status(target)
            workers = (
                {component.component_id for component in status.components if component.role in ("prefill", "decode")}
                if status
                else ()
            )
            with contextlib.suppress(PillionError), Client(target) as client:
                return workers == set(names) and bool(client.models())
            return False

        wait_for(f"{', '.join(names)} at the gateway", there, READY_TIMEOUT_S)

    def places(self, target: str) -> dict[str, str]:
        """Return the host of each component that a gateway has discovered, from its address, by component name."""
        status = self._status(target)
        components = status.components if status else ()
        return {one.component_id: one.address.rpartition(":")[0] for one in components}

    def node_status(self, node_id: str) -> NodeStatus:
        """Return a node's status after an integrity check (I4)."""
        status = self._ask(node_id)
        assert status is not None, f"{node_id} does not answer"
        return status

    def idle(self, node_id: str) -> bool:
        """Return whether nothing is pinned, promised or awaited at a node."""
        status = self.node_status(node_id)
        return not (status.tickets or status.pinned_blocks or status.reserved_blocks or status.waiting_tickets)

    def pids(self, role: str) -> list[int]:
        """Return the processes of "prefill", "decode", "gateway", "kvnode" or "redis-server"."""
        if role == "redis-server":
            return [self.redis.process.pid] if self.redis.process is not None else []
        return [one.pid for name, one in self.processes.items() if self._commands[name][0][0] == role]

    def stop(self, name: str, *, kill: bool = False) -> None:
        """End a process as a supervisor does, or with SIGKILL."""
        process = self.processes.pop(name)
        (process.kill if kill else process.terminate)()
        process.wait(WITHIN_S)

    def replace(self, name: str, packages: pathlib.Path | None) -> None:
        """End a process and begin to start it again with the same flags, from ``packages`` or this tree."""
        command, machine = self._commands[name]
        if name in self.processes:
            self.stop(name)
        self.packages.pop(name, None)
        if packages is not None:
            self.packages[name] = packages
        self._start(name, *command, machine=machine)
        if command[0] == "kvnode":
            wait_for(f"{name} to answer", lambda: self._ask(name), READY_TIMEOUT_S)
        elif command[0] == "keeper":
            wait_for(f"{name} to listen", lambda: _listens(pathlib.Path(command[1])))

    def stop_all(self) -> None:
        """Stop all processes, gateways and workers first, since these end when their node does."""
        for name in reversed(tuple(self.processes)):
            self.stop(name)

    def logs(self, chars: int = MAX_LOG_CHARS) -> str:
        """Return the last ``chars`` of each process's log."""
        return "\n".join(f"--- {path.name}\n{path.read_text()[-chars:]}" for path in sorted(self.folder.glob("*.log")))

    def _start(self, name: str, *command: str, machine: str = "") -> None:
        self._commands[name] = command, machine
        role, *own = command
        # A keeper has no flags.
        common = () if role == "keeper" else self._common
        if self.network is not None and role in ("kvnode", *WORKER_PORTS):
            # Reachable from other hosts.
            common = (*common, "--insecure-internal")
        environment = child_environ(os.environ, self.redis.url) | compute_environ(1) | self.environ
        environment |= defaults_environment(self.defaults) | {"TMPDIR": str(self.folder)}
        if self.defaults:
            environment |= hook_path(environment)
        if machine in self.caches:
            environment["PILLION_CACHE"] = str(self.caches[machine])
        if name in self.packages:
            # PYTHONSAFEPATH: packages in the working directory would come first otherwise.
            environment |= {"PYTHONPATH": str(self.packages[name]), "PYTHONSAFEPATH": "1"}
        argv = ("-m", "pillion", role, *common, *own)
        if self._forked:
            host = (ON_HOST, self.network.namespace(machine or EDGE)) if self.network is not None else ()
            forks = shared_forks(environment, packages=name in self.packages)
            command = (sys.executable, *argv[:2], *host, *argv[2:])
            self.processes[name] = forks.start(command, environment, self._log(name))
            return
        with self._log(name).open("ab") as out:
            before = self.network.enter(machine or EDGE) if self.network is not None else ()
            self.processes[name] = subprocess.Popen(
                [*before, sys.executable, *argv], stdout=out, stderr=subprocess.STDOUT, env=environment
            )

    def _log(self, name: str) -> pathlib.Path:
        return self.folder / f"{name}.log"

    def node_address(self, node_id: str) -> str:
        """Return the address of a node's gRPC service."""
        if self.network is not None:
            return f"{self.network.address(node_id)}:{NODE_PORT}"
        return f"unix:{self.folder}/{node_id}.sock"

    def _attach(self, node_id: str) -> str:
        return str(self.folder / f"{node_id}.attach.sock")

    def _ask(self, node_id: str) -> NodeStatus | None:
        assert self.processes[node_id].poll() is None, f"{node_id} ended:\n{self._log(node_id).read_text()}"
        return asyncio.run(proven_status(self.node_address(node_id)))

    def _status(self, target: str) -> ClusterStatus | None:
        with contextlib.suppress(PillionError), Client(target) as client:
            return client.status()
        return None


def _listens(path: pathlib.Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) == 0


@contextlib.contextmanager
def hosts(
    folder: pathlib.Path, *model: str, network: HostNetwork | None = None, forked: bool = True
) -> Iterator[Hosts]:
    """Start Redis and yield hosts without other processes; end every process. ``model``: flags shared by all
    components. ``forked`` False: each component is a fresh program, to measure starts."""
    edge = (network.enter(EDGE), network.address(EDGE)) if network is not None else ()
    with running_redis(*edge) as redis:
        running = Hosts(folder, redis, model, network, forked)
        try:
            yield running
        except BaseException:
            sys.stderr.write(running.logs())
            raise
        finally:
            running.stop_all()
