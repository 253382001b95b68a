"""An index over the test's own Redis, and deadlines for tests whose subject is not time."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from pillion.kvstore.index import index as index_module
from pillion.kvstore.index import redis_writer, registry
from pillion.kvstore.index.index import Index
from testbed.redis import RedisServer

PATIENT_DEADLINE_MS = 30_000


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengthens every deadline of a call to Redis: on a busy machine a sound Redis may take a second to answer."""
    lengthen_deadlines(monkeypatch)


def lengthen_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``patient`` does, for a part of a test."""
    monkeypatch.setattr(index_module, "LOOKUP_DEADLINE_MS", PATIENT_DEADLINE_MS)
    monkeypatch.setattr(registry, "REGISTRY_DEADLINE_MS", PATIENT_DEADLINE_MS)
    monkeypatch.setattr(redis_writer, "ANNOUNCE_DEADLINE_MS", PATIENT_DEADLINE_MS)


@pytest.fixture
async def index(redis: RedisServer) -> AsyncIterator[Index]:
    made = Index(redis.url)
    yield made
    await made.aclose()
