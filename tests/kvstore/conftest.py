"""Fixtures of the KV store's tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest

from testbed.redis import RedisServer, running_redis


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture
def short_folder() -> Iterator[str]:
    """Yield a folder with a short path, because a Unix socket's path may have about a hundred bytes."""
    with tempfile.TemporaryDirectory(prefix="pillion-") as folder:
        yield folder
