"""Chooses the components that a drill strikes, and signals and restarts them.

    status --victims--> one component of each kind --refusals--> nothing, or why the drill does not begin
                                 |
        with --kill: a command, with the component's id, role and the signal filled in
        without: the process that listens at the component's socket, in the directory of a live supervisor

Only components in the status are struck, and the Redis of a supervisor that runs some of them.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import struct
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pillion.drill.contract import KINDS
from pillion.errors import ConfigError, PillionError, Unavailable
from pillion.supervisor.runtime_dir import is_supervised
from pillion.types import ComponentStatus

COMMAND_WITHIN_S = 60.0
CONNECT_WITHIN_S = 1.0
UNIX = "unix:"
_SAFE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Striker:
    """Sends signals to components.

    Attributes:
        kill: command that sends a signal, with {component}, {role} and {signal} in it. Without it, processes of
            `pillion serve` on this machine are signalled directly.
        start: command that starts a killed component.
        supervised: True if killed components are restarted without ``start``, e.g. by Kubernetes.
    """

    kill: str = ""
    start: str = ""
    supervised: bool = False

    def starts_again(self, component: ComponentStatus) -> bool:
        """Return whether a killed component is restarted."""
        return bool(self.start) or self.supervised if self.kill else is_supervised(_socket_of(component).parent)

    def check(self, component: ComponentStatus) -> None:
        """Raise ConfigError or Unavailable if a component cannot be struck."""
        if self.kill:
            if not _SAFE_ID.fullmatch(component.component_id):
                raise ConfigError(f"{component.component_id!r} cannot be inserted into a command")
        elif not component.address.startswith(UNIX) or not is_supervised(_socket_of(component).parent):
            text = (
                f"{component.component_id} ({component.address}) is not a process of this user's `pillion serve` here"
            )
            raise ConfigError(f"{text}: --kill names the command that strikes it")
        else:
            process_at(_socket_of(component))

    def send(self, component: ComponentStatus, number: signal.Signals) -> None:
        """Send a signal to a component. Raises Unavailable on failure."""
        if self.kill:
            _run(self.kill, component, number)
            return
        try:
            os.kill(process_at(_socket_of(component)), number)
        except (OSError, Unavailable) as error:
            if number is not signal.SIGCONT:
                raise Unavailable(f"{component.component_id} cannot be struck: {error}") from None

    def start_again(self, component: ComponentStatus) -> None:
        """Start a killed component by ``start``, if set. Raises Unavailable on failure."""
        if self.kill and self.start:
            _run(self.start, component, signal.SIGCONT)


def _socket_of(component: ComponentStatus) -> Path:
    return Path(component.address.removeprefix(UNIX))


def process_at(path: Path) -> int:
    """Return the id of the process that listens at a Unix socket. Raises Unavailable."""
    kind = getattr(socket, "SO_PEERCRED", None)
    if kind is None:
        raise Unavailable("the process that listens at a socket is known only on Linux: set --kill")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(CONNECT_WITHIN_S)
            link.connect(str(path))
            pid, _, _ = _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, kind, _CREDENTIALS.size))
    except OSError as error:
        raise Unavailable(f"no process listens at {path}: {error}") from None
    if pid <= 0:
        raise Unavailable(f"the process at {path} is not visible from here")
    return int(pid)


def _run(template: str, component: ComponentStatus, number: signal.Signals) -> None:
    """Run a command without a shell. Raises Unavailable on failure."""
    words = {"{component}": component.component_id, "{role}": component.role, "{signal}": number.name}
    argv = shlex.split(template)
    for name, value in words.items():
        argv = [word.replace(name, value) for word in argv]
    try:
        # The operator wrote the command, and the ids inserted into it were checked.
        done = subprocess.run(  # noqa: S603
            argv, capture_output=True, text=True, timeout=COMMAND_WITHIN_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{shlex.join(argv)}: {error}") from None
    if done.returncode:
        raise Unavailable(f"{shlex.join(argv)} ended with status {done.returncode}: {done.stderr.strip()}")


def with_sockets(components: Sequence[ComponentStatus]) -> list[ComponentStatus]:
    """Return components with Unix sockets as addresses, by which their processes are located: those of gateways of
    `pillion serve`, whose address is a port, are in the folder of their workers' sockets. Adds each supervisor's
    Redis."""
    parents = {_socket_of(one).parent for one in components if one.address.startswith(UNIX)}
    folders = sorted(folder for folder in parents if is_supervised(folder))
    located = []
    for one in components:
        own = [path for folder in folders if (path := folder / f"{one.component_id}.sock").is_socket()]
        located.append(replace(one, address=f"{UNIX}{own[0]}") if own and one.role == "gateway" else one)
    sockets = [path for folder in folders if (path := folder / "redis.sock").is_socket()]
    return located + [ComponentStatus(component_id="redis", role="redis", address=f"{UNIX}{path}") for path in sockets]


def victims(components: Sequence[ComponentStatus], kinds: Sequence[str] = KINDS) -> list[ComponentStatus]:
    """Return the components to strike, in order: the busiest of each kind. The only gateway is not struck, since its
    streams could not move."""
    chosen = []
    for kind in KINDS:
        candidates = [one for one in components if one.role == kind and kind in kinds]
        if len(candidates) > (kind == "gateway"):
            chosen.append(min(candidates, key=lambda one: (-one.running_requests, one.component_id)))
    return chosen


def refusals(
    components: Sequence[ComponentStatus], chosen: Sequence[ComponentStatus], striker: Striker
) -> Iterator[str]:
    """Yield why a drill may not begin: the cluster is incomplete, or a component has no spare or cannot be struck."""
    if not chosen:
        yield "there is no component to strike"
    for one in components:
        if one.role not in KINDS or one.trouble:
            yield f"{one.component_id} is {one.role}{one.trouble and f': {one.trouble}'}"
        for fenced in one.fenced_components:
            yield f"{fenced} is fenced by {one.component_id}"
    for one in chosen:
        try:
            striker.check(one)
        except PillionError as error:
            yield error.message
            continue
        spares = [other for other in components if (other.role, other.model) == (one.role, one.model)]
        if len(spares) < 2 and not striker.starts_again(one):
            kind = f"{one.role} component" + (f" of model {one.model}" if one.model else "")
            yield f"{one.component_id} is the only {kind}, and nothing would restart it"
