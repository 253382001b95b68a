"""Fixtures of the supervisor's tests."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture
def folder() -> Iterator[pathlib.Path]:
    """A folder with a short path: pytest's are too long for a Unix socket's path on some systems."""
    with tempfile.TemporaryDirectory(prefix="pil-") as path:
        yield pathlib.Path(path)
