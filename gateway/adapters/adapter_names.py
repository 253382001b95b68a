"""Loads and unloads adapters by name, and shares the names with the other gateways.

load   folder allowed? -> validated, copied into the store by digest -> name maps to the digest -> sent to all gateways
request's name -> digest, once -> workers, which fetch the files by digest
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pillion.config import GatewayFlags
from pillion.engine.adapters.adapter_process import AdapterProcess
from pillion.engine.adapters.adapter_store import AdapterCopier, AdapterStore
from pillion.engine.adapters.adapter_targets import listed_targets
from pillion.errors import (
    ConfigError,
    Conflict,
    FieldViolation,
    InvalidRequest,
    NotFound,
    Overloaded,
    PermissionDenied,
    PillionError,
    Unavailable,
)
from pillion.gateway.adapters.adapter_spread import AdapterSpread
from pillion.gateway.adapters.name_table import FORGET_MS, MAX_CHANGES, MAX_NAMES, NamedAdapter, NameTable
from pillion.gateway.admission.admission import RETRY_AFTER_MS
from pillion.gateway.links.defects import Defects
from pillion.gateway.links.node_link import NodeLink
from pillion.host.adapter_folders import KEEP_S, STORE_BYTES, cache_root
from pillion.kvstore.index.shared_names import SharedNames
from pillion.observability import metric_catalog
from pillion.observability.metrics import Reading

log = logging.getLogger("pillion.gateway")

# Min interval between registry look-ups of unknown names, which another gateway may have just loaded.
LOOK_INTERVAL_S = 0.1
# Interval at which copies of named adapters are marked as used, so that they are not evicted.
USE_INTERVAL_S = KEEP_S / 24
MAX_CHANGES_AT_ONCE = 16
LOAD_TIMEOUT_S = 300.0
MAX_PROCESS_BYTES = 2**30

_NAME = re.compile(r"[^\x00-\x20\x7f]{1,256}")


@dataclass(frozen=True, slots=True)
class LoraModule:
    """One value of --lora-modules. ``model`` is the name of its model, "" for that of --model."""

    name: str
    path: str
    model: str = ""


def parse_lora_modules(texts: Sequence[str]) -> tuple[LoraModule, ...]:
    """Parse --lora-modules: NAME=PATH, or vLLM's JSON object. Raises ConfigError."""
    modules = tuple(_parse_module(text) for text in texts)
    names = [module.name for module in modules]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise ConfigError(f"--lora-modules: two adapters are called {duplicate!r}")
    if len(modules) > MAX_NAMES:
        raise ConfigError(f"--lora-modules: at most {MAX_NAMES} adapters have names")
    return modules


def _parse_module(text: str) -> LoraModule:
    if text.startswith("{"):
        try:
            fields = json.loads(text)
            module = LoraModule(fields["name"], fields["path"], fields.get("base_model_name") or "")
        except (ValueError, KeyError):
            module = LoraModule("", "")
    else:
        name, _, path = text.partition("=")
        module = LoraModule(name.strip(), path.strip())
    texts = (module.name, module.path, module.model)
    if not all(isinstance(part, str) for part in texts) or not module.path or not _NAME.fullmatch(module.name):
        raise ConfigError(f'--lora-modules {text!r}: write NAME=PATH, or {{"name": NAME, "path": PATH}}')
    return module


class AdapterNames:
    """A gateway's adapters by the names that clients use.

    Args:
        models: folder of each served model, by its name; the first is that of --model.
        aliases: further names of models, each with the model's name; no adapter may have one.
        nodes: returns the links to all KV nodes, on whose machines workers look for adapter files.
        shared: names that all gateways share; None if this gateway is the only one.

    Attributes:
        store: adapter copies on this machine. A separate process reads their files.

    start -> stop, when the gateway begins to drain -> aclose
    """

    def __init__(
        self,
        models: Mapping[str, Path],
        aliases: Mapping[str, str],
        flags: GatewayFlags,
        nodes: Callable[[], Iterable[NodeLink]],
        shared: SharedNames | None = None,
    ) -> None:
        self._models = models
        self._aliases = aliases
        self._model_names = frozenset(aliases) | frozenset(models)
        self._flags = flags
        self._folders = [Path(folder).expanduser().resolve() for folder in flags.lora_path]
        self._shared = shared
        copier = AdapterCopier(str(cache_root()), STORE_BYTES)
        self._process = AdapterProcess(copier, MAX_PROCESS_BYTES)
        self.store = AdapterStore(store_bytes=STORE_BYTES, digest_of=self._process.digest)
        self._spread = AdapterSpread(nodes, self.digests, self.store)
        self._tasks: list[asyncio.Task[None]] = []
        self._running: Counter[str] = Counter()
        self.table = NameTable()
        self._version = b""
        self._loading = asyncio.Lock()
        self._changing = 0
        self._sharing = asyncio.Lock()
        self._last_look_s = float("-inf")
        self._look_task: asyncio.Task[None] | None = None
        # Running loads, which continue if their callers are cancelled.
        self._loads: set[asyncio.Task[NamedAdapter]] = set()

    def load_fixed(self, modules: Sequence[LoraModule]) -> None:
        """Load the adapters of --lora-modules from disk. Raises ConfigError, which names the adapter."""
        adapters: list[NamedAdapter] = []
        for module in modules:
            try:
                adapters.append(self._load(module.name, Path(module.path).expanduser(), module.model))
            except PillionError as error:
                self._process.close()
                raise ConfigError(f"--lora-modules {module.name}: {error.message}") from None
        self.table = NameTable(adapters)
        if not self._flags.allow_runtime_lora_updating:
            self._process.close(for_good=False)

    def start(self, heartbeat_s: float) -> None:
        """Start to share adapter names and to distribute adapter files, once per heartbeat."""
        self._tasks = [
            asyncio.create_task(self._keep_shared(heartbeat_s), name="adapters"),
            asyncio.create_task(self._spread.run(heartbeat_s), name="files of adapters"),
        ]

    async def stop(self) -> None:
        """Stop sharing names and distributing files."""
        for task in self._tasks:
            task.cancel()
        # Calls that receive adapter files may be waiting for this process.
        await asyncio.to_thread(self._process.close)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def spread(self) -> None:
        """Copy all adapters to the machines of the KV nodes that can be reached now."""
        await self._spread.spread()

    def began(self, name: str) -> None:
        """Count a request that starts with this adapter."""
        self._running[name] += 1

    def ended(self, name: str) -> None:
        """Count a request with this adapter as ended."""
        self._running[name] -= 1

    def readings(self) -> Iterator[Reading]:
        """Yield the gauges of a gateway that serves adapters."""
        return adapter_readings(self._running, self._flags.max_loras)

    def find(self, name: str) -> NamedAdapter | None:
        """Return the adapter with this name; None if there is none for a model served here."""
        adapter = self.table.find(name)
        return (
            adapter
            if adapter is not None and adapter.parent in self._models and name not in self._model_names
            else None
        )

    def all(self) -> list[NamedAdapter]:
        """Return the adapters of models served here, by name."""
        return [adapter for adapter in self.table.all() if self.find(adapter.name) is adapter]

    def digests(self) -> set[str]:
        """Return the digests of the adapters of models served here."""
        return {adapter.digest for adapter in self.all()}

    async def look(self, name: str) -> None:
        """Query the registry for an unknown name. Concurrent callers share a query that begins after their calls."""
        if not name or name in self._model_names or not self._flags.allow_runtime_lora_updating:
            return
        # A running query may have begun before the name was added; then another one is needed.
        for _ in range(1 if self._look_task is None else 2):
            if self.table.find(name) is not None:
                return
            if self._look_task is None:
                self._look_task = asyncio.create_task(self._look())
            await asyncio.shield(self._look_task)

    async def _look(self) -> None:
        try:
            await asyncio.sleep(self._last_look_s + LOOK_INTERVAL_S - time.monotonic())
            await self._share_quietly()
        finally:
            self._last_look_s = time.monotonic()
            self._look_task = None

    async def load(self, name: str, path: str, *, in_place: bool = False, model: str = "") -> NamedAdapter:
        """Map ``name`` to the adapter in a folder, for requests from now on.

        Args:
            path: a folder inside one of --lora-path, absolute or relative to it.
            in_place: whether the name may be that of another adapter, which it then replaces.
            model: name of the adapter's model; "" for that of --model.

        A load goes on if its caller is cancelled. Loading the same adapter again changes nothing.

        Raises:
            Overloaded: too many loads under way, or no disk space. PermissionDenied: names are fixed, or the folder is
                in none of --lora-path. NotFound: no such folder. InvalidRequest: the adapter cannot be served.
                Conflict: the name is taken. Unavailable: the folder was not read within LOAD_TIMEOUT_S, or the process
                that reads adapters has ended.
        """
        load = asyncio.create_task(self._change(name, path, in_place, model))
        self._loads.add(load)
        load.add_done_callback(self._loaded)
        return await asyncio.shield(load)

    def _loaded(self, load: asyncio.Task[NamedAdapter]) -> None:
        self._loads.discard(load)
        if not load.cancelled():
            load.exception()

    async def _change(self, name: str, path: str, in_place: bool, model: str) -> NamedAdapter:
        self._check_updating()
        if not _NAME.fullmatch(name):
            raise _wrong("lora_name", "1 to 256 characters without spaces")
        async with self._turn():
            self._check_free(name)
            root, folder = await asyncio.to_thread(self._allowed, path)
            adapter = await asyncio.to_thread(self._load, name, folder, model, root)
            before = self.find(name)
            if before is not None and (before.parent, before.digest) == (adapter.parent, adapter.digest):
                return before
            self._check_unused(name, in_place)
            self.table.put(adapter, _now_ms())
        await self._share_quietly()
        if self.table.find(name) != adapter:
            raise Conflict(f"{name!r} was changed at the same time")
        log.info("adapter %s of model %s is %s from %s", name, adapter.parent, adapter.digest[:12], folder)
        return adapter

    async def unload(self, name: str) -> NamedAdapter:
        """Remove an adapter's name; requests that use it go on. Raises NotFound, PermissionDenied, and Conflict if the
        name is fixed."""
        self._check_updating()
        async with self._turn():
            adapter = self.find(name)
            if adapter is None:
                raise NotFound(f"The lora adapter {name[:100]!r} cannot be found.")
            if name in self.table.fixed:
                raise Conflict(f"{name!r} is one of --lora-modules, which cannot be changed at run time")
            self.table.remove(name, _now_ms())
        await self._share_quietly()
        log.info("adapter %s is unloaded", name)
        return adapter

    async def share(self) -> None:
        """Exchange changes of names with the registry. Raises Unavailable."""
        if self._shared is None:
            return
        async with self._sharing:
            while True:
                sent = self.table.unsent()
                answer = await self._shared.share(self._version, sent)
                self.table.merge(sent, answer.values, _now_ms())
                self._version = answer.version
                if not self.table.unsent() or answer.values is None:
                    return

    async def _keep_shared(self, interval_s: float) -> None:
        """Share names and mark copies of named adapters as used, until cancelled."""
        defects = Defects("the sharing of adapters' names")
        used_s = float("-inf")
        while True:
            try:
                await self._share_quietly()
                if time.monotonic() - used_s > USE_INTERVAL_S:
                    used_s = time.monotonic()
                    await asyncio.to_thread(self._mark_used)
            except Exception as error:  # noqa: BLE001  (without it, gateways would diverge)
                defects.note(error)
            await asyncio.sleep(interval_s)

    async def aclose(self) -> None:
        """Cancel loads and registry calls, and close the process and the connections to Redis."""
        for task in (*self._loads, *filter(None, [self._look_task])):
            task.cancel()
        await asyncio.to_thread(self._process.close)
        if self._shared is not None:
            await self._shared.aclose()

    async def _share_quietly(self) -> None:
        try:
            await self.share()
        except Unavailable as error:
            # A later call sends and fetches the changes.
            log.debug("adapter names could not be shared: %s", error.message)

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Serialize changes of names: wait for the turn, and fetch other gateways' changes first. Raises Overloaded if
        too many changes wait."""
        if self._changing >= MAX_CHANGES_AT_ONCE:
            raise Overloaded(f"{MAX_CHANGES_AT_ONCE} adapters are being loaded", RETRY_AFTER_MS)
        self._changing += 1
        try:
            async with self._loading:
                await self._share_quietly()
                yield
        finally:
            self._changing -= 1

    def _check_updating(self) -> None:
        if not self._flags.allow_runtime_lora_updating:
            raise PermissionDenied("adapters cannot be changed without --allow-runtime-lora-updating")

    def _check_free(self, name: str) -> None:
        if name in self._model_names:
            raise Conflict(f"{name!r} is the name of a model")
        if name in self.table.fixed:
            raise Conflict(f"{name!r} is one of --lora-modules, which cannot be changed at run time")
        if self.table.find(name) is None and len(self.table.all()) >= MAX_NAMES:
            raise Conflict(f"{MAX_NAMES} adapters have names already")

    def _check_unused(self, name: str, in_place: bool) -> None:
        if self.table.find(name) is not None and not in_place:
            raise _wrong(
                "lora_name",
                f"The lora adapter {name!r} has already been loaded. If you want to load the adapter in place, set"
                " 'load_inplace' to True.",
            )

    def _allowed(self, path: str) -> tuple[Path, Path]:
        """Return the folder of --lora-path that contains ``path``, and the resolved path. Errors reveal nothing about
        paths elsewhere, not even whether they exist."""
        if "\0" in path:
            raise _wrong("lora_path", "the path contains NUL")
        candidates = [(root, Path(os.path.realpath(root / path))) for root in self._folders]
        candidates = [(root, folder) for root, folder in candidates if folder.is_relative_to(root)]
        if not candidates:
            raise PermissionDenied(f"lora_path: {path[:200]!r} is in none of the folders of --lora-path")
        existing = next((one for one in candidates if one[1].is_dir()), None)
        if existing is None:
            raise NotFound(f"lora_path: there is no folder {path[:200]!r}")
        return existing

    def _load(self, name: str, folder: Path, model: str, inside: Path | None = None) -> NamedAdapter:
        """Validate an adapter's folder and copy it into the store; blocks. ``inside``: the folder that must contain it.
        Raises PillionError."""
        parent = self._aliases.get(model, model) or next(iter(self._models))
        if parent not in self._models:
            raise _wrong("base_model_name", f"{parent[:100]!r} is not served here")
        if name in self._model_names:
            raise Conflict(f"{name!r} is the name of a model")
        try:
            root, model = "" if inside is None else str(inside), str(self._models[parent])
            limits = self._flags.max_lora_rank, list(listed_targets(self._flags.lora_target_modules))
            (digest, rank), _ = self._process.run(LOAD_TIMEOUT_S, "add", str(folder), model, *limits, root)
        except ConfigError as error:
            raise _wrong("lora_path", error.message) from None
        return NamedAdapter(name=name, parent=parent, digest=digest, rank=rank, path=str(folder))

    def _mark_used(self) -> None:
        """Mark the copies of named adapters as used; blocks."""
        for adapter in self.table.all():
            try:
                self.store.find(adapter.digest)
            except NotFound:
                log.debug("adapter %s was loaded on another machine", adapter.name)


def _now_ms() -> int:
    return time.time_ns() // 10**6


def _wrong(field: str, message: str) -> InvalidRequest:
    return InvalidRequest.of(FieldViolation(field, message))


def adapter_readings(running: Mapping[str, int], max_loras: int) -> Iterator[Reading]:
    """Yield the adapter gauges; ``running`` counts requests by adapter name."""
    yield metric_catalog.ADAPTER_SLOTS, (), max_loras
    for name, requests in running.items():
        if requests:
            yield metric_catalog.ADAPTER_REQUESTS, (name,), requests


def load_adapters(
    models: Mapping[str, Path],
    aliases: Mapping[str, str],
    flags: GatewayFlags,
    nodes: Callable[[], Iterable[NodeLink]],
) -> AdapterNames:
    """Create :class:`AdapterNames` with --lora-modules loaded from disk. Raises ConfigError."""
    modules = parse_lora_modules(flags.lora_modules)
    shares = flags.redis_url and flags.allow_runtime_lora_updating
    shared = SharedNames(flags.redis_url, MAX_CHANGES, FORGET_MS) if shares else None
    names = AdapterNames(models, aliases, flags, nodes, shared)
    names.load_fixed(modules)
    return names
