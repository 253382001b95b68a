"""The model cache on a full disk: a one-line error, nothing partial, and a later retry works."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pillion.engine.checkpoints.model_cache import ModelCache, ModelRecord
from pillion.engine.checkpoints.packed_file import PackedFile, write_packed
from pillion.errors import ConfigError
from pillion.kernels.cpu.runtime.code_cache import CodeCache
from tests.support.small_disk import mounted_disk

RECORD = ModelRecord(
    folder="/model", fingerprint="f" * 64, vocab_size=9, max_position_embeddings=9, eos_token_ids=(1,),
    bos_token_id=None, files=(("/model/" + "x" * 6000, 1, 1),),
)  # fmt: skip
DISK_BYTES = 2**20 + 2**16


def record(root: Path) -> None:
    cache = ModelCache(root)
    cache.write_record(Path("/model"), "float32", RECORD)
    assert cache.record_path(Path("/model"), "float32").is_file()


def folder(root: Path) -> None:
    made = ModelCache(root).folder("d", lambda into: (into / "weights").write_bytes(bytes(9000)) and None, print)
    assert (made / "weights").stat().st_size == 9000


def packed(root: Path) -> None:
    path = ModelCache(root).packed_weights("f" * 64, "kernels")
    with write_packed(path) as writer:
        writer.tensor("one", torch.ones(9000))
    assert PackedFile(path).tensors["one"].sum() == 9000


def kernels(root: Path) -> None:
    """The cache of compiled kernels; its failures are only warnings."""
    cache = CodeCache(root)
    cache.write({"0" * 64: bytes(9000)})
    if cache.read("0" * 64) is None:
        raise ConfigError("No space left")


@pytest.mark.parametrize("make", [record, folder, packed, kernels])
def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path: Path, make: Callable[[Path], None]) -> None:
    with mounted_disk(tmp_path / "disk", DISK_BYTES) as disk:
        disk.leave(4096)
        for _ in range(2):
            with pytest.raises(ConfigError, match="No space left"):
                make(disk.folder)
            assert not [file for file in disk.folder.rglob("*") if file.is_file() and file.stat().st_size]
        disk.leave(DISK_BYTES)
        make(disk.folder)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """The cache or its locks, for any reason."""
    (tmp_path / "locks").mkdir()
    os.symlink("missing/folder", tmp_path / "locks" / "models-d")
    with pytest.raises(
        ConfigError, match="cannot be written: No such file or directory; set PILLION_CACHE to another folder"
    ):
        ModelCache(tmp_path).folder("d", lambda into: None, print)
