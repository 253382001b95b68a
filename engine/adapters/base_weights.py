"""Reads single matrices and biases of a model's plain checkpoint, by their names, for adapters that depend on them.
Imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pillion.engine.adapters.adapter_files import TYPES, widened
from pillion.engine.checkpoints.model_files import weight_files
from pillion.errors import ConfigError

# Names of checkpoints and of adapters begin in different ways, and from the layer on they are equal.
_FROM_LAYER = re.compile(r"(?:^|\.)((?:layers|h)\.\d+\..+)")
# Matrices are read in pieces of about so many numbers.
PIECE_NUMBERS = 2**22


class BaseWeights:
    """Finds tensors of the checkpoint in a folder; headers are read when the first one is asked for. ``turned`` says
    that its matrices lie as [inputs, outputs]. ``in_models`` gives a tensor the name that adapters have for it, where
    it is another one."""

    def __init__(
        self, folder: Path, *, turned: bool = False, in_models: Callable[[str], str] = lambda name: name
    ) -> None:
        self._folder = folder
        self._turned = turned
        self._in_models = in_models

    def bias(self, module: str) -> npt.NDArray[np.float32]:
        """Returns a module's bias [outputs]. Raises ConfigError where the checkpoint has none in plain numbers."""
        return np.concatenate([part for _, part in self._rows(f"{module}.bias")])

    def norms(self, module: str, a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Returns the norm of each row [outputs] of a module's matrix W plus ``b`` ``a``. Raises ConfigError where the
        checkpoint does not hold W in plain numbers."""
        if self._turned:
            pieces = self._rows(f"{module}.weight")
            squares = (np.square(rows + a.T[first : first + len(rows)] @ b.T).sum(0) for first, rows in pieces)
            found: npt.NDArray[np.float32] = np.sqrt(np.sum([*squares], axis=0)).astype(np.float32, copy=False)
            return found
        parts = []
        for first, rows in self._rows(f"{module}.weight"):
            parts.append(np.linalg.norm(rows + b[first : first + len(rows)] @ a, axis=1))
        return np.concatenate(parts).astype(np.float32, copy=False)

    def _rows(self, name: str) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
        """Yields a tensor in pieces: the number of a first row, and rows."""
        own = _from_layer(name)
        found = self._tensors.get(own)
        if found is None or found[1] not in TYPES:
            what = "it is missing there" if found is None else f"its type there is {found[1]}"
            raise ConfigError(f"{self._folder}: an adapter with DoRA or biases needs {own} in plain numbers: {what}")
        path, kind, shape, begin = found
        mapped = np.memmap(path, TYPES[kind][0], "r", begin, tuple(shape))
        step = max(1, PIECE_NUMBERS // int(np.prod(shape[1:], initial=1)))
        for first in range(0, shape[0], step):
            yield first, widened(np.array(mapped[first : first + step]), kind)

    @cached_property
    def _tensors(self) -> dict[str, tuple[Path, str, list[int], int]]:
        """Gives file, type, shape and first byte of the tensors of layers, by their names from the layer's on."""
        tensors = {}
        for path in weight_files(self._folder):
            if path.suffix != ".safetensors":
                continue
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size))
            for name, about in header.items():
                if _from_layer(name) and name != "__metadata__":
                    begin = 8 + size + about["data_offsets"][0]
                    for own in (name, self._in_models(name)):
                        tensors[_from_layer(own)] = (path, about["dtype"], about["shape"], begin)
        return tensors


def _from_layer(name: str) -> str:
    """Returns a tensor's name from the layer's on; "" where it is of no layer."""
    found = _FROM_LAYER.search(name)
    return found[1] if found is not None else ""
