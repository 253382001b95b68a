"""Docker's engine for tests: one that runs, or one that root starts for itself and that leaves nothing behind.

    running_engine()   the engine that `docker info` reaches, if there is one
    own_engine()       a dockerd of its own: data, socket and pid in one folder, no bridge and no rule of a firewall
    some_engine()      the first, or else the second
    DockerEngine       calls of the client, images: a registry's where one is within reach, else of Debian's packages

The build of an image takes its packages over the host's network. Folders in which pip looks for wheels (PIP_FIND_LINKS)
are no part of a container, so they are served to the build over loopback.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from lab.testbed.conditions import wait_for
from tests.support.compose import DOCKERFILE, ROOT
from tests.support.processes import started

CALL_TIMEOUT_S = 120.0
PULL_TIMEOUT_S = 300.0
BUILD_TIMEOUT_S = 1800.0
STOP_TIMEOUT_S = 60.0
# Fixed, since Docker's layer cache depends on build arguments.
WHEELS_PORT = 47110
DEBIAN, MIRROR = "bookworm", "http://deb.debian.org/debian"
# Packages that the Dockerfile expects of its base image, and a Redis, whose image may be unavailable.
PACKAGES = ("python3", "python3-venv", "python-is-python3", "ca-certificates", "redis-server")
CERTIFICATES = pathlib.Path("/etc/ssl/certs/ca-certificates.crt")
DEBIAN_IMAGE, BUILT_IMAGE = "pillion-check-debian", "pillion:check"


class NoDockerError(Exception):
    """Docker or a tool is missing; the message is the reason to skip a test."""


@dataclass(frozen=True)
class DockerEngine:
    """An engine. ``host`` is its DOCKER_HOST, "" for the client's default."""

    host: str = ""

    @property
    def environ(self) -> dict[str, str]:
        return {**os.environ, **({"DOCKER_HOST": self.host} if self.host else {})}

    def docker(self, *words: str, timeout_s: float = CALL_TIMEOUT_S) -> str:
        """Run the client and return its output. Raises AssertionError with that output on failure."""
        done = subprocess.run(["docker", *words], env=self.environ, capture_output=True, text=True, timeout=timeout_s)
        assert done.returncode == 0, f"docker {' '.join(words)}:\n{(done.stdout + done.stderr)[-3000:]}"
        return done.stdout.strip()

    def answers(self) -> bool:
        command = ["docker", "info", "--format", "{{.ServerVersion}}"]
        done = subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=CALL_TIMEOUT_S)
        # Without an engine, some versions of the client still print their own part and exit with 0.
        return done.returncode == 0 and bool(re.match(r"\d", done.stdout))

    def pulled(self, image: str) -> bool:
        """Return True if the image is available, pulling it if needed."""
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.docker("image", "inspect", "--format", "{{.Id}}", image)
            return True
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.docker("pull", "--quiet", image, timeout_s=PULL_TIMEOUT_S)
            return True
        return False

    def python_image(self) -> str:
        """Return the base image: the Dockerfile's own, or one of Debian's packages. Raises NoDockerError."""
        named = re.search(r"^ARG PYTHON_IMAGE=(\S+)$", DOCKERFILE.read_text(), re.MULTILINE)
        assert named
        return named[1] if self.pulled(named[1]) else self.debian_image()

    def debian_image(self) -> str:
        """Return an image of Debian's packages, with Python 3.11 and Redis, made by debootstrap. Raises NoDockerError
        if debootstrap is missing or fails: it needs root and a mirror of Debian."""
        with contextlib.suppress(AssertionError):
            self.docker("image", "inspect", "--format", "{{.Id}}", DEBIAN_IMAGE)
            return DEBIAN_IMAGE
        if shutil.which("debootstrap") is None:
            raise NoDockerError("no registry of images is within reach, and there is no debootstrap to make one")
        with tempfile.TemporaryDirectory(prefix="pil-") as folder:
            command = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", DEBIAN, folder, MIRROR]
            done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
            if done.returncode:
                raise NoDockerError(f"debootstrap failed: {(done.stdout + done.stderr).strip()[-300:]}")
            if CERTIFICATES.exists():
                # A proxy before the package index may need this machine's certificates.
                shutil.copyfile(CERTIFICATES, folder + str(CERTIFICATES))
            with started(
                ["tar", "-C", folder, "--exclude=./var/cache/apt/*", "-c", "."], stdout=subprocess.PIPE
            ) as tar:
                load = ["docker", "import", "-", DEBIAN_IMAGE]
                subprocess.run(load, env=self.environ, stdin=tar.stdout, check=True, capture_output=True)
        return DEBIAN_IMAGE

    def build(self) -> str:
        """Build this tree's Dockerfile and return the image's name. Raises NoDockerError, and AssertionError if the
        build fails."""
        given = {"PYTHON_IMAGE": self.python_image(), "TORCH": os.environ.get("TORCH", "")}
        given |= {name: os.environ.get(name, "") for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")}
        with _served(os.environ.get("PIP_FIND_LINKS", "").split()) as links:
            given["PIP_FIND_LINKS"] = " ".join(links)
            arguments = [word for name, value in given.items() for word in ("--build-arg", f"{name}={value}")]
            build = ["build", "--network", "host", *arguments, "--tag", BUILT_IMAGE, str(ROOT)]
            self.docker(*build, timeout_s=BUILD_TIMEOUT_S)
        return BUILT_IMAGE


def running_engine() -> DockerEngine | None:
    """Return the engine that the client finds by default."""
    engine = DockerEngine()
    return engine if shutil.which("docker") and engine.answers() else None


@contextlib.contextmanager
def own_engine() -> Iterator[DockerEngine]:
    """Start an engine for the block, in a temporary folder. Raises NoDockerError.

    It creates no bridge and no firewall rules, which would outlive it and affect this machine: containers of one
    network reach each other, and published ports are forwarded by the engine's own processes.
    """
    dockerd = shutil.which(
        "dockerd", path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"))
    )
    if sys.platform != "linux" or os.geteuid():
        raise NoDockerError("no engine of Docker runs, and only root can start one")
    if dockerd is None or shutil.which("docker") is None:
        raise NoDockerError("no engine of Docker runs, and there is no dockerd and docker to start one")
    with tempfile.TemporaryDirectory(prefix="pil-") as name:
        folder = pathlib.Path(name)
        engine = DockerEngine(f"unix://{folder}/sock")
        places = [f"--{option}={folder}/{place}" for option, place in PLACES.items()]
        alone = ["--bridge=none", "--iptables=false", "--ip-forward=false", "--storage-driver=overlay2"]
        with open(folder / "log", "wb") as log:
            process = subprocess.Popen([dockerd, *places, *alone, f"--host={engine.host}"], stdout=log, stderr=log)
        try:
            there = functools.partial(_answers_or_ended, engine, process)
            wait_for("dockerd to answer", there)
            if process.poll() is not None:
                raise NoDockerError(f"dockerd ended: {(folder / 'log').read_text()[-300:]}")
            yield engine
        finally:
            process.terminate()
            process.wait(STOP_TIMEOUT_S)
            _unmount(folder)


@contextlib.contextmanager
def some_engine() -> Iterator[DockerEngine]:
    """Yield the running engine or, if there is none, one started for the block. Raises NoDockerError."""
    engine = running_engine()
    with contextlib.nullcontext(engine) if engine is not None else own_engine() as found:
        yield found


def _unmount(folder: pathlib.Path) -> None:
    """Unmount what an engine left mounted in its folder, such as its network namespace."""
    with open("/proc/self/mounts") as mounts:
        places = [line.split()[1] for line in mounts]
    for place in reversed(places):
        if place.startswith(f"{folder}/"):
            subprocess.run(["umount", "--lazy", place], check=True)


# Options of dockerd that name folders or files, with their names in its folder.
PLACES: Mapping[str, str] = {"data-root": "data", "exec-root": "run", "pidfile": "pid"}


def _answers_or_ended(engine: DockerEngine, process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is not None or engine.answers()


@contextlib.contextmanager
def _served(folders: list[str]) -> Iterator[list[str]]:
    """Serve each folder over loopback and yield pip's values: a URL for each folder, others unchanged."""
    with contextlib.ExitStack() as stack:
        links = []
        for place in folders:
            if not os.path.isdir(place):
                links.append(place)
                continue
            handler = functools.partial(_QuietFiles, directory=place)
            server = stack.enter_context(_listening(WHEELS_PORT + len(links), handler))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
            links.append(f"http://127.0.0.1:{server.server_address[1]}/")
        yield links


def _listening(port: int, handler: Callable[..., http.server.SimpleHTTPRequestHandler]) -> http.server.HTTPServer:
    """Return a server on this port, or on another one if it is in use."""
    try:
        return http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
    except OSError:
        return http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)


class _QuietFiles(http.server.SimpleHTTPRequestHandler):
    """Request handler that serves a folder without logging."""

    def log_message(self, *_: object) -> None:
        pass
