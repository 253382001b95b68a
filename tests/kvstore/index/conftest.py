"""An index over the test's own Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from pillion.kvstore.index.index import Index
from testbed.redis import RedisServer


@pytest.fixture
async def index(redis: RedisServer) -> AsyncIterator[Index]:
    made = Index(redis.url)
    yield made
    await made.aclose()
