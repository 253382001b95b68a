"""An index over the test's own Redis, and deadlines for tests whose subject is not time."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from lab.testbed.redis import RedisServer
from pillion.kvstore.index import index as index_module
from pillion.kvstore.index import redis_url, redis_writer, registry, shared_names
from pillion.kvstore.index.index import Index
from pillion.kvstore.index.redis_link import MIN_PATIENCE_MS

PATIENT_DEADLINE_MS = 30_000
# Twice the time that a silent server has before its breaker opens.
HASTY_DEADLINE_MS = 2 * MIN_PATIENCE_MS


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extend every deadline of a call to Redis: on a busy machine a sound Redis may take a second to answer."""
    monkeypatch.setattr(redis_url, "CONNECT_TIMEOUT_MS", PATIENT_DEADLINE_MS)
    lengthen_deadlines(monkeypatch)


def lengthen_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do as ``patient``, for a part of a test."""
    _set_deadlines(monkeypatch, PATIENT_DEADLINE_MS)


def shorten_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten deadlines for the part of a test in which Redis does not answer and every call times out."""
    _set_deadlines(monkeypatch, HASTY_DEADLINE_MS)


def _set_deadlines(monkeypatch: pytest.MonkeyPatch, deadline_ms: int) -> None:
    monkeypatch.setattr(index_module, "LOOKUP_DEADLINE_MS", deadline_ms)
    monkeypatch.setattr(registry, "REGISTRY_DEADLINE_MS", deadline_ms)
    monkeypatch.setattr(redis_writer, "ANNOUNCE_DEADLINE_MS", deadline_ms)
    monkeypatch.setattr(shared_names, "SHARE_DEADLINE_MS", deadline_ms)


@pytest.fixture
async def index(redis: RedisServer) -> AsyncIterator[Index]:
    made = Index(redis.url)
    yield made
    await made.aclose()
