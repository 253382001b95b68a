"""Names that several processes share in a real Redis."""

from __future__ import annotations

import pytest

from lab.testbed.redis import RedisServer
from pillion.kvstore.index.shared_names import SharedNames, StampedValue

DAY_MS = 24 * 3600 * 1000

pytestmark = pytest.mark.usefixtures("patient")


async def test_stale_names_are_dropped_first(redis: RedisServer) -> None:
    names = SharedNames(redis.url, 3, DAY_MS)
    now = 2**43  # Later than any clock says, so that nothing is forgotten by its age.
    full = [("a", StampedValue(now, b"A")), ("b", StampedValue(now + 2, b"")), ("c", StampedValue(now + 1, b""))]
    await names.share(b"", full)
    found = await names.share(b"", [("d", StampedValue(now + 3, b"D"))])
    assert found.values is not None
    assert found.values.keys() == {"a", "b", "d"}
    # What is empty itself takes no other name's place, and what means something is never taken away.
    found = await names.share(b"", [("e", StampedValue(now + 4, b"")), ("f", StampedValue(now + 4, b"F"))])
    found = await names.share(b"", [("g", StampedValue(now + 5, b"G"))])
    assert found.values is not None
    assert found.values.keys() == {"a", "d", "f"}
    await names.aclose()


@pytest.mark.parametrize(("less", "greater"), [(b"B", b"a"), (b"a", b"ab"), (b"a\x00b", b"a\x00c"), (b"z", b"\xff")])
async def test_the_greater_value_wins_at_equal_stamps(less: bytes, greater: bytes, redis: RedisServer) -> None:
    names = SharedNames(redis.url, 9, DAY_MS)
    for name, first, second in (("up", less, greater), ("down", greater, less)):
        await names.share(b"", [(name, StampedValue(10, first))])
        found = await names.share(b"", [(name, StampedValue(10, second))])
        assert found.values is not None
        assert found.values[name] == StampedValue(10, greater)
    await names.aclose()
