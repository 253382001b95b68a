"""Fixtures of the KV store's tests."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator

import pytest

from lab.testbed.conditions import WITHIN_S
from lab.testbed.redis import RedisServer, running_redis


@pytest.fixture(autouse=True)
def patient_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes wait for each other and for workers on a machine that stands still for seconds, but where a test says
    otherwise."""
    for place in ("pool_survival.surviving_pool.PATIENCE_S", "exchange.peers.STREAM_STALL_S"):
        # A room that is gone has no bound.
        with contextlib.suppress(ImportError):
            monkeypatch.setattr(f"pillion.kvstore.{place}", WITHIN_S / 2)


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture
def short_folder() -> Iterator[str]:
    """Yield a folder with a short path, because a Unix socket's path may have about a hundred bytes."""
    with tempfile.TemporaryDirectory(prefix="pillion-") as folder:
        yield folder
