"""Defines the seam at which requests may name adapters. Other components know adapters by their digests
only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from pillion.adapter_folders import STORE_LIMITS, StoreLimits
from pillion.config import GatewayFlags
from pillion.errors import PermissionDenied
from pillion.gateway.links.node_link import NodeLink
from pillion.observability.metrics import Reading
from pillion.rooms import Seam, entered_one


class NamedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """Describes an adapter as clients name it.

    Attributes:
        parent: the name of its model.
        digest: SHA-256 of its content, hexadecimal (I2).
        rank: the largest rank of its matrices; 1 where it has none.
        path: the folder that it was loaded from.
        virtual_tokens: how many virtual tokens stand before each prompt.
    """

    name: str
    parent: str
    digest: str
    rank: int
    path: str
    virtual_tokens: int = 0


class Adapters:
    """Keeps the names of a gateway's adapters. In this class there are no adapters, and none can be loaded."""

    def reach(self, nodes: Callable[[], Iterable[NodeLink]]) -> None:
        """Takes the links to all KV nodes, on whose machines workers look for the files of adapters."""

    def find(self, name: str) -> NamedAdapter | None:
        """Returns the adapter that a name means now; None where it means no adapter of a model that is served here."""
        return None

    def all(self) -> Sequence[NamedAdapter]:
        """Returns the adapters of models that are served here, by name."""
        return ()

    async def look(self, name: str) -> None:
        """Asks the registry for a name that is unknown here, and may have been given at another gateway just now."""

    async def load(self, name: str, path: str, *, in_place: bool = False, model: str = "") -> NamedAdapter:
        """Gives a name to the adapter of a folder. Raises PermissionDenied where there are no adapters."""
        raise PermissionDenied("this gateway serves no adapters: --enable-lora changes that")

    async def unload(self, name: str) -> NamedAdapter:
        """Takes a name away from its adapter. Raises PermissionDenied where there are no adapters."""
        raise PermissionDenied("this gateway serves no adapters: --enable-lora changes that")

    async def spread(self) -> None:
        """Brings the files of all adapters to the machines of the KV nodes."""

    def began(self, name: str) -> None:
        """Notes that a request begins to run with the adapter of this name."""

    def ended(self, name: str) -> None:
        """Notes that a request with the adapter of a name has ended."""

    def readings(self) -> Iterator[Reading]:
        """Yields the metrics of adapters."""
        return iter(())

    async def aclose(self) -> None:
        """Ends the tasks beside requests that load and share adapters."""


class ServedFolders(NamedTuple):
    """Holds the folders of the models that a gateway serves, by their names, that of --model first; and further names
    of models, each with the model's name."""

    folders: Mapping[str, Path]
    aliases: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOptions:
    """Holds the flags that decide about adapters.

    Attributes:
        max_rank, max_loras: the largest rank of an adapter, and how many a worker keeps ready.
        modules: the values of --lora-modules.
        folders: the values of --lora-path.
        updating: whether names may change while the gateway runs.
        limits: what copies of adapters may take.
        redis_url: the Redis in which gateways share names; "" where this one is alone.
    """

    max_rank: int
    max_loras: int = 0
    modules: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    updating: bool = False
    limits: StoreLimits = STORE_LIMITS
    redis_url: str = ""


class AdapterMakers(NamedTuple):
    """Makes the adapters of a gateway. ``check`` raises ConfigError for --lora-modules that
    cannot be read; ``make`` loads these adapters, which reads files, and raises ConfigError as well."""

    check: Callable[[Sequence[str]], object]
    make: Callable[[AdapterOptions, ServedFolders], Adapters]


ADAPTERS = Seam[AdapterMakers]("gateway.adapters")


def check_adapters(flags: GatewayFlags) -> None:
    """Raises ConfigError for --lora-modules that cannot be read."""
    entered_one(ADAPTERS).check(flags.lora_modules)


def adapters_of(flags: GatewayFlags, served: ServedFolders) -> Adapters:
    """Makes the names of a gateway's adapters, with those of --lora-modules loaded. Reads files; raises ConfigError."""
    check_adapters(flags)
    if not flags.enable_lora:
        return Adapters()
    options = AdapterOptions(
        max_rank=flags.max_lora_rank,
        max_loras=flags.max_loras,
        modules=flags.lora_modules,
        folders=flags.lora_path,
        updating=flags.allow_runtime_lora_updating,
        limits=flags.store_limits,
        redis_url=flags.redis_url if flags.allow_runtime_lora_updating else "",
    )
    return make_adapters(options, served)


def make_adapters(options: AdapterOptions, served: ServedFolders) -> Adapters:
    """Makes the names of adapters of these models. Reads files; raises ConfigError where they cannot be served."""
    return entered_one(ADAPTERS).make(options, served)
