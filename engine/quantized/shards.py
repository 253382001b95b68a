"""Writer of a model folder's weights: tensor by tensor, in safetensors files of limited size.

At most one file's tensors are in memory, so models of any size can be converted.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from pillion.engine.checkpoints.model_files import INDEX_NAME, SINGLE_NAME

MAX_SHARD_BYTES = 2 * 2**30
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


class ShardWriter:
    """Writer of a model's tensors, file by file; see :func:`write_shards`."""

    def __init__(self, folder: Path, max_shard_bytes: int) -> None:
        self._folder = folder
        self._max_shard_bytes = max_shard_bytes
        self._tensors: dict[str, torch.Tensor] = {}
        self._size_bytes = 0
        self._weight_map: dict[str, str] = {}
        self._shards = 0

    def add(self, tensors: dict[str, torch.Tensor]) -> None:
        """Add tensors by checkpoint name. They may be written later, so the caller must not change them."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self._tensors and self._size_bytes + size > self._max_shard_bytes:
            self._shards += 1
            self._write(f"model-{self._shards:05}.safetensors")
        self._tensors.update(tensors)
        self._size_bytes += size

    def finish(self) -> None:
        """Write the remaining tensors to a single file, or to the last of several files, and then the index."""
        if not self._shards:
            self._write(SINGLE_NAME)
            return
        self._write(f"model-{self._shards + 1:05}.safetensors")
        (self._folder / INDEX_NAME).write_text(json.dumps({"weight_map": self._weight_map}), "utf-8")

    def _write(self, name: str) -> None:
        try:
            save_file(self._tensors, self._folder / name, metadata={"format": "pt"})
        except SafetensorError as error:
            # safetensors reports an OSError, e.g. for a full disk, only in the message.
            number = _OS_ERROR.search(str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1])), name) from None
        self._weight_map.update(dict.fromkeys(self._tensors, name))
        self._tensors, self._size_bytes = {}, 0


@contextmanager
def write_shards(folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> Iterator[ShardWriter]:
    """Yield a writer of a folder's weights, whose :meth:`ShardWriter.finish` is called if the block succeeds."""
    writer = ShardWriter(folder, max_shard_bytes)
    yield writer
    writer.finish()
