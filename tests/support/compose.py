"""docker-compose.yml and the Dockerfile as data: the services that Docker would start, with their arguments and order.

Supports only the parts of the compose specification that our files use: interpolation with defaults, anchors and merges
(YAML's own), the short forms of volumes, tmpfs and ports, and depends_on with conditions.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMPOSE_FILE = ROOT / "docker-compose.yml"
DOCKERFILE = ROOT / "Dockerfile"
OWN_IMAGE = "pillion"

_VARIABLE = re.compile(r"\$(?:\{(?P<name>\w+)(?::-(?P<default>[^}]*))?\}|(?P<dollar>\$))")
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Health:
    """A health check; ``test`` is the command without its leading CMD."""

    test: tuple[str, ...]
    interval_s: float
    timeout_s: float
    retries: int
    start_period_s: float


@dataclass(frozen=True)
class ComposeService:
    """One service. ``mounts``: path in the container -> volume, host path, or "" for a tmpfs."""

    name: str
    image: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    depends_on: Mapping[str, str]
    health: Health | None
    mounts: Mapping[str, str]
    profiles: tuple[str, ...]
    replicas: int
    stop_grace_s: float

    @property
    def own(self) -> bool:
        """True if it runs this repository's image."""
        return self.image.partition(":")[0] == OWN_IMAGE


@dataclass(frozen=True)
class Image:
    """A Dockerfile's settings for the containers of its last stage."""

    environment: Mapping[str, str]
    entrypoint: tuple[str, ...]
    user: str


def read_services(environ: Mapping[str, str], path: pathlib.Path = COMPOSE_FILE) -> dict[str, ComposeService]:
    """Return every service of the file, including those of profiles; ``environ`` provides its variables."""
    file = _filled_in(yaml.safe_load(path.read_text()), environ)
    return {name: _service(name, entry) for name, entry in file["services"].items()}


def needed_for(services: Mapping[str, ComposeService], names: Iterable[str]) -> dict[str, ComposeService]:
    """Return the services that ``docker compose up NAMES`` starts: these and all dependencies."""
    found: dict[str, ComposeService] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = services[name]
            waiting += services[name].depends_on
    return found


def read_image(path: pathlib.Path = DOCKERFILE) -> Image:
    """Return the last stage of a Dockerfile."""
    environment: dict[str, str] = {}
    entrypoint: tuple[str, ...] = ()
    user = "root"
    text = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#"))
    for line in text.replace("\\\n", " ").splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            environment, entrypoint, user = {}, (), "root"
        elif word == "ENV":
            environment |= dict(pair.split("=", 1) for pair in rest.split())
        elif word == "ENTRYPOINT":
            entrypoint = tuple(json.loads(rest))
        elif word == "USER":
            user = rest.strip()
    return Image(environment, entrypoint, user)


def _filled_in(node: Any, environ: Mapping[str, str]) -> Any:
    if isinstance(node, dict):
        return {key: _filled_in(value, environ) for key, value in node.items()}
    if isinstance(node, list):
        return [_filled_in(value, environ) for value in node]
    if not isinstance(node, str):
        return node

    def value(match: re.Match[str]) -> str:
        if match["dollar"]:
            return "$"
        return environ.get(match["name"]) or match["default"] or ""

    return _VARIABLE.sub(value, node)


def _service(name: str, entry: Mapping[str, Any]) -> ComposeService:
    mounts = {path.partition(":")[0]: "" for path in entry.get("tmpfs", ())}
    for volume in entry.get("volumes", ()):
        source, target, *_ = volume.split(":")
        mounts[target] = source
    return ComposeService(
        name=name,
        image=entry["image"],
        command=tuple(entry.get("command", ())),
        environment={key: str(value) for key, value in entry.get("environment", {}).items()},
        depends_on={key: needed["condition"] for key, needed in entry.get("depends_on", {}).items()},
        health=_health(entry["healthcheck"]) if "healthcheck" in entry else None,
        mounts=mounts,
        profiles=tuple(entry.get("profiles", ())),
        replicas=int(entry.get("scale", 1)),
        stop_grace_s=seconds(entry.get("stop_grace_period", "10s")),
    )


def _health(entry: Mapping[str, Any]) -> Health:
    kind, *test = entry["test"]
    assert kind == "CMD", "no shell is needed for a health check"
    return Health(
        test=tuple(test),
        interval_s=seconds(entry["interval"]),
        timeout_s=seconds(entry["timeout"]),
        retries=int(entry["retries"]),
        start_period_s=seconds(entry["start_period"]),
    )


def seconds(text: str) -> float:
    """Return the seconds of a compose duration, such as 1m30s."""
    parts = re.findall(r"(\d+)(ms|s|m|h)", text)
    assert "".join(number + unit for number, unit in parts) == text, text
    return sum(int(number) * _UNITS_S[unit] for number, unit in parts)
