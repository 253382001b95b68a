"""Reads adapters for the fake model, in the process that reads adapters. Imports no torch."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import numpy as np

from pillion.engine.adapters.adapter_files import AdapterFiles
from pillion.engine.adapters.adapter_forms import Bytes
from pillion.engine.adapters.adapter_reader import AdapterReader
from pillion.errors import ConfigError


class FakeAdapterReader(AdapterReader):
    """Its adapters are nothing but their digests. The answer tells the niceness of the process that gave it."""

    def packed(self, folder: pathlib.Path, digest: str) -> tuple[list[Any], Bytes]:
        if AdapterFiles(folder).digest() != digest:
            raise ConfigError(f"{folder} does not hold the adapter {digest}")
        return [os.getpid(), os.getpriority(os.PRIO_PROCESS, 0)], np.zeros(0, np.uint8)
