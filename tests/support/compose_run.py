"""Runs a compose file's services as processes of this machine: the same commands, environment, order, health checks.

    up:    each service waits for the conditions of its depends_on -> its containers start -> their health check passes
    down:  in the opposite order, SIGTERM, and SIGKILL after the service's stop_grace_period

Only what a container has of its own is translated. Each container's network is a loopback address (127.x.y.n), which
stands for :: and for the container's own 127.0.0.1; a service's name is the address of its first container.
Volumes, tmpfs and bind mounts are folders under one temporary folder. The image's entry point is this Python. Users,
capabilities, read-only file systems and other images than this repository's and Redis are not tried, and nothing is
started again but by `kill`.
"""

from __future__ import annotations

import asyncio
import os
import pathlib
import random
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lab.testbed.cluster import PATIENT_MS
from lab.testbed.conditions import WITHIN_S
from lab.testbed.forks import ForkedChild, shared_forks
from lab.testbed.redis import redis_executable
from tests.support.compose import ROOT, ComposeService, Image

# Same in all containers, and read at import (except for caches, which contain no model here), since all components are
# forks of one process.
IMPORTED_IN = (
    *("PATH", "LANG", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"),
    *("TOKENIZERS_PARALLELISM", "GOMP_SPINCOUNT", "GRPC_ENABLE_FORK_SUPPORT", "HF_HUB_DISABLE_TELEMETRY"),
)
# Seconds between two health checks, if the file's interval is longer: the only source of health here.
ASK_EVERY_S = 1.0
STARTED, HEALTHY, DONE = "service_started", "service_healthy", "service_completed_successfully"


class UnhealthyError(AssertionError):
    """A container ended, or never became healthy. The message includes its last lines."""


@dataclass
class Container:
    """One process that represents a container. ``environment`` is that of its last start; ``history`` has its output
    lines; ``exit_code`` is None while it runs."""

    name: str
    service: ComposeService
    address: str
    child: ForkedChild | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    exit_code: int | None = None
    history: list[str] = field(default_factory=list)

    def fail(self, why: str) -> UnhealthyError:
        return UnhealthyError("\n".join([f"{self.name} {why}", *self.history[-25:]]))


class ComposeRun:
    """Use as an async context manager; ``scale``: service -> number of containers, as with --scale."""

    def __init__(
        self,
        services: Mapping[str, ComposeService],
        image: Image,
        folder: pathlib.Path,
        scale: Mapping[str, int] | None = None,
    ) -> None:
        self.services = services
        self.started: list[str] = []
        self._image = image
        self._folder = folder
        # Concurrent runs on this machine share ports but not addresses.
        network = f"127.{random.randint(1, 254)}.{random.randint(0, 254)}"
        names = [
            (name, number)
            for name, service in services.items()
            for number in range((scale or {}).get(name, service.replicas))
        ]
        assert len(names) < 250
        self.containers = [
            Container(f"{name}-{number + 1}", services[name], f"{network}.{place + 2}")
            for place, (name, number) in enumerate(names)
        ]
        self._reached = {(name, at): asyncio.Event() for name in services for at in (STARTED, HEALTHY, DONE)}

    def of(self, name: str) -> list[Container]:
        return [container for container in self.containers if container.service.name == name]

    async def up(self, timeout_s: float) -> None:
        """Start all; return when every health check passes. Raises UnhealthyError."""
        async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
            for name in self.services:
                group.create_task(self._bring_up(name), name=name)

    async def kill(self, container: Container) -> None:
        """Kill a container's process and restart it, as ``restart: unless-stopped`` does."""
        assert container.child is not None
        await container.child.stop(0.0)
        await self._start(container)
        await self._until_healthy(container)

    async def down(self) -> dict[str, int | None]:
        """Stop all, dependents first. Return container -> exit code, None if it had to be killed."""
        codes: dict[str, int | None] = {}
        for name in reversed(self.started):
            await asyncio.gather(*(self._stop(container, codes) for container in self.of(name)))
        return codes

    async def __aenter__(self) -> ComposeRun:
        return self

    async def __aexit__(self, *_: object) -> None:
        for container in self.containers:
            if container.child is not None:
                await container.child.stop(0.0)

    async def _bring_up(self, name: str) -> None:
        service, containers = self.services[name], self.of(name)
        for needed, condition in service.depends_on.items():
            if self.of(needed):
                await self._reached[needed, condition].wait()
        for container in containers:
            await self._start(container)
        self.started.append(name)
        self._reached[name, STARTED].set()
        if service.health is not None:
            await asyncio.gather(*(self._until_healthy(container) for container in containers))
            self._reached[name, HEALTHY].set()
        elif service.own:
            for container in containers:
                assert container.child is not None
                container.exit_code = await container.child.wait()
                if container.exit_code:
                    raise container.fail(f"ended with {container.exit_code}")
            self._reached[name, DONE].set()

    async def _start(self, container: Container) -> None:
        service = container.service
        environment = {key: os.environ[key] for key in ("PATH", "LANG", "LD_LIBRARY_PATH") if key in os.environ}
        # A busy machine must not cause lost heartbeats.
        environment |= {"PYTHONPATH": str(ROOT), "PILLION_HEARTBEAT_TIMEOUT_MS": str(PATIENT_MS)}
        image = {key: value for key, value in self._image.environment.items() if key != "PATH"} if service.own else {}
        own = {**image, **service.environment}
        environment |= {key: self._here(value, container) for key, value in own.items()}
        entrypoint = self._image.entrypoint if service.own else ()
        argv = self._command([*entrypoint, *service.command], container)
        container.environment = environment
        container.child = await launch(argv, environment, container.history.append)

    async def _until_healthy(self, container: Container) -> None:
        health, began_s, failures = container.service.health, time.monotonic(), 0
        assert health is not None
        assert container.child is not None
        ended = asyncio.create_task(container.child.wait())
        try:
            while True:
                starting = time.monotonic() - began_s < health.start_period_s
                await asyncio.wait({ended}, timeout=min(health.interval_s, ASK_EVERY_S))
                if ended.done():
                    raise container.fail(f"ended with {ended.result()}")
                if await self._well(container):
                    return
                failures += not starting
                if failures >= health.retries:
                    raise container.fail("is unhealthy")
        finally:
            ended.cancel()

    async def _well(self, container: Container) -> bool:
        assert container.service.health is not None
        argv = self._command(container.service.health.test, container)
        # As inside the container: with TLS between components, the check needs their certificates.
        child = await launch(argv, container.environment, lambda line: None)
        try:
            # The file's 5 s suit a serving machine; under test load a program may take that long to start.
            longest_s = max(WITHIN_S, container.service.health.timeout_s)
            return await asyncio.wait_for(child.wait(), longest_s) == 0
        except TimeoutError:
            return False
        finally:
            await child.stop(0.0)

    async def _stop(self, container: Container, codes: dict[str, int | None]) -> None:
        child = container.child
        if child is None or container.exit_code is not None:
            return
        ended = asyncio.create_task(child.wait())
        stopped_s = time.monotonic()
        await child.stop(container.service.stop_grace_s)
        late = time.monotonic() - stopped_s >= container.service.stop_grace_s
        codes[container.name] = container.exit_code = None if late else await ended

    def _command(self, words: Sequence[str], container: Container) -> list[str]:
        here = [self._here(word, container) for word in words]
        data = self._folder_of("/data", container) if words[0] == "redis-server" else ""
        return local_command(here, container.address, data)

    def _here(self, text: str, container: Container) -> str:
        """Return a text of the container's configuration with this machine's addresses and paths."""
        text = container.address if text == "::" else text.replace("[::]", container.address)
        text = re.sub(r"\b(127\.0\.0\.1|localhost)\b", container.address, text)
        for name in self.services:
            if self.of(name):
                text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?=:\d)", self.of(name)[0].address, text)
        for path in sorted(container.service.mounts, key=len, reverse=True):
            if re.match(rf"{re.escape(path)}(?=/|$)", text):
                return self._folder_of(path, container) + text[len(path) :]
        return text

    def _folder_of(self, path: str, container: Container) -> str:
        source = container.service.mounts[path]
        if "/" in source:
            return str((ROOT / source).resolve())
        folder = self._folder / (source or f"{container.name}{path.replace('/', '-')}")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return str(folder)


async def launch(argv: Sequence[str], environ: Mapping[str, str], forward: Callable[[str], None]) -> ForkedChild:
    """Start the process for a container. Raises OSError on failure."""
    return await shared_forks({key: environ[key] for key in IMPORTED_IN if key in environ}).launch(
        argv, environ, forward
    )


def local_command(words: Sequence[str], address: str, data: str) -> list[str]:
    """Return this machine's command for a container's, with address ``address``; ``data`` is the folder of a Redis."""
    program, *rest = words
    if program == "pillion":
        return [sys.executable, "-m", "pillion", *rest]
    if program == "redis-server":
        return [redis_executable(), "--bind", address, "--dir", data, *rest]
    if program == "redis-cli":
        beside = pathlib.Path(redis_executable()).with_name("redis-cli")
        return [str(beside if beside.exists() else shutil.which("redis-cli")), "-h", address, *rest]
    if program in ("test", "bash"):
        return [program, *rest]
    raise AssertionError(f"no stand-in for {program}")
