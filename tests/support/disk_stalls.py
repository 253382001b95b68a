"""A hanging disk: opening one of its files blocks in the kernel, as on an unreachable network file system."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path


@contextlib.contextmanager
def stalled(files: Iterable[Path]) -> Iterator[None]:
    """Replace each file by a FIFO without a writer until this ends."""
    away = {file: file.with_suffix(".away") for file in files}
    for file, kept in away.items():
        file.rename(kept)
        os.mkfifo(file)
    try:
        yield
    finally:
        for file, kept in away.items():
            # A writer unblocks the readers, which then find an invalid block.
            writer = os.open(file, os.O_RDWR | os.O_NONBLOCK)
            kept.rename(file)
            os.close(writer)
