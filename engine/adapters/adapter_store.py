"""Copies of adapter folders by digest, shared by all processes of a machine. Imports no torch.

$PILLION_CACHE or ~/.cache/pillion
`-- adapters/<digest>/    adapter_config.json and adapter_model.safetensors

A copy is made in a temporary folder, checked, and renamed: it is complete or absent, and never changes, so the original
folder may be overwritten at any time. When the store is full, copies that have not been used for a while are evicted;
gateways regularly mark the copies of their adapters as used.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pillion.engine.adapters.adapter_files import READ_AT_ONCE_BYTES, AdapterFiles
from pillion.engine.adapters.adapter_forms import NO_BYTES, Bytes
from pillion.engine.checkpoints.model_cache import ModelCache
from pillion.engine.models.config_parser import load_config
from pillion.engine.models.model_config import ModelConfig
from pillion.errors import ConfigError, NotFound, Overloaded, PermissionDenied
from pillion.host.adapter_folders import (
    ADAPTER_FILES,
    ADAPTERS,
    MAX_ADAPTER_BYTES,
    STORE_BYTES,
    is_adapter_digest,
    temporary_folder,
)


def folder_digest(folder: Path) -> str:
    """Return the digest of the adapter in a folder. Raises ConfigError if there is none."""
    return AdapterFiles(folder).digest()


class AdapterJobs:
    """Base of the jobs that an :class:`AdapterProcess` runs. Each returns a list of JSON values, and bytes."""

    def digest(self, folder: str) -> tuple[list[Any], Bytes]:
        """Return the digest of the adapter in a folder. Raises ConfigError if there is none."""
        return [folder_digest(Path(folder))], NO_BYTES


@dataclass(frozen=True, slots=True)
class AdapterCopier(AdapterJobs):
    """Jobs that copy adapters into a store, in a subprocess, since the files are untrusted. ``root`` and
    ``store_bytes``: those of :class:`AdapterStore`."""

    root: str
    store_bytes: int

    def add(
        self, source: str, model_folder: str, max_rank: int, targets: list[str], inside: str
    ) -> tuple[list[Any], Bytes]:
        """Copy an adapter like :meth:`AdapterStore.add`; ``inside`` is "" for anywhere. Return the copy's digest and
        rank."""
        root, model = Path(inside) if inside else None, load_config(Path(model_folder))
        store = AdapterStore(Path(self.root), self.store_bytes)
        stored = store.add(Path(source), model, max_rank, targets, inside=root)
        return [stored.digest, stored.rank], NO_BYTES


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """A copy of an adapter in the store. ``rank``: highest rank of its pairs of matrices; 1 if there are none."""

    digest: str
    folder: Path
    rank: int
    size_bytes: int


class AdapterStore:
    """A machine's copies of adapters.

    Args:
        root: the model cache's folder, by default the user's.
        store_bytes: max size of all copies.
        digest_of: returns the digest of the adapter in a folder, and raises ConfigError if there is none. By default
            this process reads the folder itself.
    """

    def __init__(
        self,
        root: Path | None = None,
        store_bytes: int = STORE_BYTES,
        digest_of: Callable[[Path], str] = folder_digest,
    ) -> None:
        self._cache = ModelCache(root)
        self._store_bytes = store_bytes
        self._digest_of = digest_of

    def add(
        self,
        source: Path,
        model: ModelConfig,
        max_rank: int = 0,
        targets: Sequence[str] = (),
        *,
        inside: Path | None = None,
    ) -> StoredAdapter:
        """Check an adapter and copy it into the store. Reads and writes whole files, so call it in a thread.

        Args:
            source: the adapter's folder.
            model: config of the base model.
            max_rank: max rank; 0 allows any.
            targets: names of linear layers that adapters may change; empty allows all.
            inside: resolved folder that must contain the files; None for anywhere.

        Raises:
            ConfigError: the adapter does not fit the model, or is too large. PermissionDenied: a file is outside of
                ``inside``. Overloaded: the store is full or not writable.
        """
        sources = {name: _resolve(source / name, inside) for name in ADAPTER_FILES}
        files = AdapterFiles(source)
        files.pairs(model, max_rank, targets)
        if files.size_bytes > MAX_ADAPTER_BYTES:
            raise ConfigError(f"{source} has {files.size_bytes} bytes; the limit is {MAX_ADAPTER_BYTES}")
        with self._draft(files.size_bytes) as draft:
            for name, file in sources.items():
                _copy(file, draft / name)
            # Check the copy, too: the source may have changed meanwhile.
            copied = AdapterFiles(draft, called=source)
            pairs = copied.pairs(model, max_rank, targets)
            digest = copied.digest(copied.check_numbers)
            copied.check_changes(pairs)
            folder = self._publish(draft, digest)
        rank = max((pair.rank for pair in pairs), default=1)
        return StoredAdapter(digest, folder, rank, copied.size_bytes)

    def find(self, digest: str) -> Path:
        """Return the folder of an adapter and mark it as used. Raises NotFound if the store lacks it."""
        folder = self._folder(digest)
        try:
            os.utime(folder)
        except OSError:
            raise NotFound(f"adapter {digest[:12]} is not in the store {folder.parent} of this machine") from None
        return folder

    @contextmanager
    def receive(self, digest: str, size_bytes: int) -> Iterator[Path]:
        """Yield a folder for the files of an adapter from another machine, and store it when the context ends. Raises
        ConfigError if the content does not match ``digest``, and Overloaded like :meth:`add`."""
        self._folder(digest)
        with self._draft(size_bytes) as draft:
            yield draft
            if self._digest_of(draft) != digest:
                raise ConfigError(f"the fetched files of the adapter {digest} do not match its digest")
            self._publish(draft, digest)

    def remove(self, digest: str) -> None:
        """Remove a damaged copy, so that the adapter is fetched again."""
        shutil.rmtree(self._folder(digest), ignore_errors=True)

    def _folder(self, digest: str) -> Path:
        if not is_adapter_digest(digest):
            raise NotFound(f"{digest[:80]!r} is not an adapter's digest")
        return self._cache.make(ADAPTERS) / digest

    @contextmanager
    def _draft(self, size_bytes: int) -> Iterator[Path]:
        root = self._cache.make(ADAPTERS)
        try:
            with temporary_folder(root, size_bytes, self._store_bytes) as draft:
                yield draft
        except OSError as error:
            raise Overloaded(f"the adapter cannot be stored in {root}: {error.strerror or error}") from None

    def _publish(self, draft: Path, digest: str) -> Path:
        """Rename a complete copy to its folder, unless there is an undamaged one, and return the folder."""
        target = self._folder(digest)
        if target.is_dir():
            try:
                if self._digest_of(target) == digest:
                    os.utime(target)
                    return target
            except ConfigError:
                pass
            self.remove(digest)
        try:
            draft.rename(target)
        except OSError:
            # Another process was first, with the same content.
            if not target.is_dir():
                raise
        return target


def _resolve(file: Path, inside: Path | None) -> Path:
    """Return the resolved path of a file. Raises PermissionDenied if it is outside of ``inside``."""
    resolved = Path(os.path.realpath(file))
    if inside is not None and not resolved.is_relative_to(inside):
        raise PermissionDenied(f"{file} is a link to somewhere else")
    return resolved


def _copy(file: Path, target: Path) -> None:
    try:
        # Neither follow a link nor block on a FIFO that has replaced the file meanwhile.
        source = os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from None
    with source, target.open("xb") as copy:
        shutil.copyfileobj(source, copy, READ_AT_ONCE_BYTES)
