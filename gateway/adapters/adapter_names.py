"""Loads and unloads adapters by name, and shares the names with the other gateways.

load   folder allowed? -> checked, copied into the store by digest -> name means the digest -> told to all gateways
request's name -> digest, once -> workers, which get the files by digest
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pillion.adapter_folders import KEEP_S, STORE_LIMITS, StoreLimits, cache_root
from pillion.engine.adapters.adapter_process import AdapterProcess
from pillion.engine.adapters.adapter_store import AdapterKeeper, AdapterStore
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
from pillion.gateway.adapters.name_table import MAX_NAMES, NamedAdapter, NameTable
from pillion.gateway.links.defects import Defects
from pillion.kvstore.index.shared_names import SharedNames

log = logging.getLogger("pillion.gateway")

# A name that is unknown here may have been loaded at another gateway just now; looks for such ones are so far apart.
LOOK_INTERVAL_S = 0.1
# The copies of adapters that have names count as used so often.
USE_INTERVAL_S = KEEP_S / 24
# Adapters that are loaded and unloaded, or wait for that; one copy is made at a time.
MAX_CHANGES_AT_ONCE = 16
RETRY_AFTER_MS = 1000
# Longest time that an adapter's folder may take to be checked and copied, and the memory that this may take.
LOAD_TIMEOUT_S = 300.0
MAX_PROCESS_BYTES = 2**30

_NAME = re.compile(r"[^\x00-\x20\x7f]{1,256}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOptions:
    """The flags that decide about adapters. ``max_loras``: how many a worker keeps ready. ``folders`` are those of
    --lora-path; ``updating``: whether names may change while the gateway runs; ``limits``: what copies may take."""

    max_rank: int
    max_loras: int = 0
    folders: tuple[str, ...] = ()
    updating: bool = False
    limits: StoreLimits = STORE_LIMITS


@dataclass(frozen=True, slots=True)
class LoraModule:
    """One of --lora-modules. ``model`` is the name of its model; "" for that of --model."""

    name: str
    path: str
    model: str = ""


def parse_lora_modules(texts: Sequence[str]) -> tuple[LoraModule, ...]:
    """Reads --lora-modules: NAME=PATH, or vLLM's JSON object. Raises ConfigError."""
    modules = tuple(_parse_module(text) for text in texts)
    names = [module.name for module in modules]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"--lora-modules: two adapters are called {twice!r}")
    if len(modules) > MAX_NAMES:
        raise ConfigError(f"--lora-modules: at most {MAX_NAMES} adapters have names")
    return modules


def _parse_module(text: str) -> LoraModule:
    if text.startswith("{"):
        try:
            found = json.loads(text)
            module = LoraModule(found["name"], found["path"], found.get("base_model_name") or "")
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
    """Adapters by the names that clients use.

    Args:
        models: the folder of each served model, by its name; the first one is that of --model.
        aliases: further names of models, which no adapter may have; each with the model's name.
        shared: the names that all gateways share; None where this gateway is alone.

    Attributes:
        store: the copies on this machine. A process of its own reads their files.
    """

    def __init__(
        self,
        models: Mapping[str, Path],
        aliases: Mapping[str, str],
        options: AdapterOptions,
        shared: SharedNames | None = None,
    ) -> None:
        self._models = models
        self._aliases = aliases
        self._taken = frozenset(aliases) | frozenset(models)
        self._options = options
        self._folders = [Path(folder).expanduser().resolve() for folder in options.folders]
        self._shared = shared
        keeper = AdapterKeeper(str(cache_root()), options.limits)
        self._process = AdapterProcess(keeper, MAX_PROCESS_BYTES)
        self.store = AdapterStore(limits=options.limits, digest_of=self._process.digest)
        self.max_loras = options.max_loras
        self.table = NameTable()
        self._version = b""
        self._loading = asyncio.Lock()
        self._changing = 0
        self._sharing = asyncio.Lock()
        self._looked_s = float("-inf")
        self._looking: asyncio.Task[None] | None = None
        # Loads whose callers may have left.
        self._loads: set[asyncio.Task[NamedAdapter]] = set()

    def load_fixed(self, modules: Sequence[LoraModule]) -> None:
        """Loads the adapters of --lora-modules. Reads files; raises ConfigError, which names the adapter."""
        found: list[NamedAdapter] = []
        for module in modules:
            try:
                found.append(self._load(module.name, Path(module.path).expanduser(), module.model))
            except PillionError as error:
                self._process.close()
                raise ConfigError(f"--lora-modules {module.name}: {error.message}") from None
        self.table = NameTable(found)
        if not self._options.updating:
            self._process.close(for_good=False)

    def find(self, name: str) -> NamedAdapter | None:
        """What a name means now; None where it means no adapter of a model that is served here."""
        adapter = self.table.find(name)
        return adapter if adapter is not None and adapter.parent in self._models and name not in self._taken else None

    def all(self) -> list[NamedAdapter]:
        """The adapters of models that are served here, by name."""
        return [adapter for adapter in self.table.all() if self.find(adapter.name) is adapter]

    def digests(self) -> set[str]:
        """The digests of these adapters."""
        return {adapter.digest for adapter in self.all()}

    async def look(self, name: str) -> None:
        """Asks the registry about a name that is unknown here; all who ask at once share a look, and each has one that
        began after it came."""
        if not name or name in self._taken or not self._options.updating:
            return
        # A look that is under way may have been answered before the name was given.
        for _ in range(1 if self._looking is None else 2):
            if self.table.find(name) is not None:
                return
            if self._looking is None:
                self._looking = asyncio.create_task(self._look())
            await asyncio.shield(self._looking)

    async def _look(self) -> None:
        try:
            await asyncio.sleep(self._looked_s + LOOK_INTERVAL_S - time.monotonic())
            await self._share_quietly()
        finally:
            self._looked_s = time.monotonic()
            self._looking = None

    async def load(self, name: str, path: str, *, in_place: bool = False, model: str = "") -> NamedAdapter:
        """Gives ``name`` to the adapter of a folder, for requests that come from now on.

        Args:
            path: a folder inside of one of --lora-path, absolute or relative to it.
            in_place: whether the name may mean another adapter already.
            model: the name of the adapter's model; "" for that of --model.

        A load goes on when its caller leaves; to load what the name means already changes nothing.

        Raises:
            Overloaded: too many adapters are being loaded, or there is no room for this one. PermissionDenied: names
                are fixed here, or the folder is in none of --lora-path. NotFound: no such folder. InvalidRequest: the
                adapter cannot be served. Conflict: the name is taken. Unavailable: it was not read within
                LOAD_TIMEOUT_S, or the process that reads adapters has ended.
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
            raise _wrong("lora_name", "a name has from 1 to 256 characters, none of them a space")
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
            raise Conflict(f"what {name!r} means was changed at the same time")
        log.info("adapter %s of model %s is %s from %s", name, adapter.parent, adapter.digest[:12], folder)
        return adapter

    async def unload(self, name: str) -> NamedAdapter:
        """Takes a name away. Requests that named it go on. Raises NotFound, and PermissionDenied or Conflict where the
        name is fixed."""
        self._check_updating()
        async with self._turn():
            adapter = self.find(name)
            if adapter is None:
                raise NotFound(f"The lora adapter {name[:100]!r} cannot be found.")
            if name in self.table.fixed:
                raise Conflict(f"{name!r} is one of --lora-modules, which stay as long as the gateway runs")
            self.table.remove(name, _now_ms())
        await self._share_quietly()
        log.info("adapter %s is unloaded", name)
        return adapter

    async def share(self) -> None:
        """Brings changes to the registry and takes those of the other gateways. Raises Unavailable."""
        if self._shared is None:
            return
        async with self._sharing:
            while True:
                sent = self.table.unsent()
                answer = await self._shared.share(self._version, sent)
                self.table.merge(sent, answer.values, _now_ms())
                self._version = answer.version
                # What the registry turned out to lack is brought at once.
                if not self.table.unsent() or answer.values is None:
                    return

    async def run(self, interval_s: float) -> None:
        """Shares names and keeps their copies in use, until it is cancelled."""
        defects = Defects("the sharing of adapters' names")
        used_s = float("-inf")
        while True:
            try:
                await self._share_quietly()
                if time.monotonic() - used_s > USE_INTERVAL_S:
                    used_s = time.monotonic()
                    await asyncio.to_thread(self._use)
            except Exception as error:  # noqa: BLE001  (without it, gateways would drift apart)
                defects.note(error)
            await asyncio.sleep(interval_s)

    async def end_reading(self) -> None:
        """Ends the process that reads adapters, and what waits for it. Idempotent."""
        await asyncio.to_thread(self._process.close)

    async def aclose(self) -> None:
        """Ends loads and looks, and closes the connections to Redis."""
        for task in (*self._loads, *filter(None, [self._looking])):
            task.cancel()
        await self.end_reading()
        if self._shared is not None:
            await self._shared.aclose()

    async def _share_quietly(self) -> None:
        try:
            await self.share()
        except Unavailable as error:
            # What changed here is brought later; what changed elsewhere is learnt then.
            log.debug("the registry did not take the names of adapters: %s", error.message)

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """One change at a time, with what other gateways changed. Raises Overloaded where too many wait."""
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
        if not self._options.updating:
            raise PermissionDenied("names of adapters are fixed here: --allow-runtime-lora-updating changes that")

    def _check_free(self, name: str) -> None:
        if name in self._taken:
            raise Conflict(f"{name!r} is the name of a model")
        if name in self.table.fixed:
            raise Conflict(f"{name!r} is one of --lora-modules, which stay as long as the gateway runs")
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
        """The folder of --lora-path, and the one in it that a caller names. Nothing is said of paths elsewhere, not
        even whether they exist."""
        if "\0" in path:
            raise _wrong("lora_path", "a path has no character 0")
        found = [(root, Path(os.path.realpath(root / path))) for root in self._folders]
        found = [(root, folder) for root, folder in found if folder.is_relative_to(root)]
        if not found:
            raise PermissionDenied(f"lora_path: {path[:200]!r} is in none of the folders of --lora-path")
        there = next((one for one in found if one[1].is_dir()), None)
        if there is None:
            raise NotFound(f"lora_path: there is no folder {path[:200]!r}")
        return there

    def _load(self, name: str, folder: Path, model: str, inside: Path | None = None) -> NamedAdapter:
        parent = self._aliases.get(model, model) or next(iter(self._models))
        if parent not in self._models:
            raise _wrong("base_model_name", f"{parent[:100]!r} is not served here")
        if name in self._taken:
            raise Conflict(f"{name!r} is the name of a model")
        try:
            place, model = "" if inside is None else str(inside), str(self._models[parent])
            (digest, rank), _ = self._process.run(
                LOAD_TIMEOUT_S, "add", str(folder), model, self._options.max_rank, place
            )
        except ConfigError as error:
            raise _wrong("lora_path", error.message) from None
        return NamedAdapter(name=name, parent=parent, digest=digest, rank=rank, path=str(folder))

    def _use(self) -> None:
        for adapter in self.table.all():
            try:
                self.store.find(adapter.digest)
            except NotFound:
                log.debug("adapter %s was loaded on another machine", adapter.name)


def _now_ms() -> int:
    return time.time_ns() // 10**6


def _wrong(field: str, message: str) -> InvalidRequest:
    return InvalidRequest.of(FieldViolation(field, message))
