"""A disk that hangs: whoever opens one of its files waits in the kernel, as on a network file system that is away."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path


@contextlib.contextmanager
def stalled(files: Iterable[Path]) -> Iterator[None]:
    """Puts a FIFO without a writer in the place of each file, until this ends."""
    away = {file: file.with_suffix(".away") for file in files}
    for file, kept in away.items():
        file.rename(kept)
        os.mkfifo(file)
    try:
        yield
    finally:
        for file, kept in away.items():
            # A writer lets the readers go, who find that this is no block.
            writer = os.open(file, os.O_RDWR | os.O_NONBLOCK)
            kept.rename(file)
            os.close(writer)
