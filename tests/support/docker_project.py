"""docker-compose.yml on an engine: its containers, streams during a kill of one, and leftovers."""

from __future__ import annotations

import http.client
import json
import pathlib
import shlex
import shutil
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lab.testbed.conditions import wait_for
from lab.testbed.ports import free_port
from pillion import Client
from pillion.errors import PillionError
from pillion.types import FinishReason
from tests.support.compose import COMPOSE_FILE, read_services
from tests.support.docker_engine import DockerEngine, NoDockerError
from tests.support.watched_streams import Addresses

UP_TIMEOUT_S = 600.0
# A container's first process is an init, whose only child is the component.
KILL = "kill -9 $(cat /proc/1/task/1/children)"


class Kill(NamedTuple):
    """Results of the streams during a container's kill. ``running``: those that had not ended yet."""

    service: str
    streams: int
    running: int
    lost: int
    differing: int
    pause_s: float

    def __str__(self) -> str:
        became = f"{self.lost} lost, {self.differing} differing, longest pause {self.pause_s:.2f} s"
        return f"{self.service} killed under {self.streams} streams ({self.running} running): {became}"


class DockerProject:
    """The compose file as one project of an engine, with its own name and published ports.

    ``image`` is this repository's, and ``scale`` is a service's number of containers. Files of models and adapters are
    in ``folder``. Raises NoDockerError if compose is missing.
    """

    def __init__(self, engine: DockerEngine, image: str, folder: pathlib.Path, scale: Mapping[str, int]) -> None:
        self.name = f"pillion-check-{uuid.uuid4().hex[:8]}"
        self.addresses = Addresses(f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}", "demo")
        self._engine = engine
        self._scale = scale
        self._files = ["-f", str(COMPOSE_FILE), *self._stand_ins(folder)]
        # Containers may take minutes to start on a busy machine; docker-compose 1.29 allows the engine 60 s.
        told = {
            "COMPOSE_HTTP_TIMEOUT": str(round(UP_TIMEOUT_S)),
            "MODEL": "demo",
            "OTEL_SDK_DISABLED": "true",
            "PILLION_TAG": image.partition(":")[2],
        }
        told |= {"GRPC_PORT": self.addresses.grpc.split(":")[1], "HTTP_PORT": self.addresses.http.split(":")[1]}
        for name in ("MODELS", "ADAPTERS"):
            (folder / name.lower()).mkdir()
            told[name] = str(folder / name.lower())
        self._environ = {**engine.environ, **told}
        self._compose = compose_command()

    def up(self) -> None:
        """Start the components; return when the gateway serves and sees them all."""
        scale = [word for name, number in self._scale.items() for word in ("--scale", f"{name}={number}")]
        self.compose("up", "-d", "--no-build", *scale, "gateway")
        self.until_whole()

    def until_whole(self) -> None:
        """Wait until the gateway sees exactly the expected components."""
        expected = sorted([*self._scale, *self._scale, "gateway", "kvnode"])
        assert all(number == 2 for number in self._scale.values())

        def roles() -> list[str]:
            try:
                with Client(self.addresses.grpc) as client:
                    return sorted(component.role for component in client.status().components)
            except PillionError as error:
                return [str(error)]

        wait_for("every component at the gateway", lambda: roles() == expected, UP_TIMEOUT_S, saw=roles)
        wait_for("the gateway to serve", lambda: self._get("/health")[0] == 200, UP_TIMEOUT_S)

    def kill(self, service: str, prompts: Sequence[str], tokens: int, texts: Sequence[str]) -> Kill:
        """Kill a container's process amid streams with known ``texts``, and wait until Docker has restarted it."""
        container = self.containers(service)[0]
        restarts = self._inspect(container, "{{.RestartCount}}")
        with self.addresses.streams(prompts, tokens) as streams:
            running = sum(stream.finish is None for stream in streams)
            self._engine.docker("exec", container, "bash", "-c", KILL)
        wait_for("Docker to start it again", lambda: self._inspect(container, "{{.RestartCount}}") != restarts)
        self.until_whole()
        lost = sum(stream.finish != FinishReason.LENGTH for stream in streams)
        differing = sum(stream.text != text for stream, text in zip(streams, texts, strict=True))
        return Kill(service, len(streams), running, lost, differing, max(stream.pause_s for stream in streams))

    def drill(self, *kinds: str) -> str:
        """Run `pillion drill` against a container of each kind, as docs/recorder.md describes; return its table. Raises
        AssertionError if a stream was lost, or the cluster did not recover."""
        compose = shlex.join(self._words())
        kill = f"sh -c {shlex.quote(f'docker kill -s {{signal}} $({compose} ps -q {{role}} | head -n 1)')}"
        asked = [word for kind in kinds for word in ("--kind", kind)]
        asked += ["--target", self.addresses.grpc, "--kill", kill, "--start", f"{compose} start {{role}}", "--yes"]
        command = [sys.executable, "-m", "pillion", "drill", *asked]
        done = subprocess.run(command, env=self._environ, capture_output=True, text=True, timeout=UP_TIMEOUT_S)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def replays(self) -> float:
        """Return the number of retries by the gateway so far."""
        lines = self._get("/metrics")[1].splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("pillion_replays_total{"))

    def stop(self) -> dict[str, int]:
        """Stop every container, and return container -> exit code."""
        self.compose("stop")
        found = self._engine.docker("ps", "--all", "--quiet", *self._own()).split()
        ends = (self._inspect(one, "{{.Name}} {{.State.Status}} {{.State.ExitCode}}").split() for one in found)
        codes = {}
        for name, status, code in ends:
            assert status == "exited", name
            codes[name.removeprefix(f"/{self.name}").strip("-_")] = int(code)
        return codes

    def down(self) -> str:
        """Remove the project, and return leftovers (normally none)."""
        self.compose("down", "--volumes", "--remove-orphans")
        kinds = (("ps", "--all"), ("volume", "ls"), ("network", "ls"))
        return "".join(self._engine.docker(*words, "--quiet", *self._own()) for words in kinds)

    def containers(self, service: str) -> list[str]:
        """Return the ids of a service's running containers."""
        only = ["--filter", f"label=com.docker.compose.service={service}"]
        return self._engine.docker("ps", "--quiet", *self._own(), *only).split()

    def log(self) -> str:
        """Return the end of the containers' logs."""
        return self.compose("logs", "--no-color", "--tail=20")

    def compose(self, *words: str) -> str:
        """Run compose. Raises AssertionError with its output on failure."""
        command = [*self._words(), *words]
        done = subprocess.run(command, env=self._environ, capture_output=True, text=True, timeout=UP_TIMEOUT_S)
        assert done.returncode == 0, f"compose {' '.join(words)}:\n{(done.stdout + done.stderr)[-3000:]}"
        return done.stdout

    def _words(self) -> list[str]:
        return [*self._compose, "--project-name", self.name, *self._files]

    def _own(self) -> list[str]:
        return ["--filter", f"label=com.docker.compose.project={self.name}"]

    def _inspect(self, container: str, form: str) -> str:
        return self._engine.docker("inspect", "--format", form, container)

    def _get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self.addresses.http)
        try:
            connection.request("GET", path)
            reply = connection.getresponse()
            return reply.status, reply.read().decode()
        except OSError as error:
            return 0, str(error)
        finally:
            connection.close()

    def _stand_ins(self, folder: pathlib.Path) -> list[str]:
        """Use Debian's Redis if the file's image of Redis is unavailable."""
        redis = read_services({})["redis"].image
        if self._engine.pulled(redis):
            return []
        other = folder / "stand-ins.yml"
        other.write_text(json.dumps({"services": {"redis": {"image": self._engine.debian_image()}}}))
        return ["-f", str(other)]


def compose_command() -> list[str]:
    """Return the command for compose files: Compose v2 or docker-compose. Raises NoDockerError."""
    if shutil.which("docker") and not subprocess.run(["docker", "compose", "version"], capture_output=True).returncode:
        return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    raise NoDockerError("neither docker compose nor docker-compose is installed")
