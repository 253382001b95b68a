"""Stand-ins for a container runtime of Kubernetes: processes of this machine, or containers of a Docker engine.

Both provide a pod's address, its volumes and one process per container; :mod:`tests.support.kubelet` decides when to
start and stop them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import random
import re
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from lab.testbed.forks import ForkedChild
from tests.support.charts import Manifest
from tests.support.compose import ROOT, read_image
from tests.support.compose_run import launch, local_command
from tests.support.docker_engine import DockerEngine


class PodProcess(Protocol):
    """The process of one container."""

    async def wait(self) -> int:
        """Return the exit status in Docker's form: 128 plus the signal's number after a signal."""

    async def signal(self, name: str) -> None:
        """Send TERM or KILL; a process that has ended ignores it."""


class PodRuntime(Protocol):
    """A runtime of pods, which are identified by name."""

    async def sandbox(self, pod: str, spec: Manifest) -> str:
        """Create the shared resources of a pod, and return its address."""

    async def start(self, pod: str, container: Manifest, environment: Mapping[str, str]) -> PodProcess:
        """Start a container of the pod."""

    async def inside(self, pod: str, container: Manifest, command: Sequence[str]) -> int:
        """Run a command in a running container, and return its exit status."""

    async def remove(self, pod: str) -> None:
        """Remove the pod, whose containers have ended, with its volumes."""


class _LocalProcess:
    def __init__(self, child: ForkedChild) -> None:
        self._child = child

    async def wait(self) -> int:
        code = await self._child.wait()
        return code if code >= 0 else 128 - code

    async def signal(self, name: str) -> None:
        if name == "KILL":
            self._child.kill()
        elif self._child.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child.pid, 15)


class ProcessRuntime:
    """Runs a pod's containers as processes. A pod's address is a loopback address, which replaces :: in its containers'
    arguments; volumes are folders under ``folder``, whose path must be short. ``lines``: output by container."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.lines: dict[str, list[str]] = {}
        self._folder = folder
        self._image = read_image()
        self._network = f"127.{random.randint(1, 254)}.{random.randint(0, 254)}"
        self._pods: dict[str, tuple[str, Manifest]] = {}
        self._environments: dict[tuple[str, str], dict[str, str]] = {}
        self._made = 0

    async def sandbox(self, pod: str, spec: Manifest) -> str:
        self._made += 1
        address = f"{self._network}.{self._made + 1}"
        self._pods[pod] = address, spec
        return address

    async def start(self, pod: str, container: Manifest, environment: Mapping[str, str]) -> _LocalProcess:
        told = {key: os.environ[key] for key in ("PATH", "LANG", "LD_LIBRARY_PATH") if key in os.environ}
        told["PYTHONPATH"] = str(ROOT)
        own = {key: value for key, value in self._image.environment.items() if key != "PATH"}
        told |= {key: self._here(pod, container, value) for key, value in {**own, **environment}.items()}
        self._environments[pod, container["name"]] = told
        said = self.lines.setdefault(f"{pod}/{container['name']}", [])
        return _LocalProcess(await self._launch(pod, container, container["args"], said.append))

    async def inside(self, pod: str, container: Manifest, command: Sequence[str]) -> int:
        return await (await self._launch(pod, container, command, lambda line: None)).wait()

    async def remove(self, pod: str) -> None:
        shutil.rmtree(self._folder / pod, ignore_errors=True)

    async def _launch(
        self, pod: str, container: Manifest, words: Sequence[str], forward: Callable[[str], None]
    ) -> ForkedChild:
        return await launch(self._command(pod, container, words), self._environments[pod, container["name"]], forward)

    def _command(self, pod: str, container: Manifest, words: Sequence[str]) -> list[str]:
        program = words if words[0].startswith("redis") else [*self._image.entrypoint, *words]
        here = [self._here(pod, container, word) for word in program]
        return local_command(here, self._pods[pod][0], self._here(pod, container, "/data"))

    def _here(self, pod: str, container: Manifest, text: str) -> str:
        address, spec = self._pods[pod]
        text = address if text == "::" else text.replace("[::]", address)
        for mount in sorted(container["volumeMounts"], key=lambda one: -len(one["mountPath"])):
            path = mount["mountPath"]
            if re.match(rf"{re.escape(path)}(?=/|$)", text):
                return self._place(pod, volume_of(spec, mount["name"])) + text[len(path) :]
        return text

    def _place(self, pod: str, volume: Manifest) -> str:
        if "hostPath" in volume:
            return str(volume["hostPath"]["path"])
        folder = self._folder / pod / volume["name"]
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return str(folder)


class DockerRuntime:
    """Runs a pod's containers in an engine, with a pod's rights, address, process namespace and volumes. ``images``
    maps the chart's images (without tags) to local ones. Use as a context."""

    def __init__(self, engine: DockerEngine, images: Mapping[str, str]) -> None:
        self.network = f"pillion-kube-{uuid.uuid4().hex[:8]}"
        self._engine = engine
        self._images = images
        self._pods: dict[str, Manifest] = {}

    async def __aenter__(self) -> DockerRuntime:
        await self._docker("network", "create", self.network)
        return self

    async def __aexit__(self, *_: object) -> None:
        for pod in tuple(self._pods):
            await self.remove(pod)
        await self._docker("network", "rm", self.network)

    async def sandbox(self, pod: str, spec: Manifest) -> str:
        self._pods[pod] = spec
        for volume in spec["volumes"]:
            if "emptyDir" in volume:
                memory = ["--opt", "type=tmpfs", "--opt", "device=tmpfs", "--opt", f"o={self._mode(spec)}"]
                kind = memory if volume["emptyDir"].get("medium") == "Memory" else []
                await self._docker("volume", "create", *kind, self._volume(pod, volume["name"]))
        image = self._image(spec["containers"][0])
        held = ["--init", "--network", self.network, "--entrypoint", "sleep", image, "infinity"]
        await self._docker("run", "--detach", "--name", pod, *held)
        form = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        return await self._docker("inspect", "--format", form, pod)

    async def start(self, pod: str, container: Manifest, environment: Mapping[str, str]) -> _EngineProcess:
        spec, name = self._pods[pod], f"{pod}.{container['name']}"
        rights = spec["securityContext"]
        words = [
            "--name",
            name,
            "--network",
            f"container:{pod}",
            "--user",
            f"{rights['runAsUser']}:{rights['runAsGroup']}",
        ]
        if spec.get("shareProcessNamespace"):
            words += ["--pid", f"container:{pod}"]
        own = container["securityContext"]
        assert own["readOnlyRootFilesystem"]
        assert not own["allowPrivilegeEscalation"]
        words += ["--read-only", "--security-opt", "no-new-privileges"]
        words += [word for right in own["capabilities"]["drop"] for word in ("--cap-drop", right)]
        for mount in container["volumeMounts"]:
            volume = volume_of(spec, mount["name"])
            source = volume["hostPath"]["path"] if "hostPath" in volume else self._volume(pod, volume["name"])
            words += ["--volume", f"{source}:{mount['mountPath']}{':ro' if mount.get('readOnly') else ''}"]
        words += [word for key, value in environment.items() for word in ("--env", f"{key}={value}")]
        with contextlib.suppress(AssertionError):
            await self._docker("rm", "--force", name)
        await self._docker("run", "--detach", *words, self._image(container), *container["args"])
        return _EngineProcess(self._engine, name)

    async def inside(self, pod: str, container: Manifest, command: Sequence[str]) -> int:
        try:
            await self._docker("exec", f"{pod}.{container['name']}", *command)
        except AssertionError:
            return 1
        return 0

    async def remove(self, pod: str) -> None:
        spec = self._pods.pop(pod)
        names = [f"{pod}.{one['name']}" for one in (*spec.get("initContainers", ()), *spec["containers"])]
        for name in (*names, pod):
            with contextlib.suppress(AssertionError):
                await self._docker("rm", "--force", name)
        for volume in spec["volumes"]:
            if "emptyDir" in volume:
                await self._docker("volume", "rm", self._volume(pod, volume["name"]))

    def _mode(self, spec: Manifest) -> str:
        # The kubelet makes volumes group-writable, and new files belong to the group.
        group = spec["securityContext"].get("fsGroup")
        return f"mode=2777,gid={group}" if group is not None else "mode=0777"

    def _volume(self, pod: str, name: str) -> str:
        return f"{pod}.{name}"

    def _image(self, container: Manifest) -> str:
        return self._images[container["image"].partition(":")[0]]

    async def _docker(self, *words: str) -> str:
        return await asyncio.to_thread(self._engine.docker, *words)


class _EngineProcess:
    def __init__(self, engine: DockerEngine, name: str) -> None:
        self._engine = engine
        self._name = name

    async def wait(self) -> int:
        command = ["docker", "wait", self._name]
        waiting = await asyncio.create_subprocess_exec(
            *command, env=self._engine.environ, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        try:
            said, _ = await waiting.communicate()
        except asyncio.CancelledError:
            waiting.kill()
            raise
        return int(said)

    async def signal(self, name: str) -> None:
        with contextlib.suppress(AssertionError):
            await asyncio.to_thread(self._engine.docker, "kill", "--signal", name, self._name)


def volume_of(spec: Manifest, name: str) -> Any:
    """Return a pod's volume."""
    return next(volume for volume in spec["volumes"] if volume["name"] == name)
