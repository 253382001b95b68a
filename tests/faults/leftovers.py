"""What a cluster has left when all requests have ended: the part of the checker that looks at the components.

Nothing may be left of a request, whoever died: no slot, ticket, pin, hold, stream, seat, entry in the index or key in
Redis, and neither files nor memory that grow from run to run.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

import psutil
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from pillion.kvstore.index import redis_keys as keys
from pillion.types import ComponentStatus
from pillion.v1.kvnode_pb2 import NodeStatus

# Slots of requests and workers. Without a stream, a worker also returns its free slots.
HELD = (
    *("tickets", "waiting_tickets", "pinned_blocks", "reserved_blocks"),
    *("leased_blocks", "quarantined_blocks", "late_blocks", "fenced_components"),
)
# How a traceback begins, which no component's death may leave in the logs of the others.
TRACEBACK = "Traceback (most recent call last)"
# What a component does for requests.
BUSY = ("running_requests", "waiting_requests", "waiting_tokens", "queued_tokens")
# How much more a process may have open or in private memory than after the run after which it had the least.
MORE_FILES = 32
MORE_MEMORY_BYTES = 128 * 2**20
_OF_REGISTRY = (keys.COMPONENTS, keys.EXPIRY, keys.NUMBERS, keys.NODES)


def of_components(components: tuple[ComponentStatus, ...]) -> list[str]:
    """What components still do, by their last heartbeats."""
    wrong = []
    for one in components:
        busy = {name: getattr(one, name) for name in BUSY if getattr(one, name)}
        wrong += [f"{one.component_id} still has {busy}"] if busy else []
    return wrong


def of_processes(pids: Mapping[str, list[int]], names: Collection[str]) -> list[str]:
    """Roles of which fewer or more processes serve than have names. The registry lists the dead for a while."""
    wanted = Counter("kvnode" if name.startswith("kv") else name.partition("-")[0] for name in names)
    # No registry lists these.
    wanted["redis-server"] = wanted["keeper"] = 1
    serving = {role: sum(map(_serves, found)) for role, found in pids.items()}
    return [f"{count} of {role} serve, not {wanted[role]}" for role, count in serving.items() if count != wanted[role]]


# How /proc/PID/net says that a socket listens: the state of TCP, and the flag of a Unix socket that accepts.
TCP_LISTENS, UNIX_ACCEPTS = "0A", 0x10000


def _serves(pid: int) -> bool:
    """Whether the process has a socket on which it listens, be it in this network namespace or in another one."""
    process = pathlib.Path(f"/proc/{pid}")
    own = set()
    for file in (process / "fd").glob("*"):
        with contextlib.suppress(OSError):
            own.add(str(file.readlink()))
    return any(f"socket:[{inode}]" in own for inode in _listening(process / "net"))


def _listening(tables: pathlib.Path) -> Iterator[str]:
    """Yields the inodes of all sockets that listen in a network namespace, by its tables in /proc/PID/net."""
    for name in ("tcp", "tcp6", "unix"):
        with contextlib.suppress(OSError):
            for line in (tables / name).read_text().splitlines()[1:]:
                words = line.split()
                listens = int(words[3], 16) & UNIX_ACCEPTS if name == "unix" else words[3] == TCP_LISTENS
                if listens:
                    yield words[6 if name == "unix" else 9]


def of_node(status: NodeStatus, components: Iterable[ComponentStatus]) -> list[str]:
    """What a node still holds, and whether its workers and all gateways are known there, and nobody but other nodes
    that have fetched from it beside them."""
    held = {name: getattr(status, name) for name in HELD if getattr(status, name)}
    if held:
        return [f"{status.node_id} still holds {held}"]
    nodes = sum(one.role == "kvnode" for one in components)
    own = [one for one in components if one.role == "gateway" or one.node_id == status.node_id]
    wanted = sum(one.role != "kvnode" for one in own)
    right = wanted <= status.holders < wanted + nodes
    return [] if right else [f"{status.node_id} knows {status.holders} holders, not {wanted}"]


def of_redis(socket: pathlib.Path, names: Collection[str], nodes: dict[str, NodeStatus]) -> list[str]:
    """What Redis still has: components by name, keys of gateways, and entries of living nodes in the index."""
    try:
        with redis.Redis(unix_socket_path=str(socket), retry=Retry(NoBackoff(), 0)) as client:
            return [*_of_registry(client, names, nodes), *_of_keys(client), *_of_index(client, nodes)]
    except redis.RedisError as error:
        return [f"Redis does not answer: {error}"]


def _of_registry(client: redis.Redis, names: Collection[str], nodes: dict[str, NodeStatus]) -> Iterator[str]:
    for key, found, wanted in (
        (keys.EXPIRY, client.zrange(keys.EXPIRY, 0, -1), names),
        (keys.COMPONENTS, client.hkeys(keys.COMPONENTS), {*names, ""}),
        (keys.NODES, client.hkeys(keys.NODES), nodes.keys()),
    ):
        have = {name.decode() for name in found}
        if have != set(wanted):
            yield f"{key.decode()} has {sorted(have)}, not {sorted(wanted)}"


def _of_keys(client: redis.Redis) -> Iterator[str]:
    """A gateway's key of what it has under way vanishes when that is nothing; those of tenants' quotas are nobody's."""
    for key in client.scan_iter(count=1000):
        if key not in _OF_REGISTRY and not key.startswith((b"pillion:b:", b"pillion:g:")):
            yield f"the key {key.decode()} is left"


def _of_index(client: redis.Redis, nodes: dict[str, NodeStatus]) -> Iterator[str]:
    """Entries of a living node: one for each block that it has in its pool or below it, once it has announced all."""
    entries = dict.fromkeys(nodes, 0)
    node_of = {(client.hget(keys.NODES, name) or b"")[: keys.ENTRY_BYTES]: name for name in nodes}
    for bucket in client.scan_iter("pillion:b:*", count=1000):
        for value in client.hvals(bucket):
            for at in range(0, len(value), keys.ENTRY_BYTES):
                name = node_of.get(value[at : at + keys.ENTRY_BYTES])
                if name is not None:
                    entries[name] += 1
    for name, status in nodes.items():
        lower = status.disk_blocks + status.host_blocks
        if not max(status.committed_blocks, lower) <= entries[name] <= status.committed_blocks + lower:
            have = f"{status.committed_blocks} blocks and {lower} below its pool"
            yield f"the index names {entries[name]} blocks of {name}, which has {have}"


class NewTracebacks:
    """Tracebacks in a cluster's log that were not there at the last look."""

    def __init__(self) -> None:
        self._known = 0

    def look(self, log: str) -> list[str]:
        """The last one of the new ones, where there are any. Of a log that was cut, the oldest may be gone."""
        before, self._known = self._known, log.count(TRACEBACK)
        if self._known <= before:
            return []
        return [f"{self._known - before} new tracebacks, the last one: {log[log.rindex(TRACEBACK) :][:2000]}"]


class ProcessGrowth:
    """Files and private memory of processes, compared with the least that each had after an earlier run."""

    def __init__(self) -> None:
        self._least: dict[int, tuple[int, int]] = {}

    def look(self, pids: dict[int, str]) -> list[str]:
        """Return the processes that have grown, by role."""
        wrong, least = [], {}
        for pid, role in pids.items():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                files, memory = process.num_fds(), process.memory_info()
                # The pool and weights are shared memory.
                private = memory.rss - getattr(memory, "shared", 0)
                fewest, lowest = self._least.get(pid, (files, private))
                if files > fewest + MORE_FILES:
                    wrong.append(f"{role} {pid} has {files} files open, after {fewest}")
                if private > lowest + MORE_MEMORY_BYTES:
                    wrong.append(f"{role} {pid} has {private >> 20} MiB of memory, after {lowest >> 20}")
                least[pid] = min(files, fewest), min(private, lowest)
        self._least = least
        return wrong
