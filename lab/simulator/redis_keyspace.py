"""The keys of a simulated Redis, and the commands over them that Pillion's scripts use. Sans-IO.

Commands follow Redis's documentation; a property test compares them with a real Redis
(tests/lab/simulator/test_redis_model.py). Fields of a hash keep their insertion order, as in a real small one.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

# Limits of a small hash, which a real server returns whole from HSCAN (hash-max-ziplist-entries, ...-value).
SMALL_HASH_FIELDS = 512
SMALL_VALUE_BYTES = 64

WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"


class RedisRefusalError(Exception):
    """A server's error reply: its code and text."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class SimpleStatus(bytes):
    """A status reply such as OK, a table in Lua."""


class ScoredMembers(dict[bytes, float]):
    """Represents a sorted set: members with their scores."""

    def copy(self) -> ScoredMembers:
        return ScoredMembers(self)


RedisValue = bytes | dict[bytes, bytes] | ScoredMembers
# None, int, bytes, SimpleStatus, or a list of these.
RedisReply = Any
V = TypeVar("V", dict[bytes, bytes], ScoredMembers)


class RedisCommand(NamedTuple):
    """A command: its function, its least number of arguments, and whether it writes and may need memory."""

    run: Callable[..., RedisReply]
    arguments: int
    writes: bool = False
    grows: bool = False


class RedisKeyspace:
    """Values by key. ``now_us`` returns the server's clock, in microseconds since 1970."""

    def __init__(self, now_us: Callable[[], int]) -> None:
        self._now_us = now_us
        self._values: dict[bytes, RedisValue] = {}
        # Expiry of keys, in ms since 1970.
        self._until_ms: dict[bytes, int] = {}
        self.commands: dict[bytes, RedisCommand] = {
            b"PING": RedisCommand(lambda: SimpleStatus(b"PONG"), 0),
            b"TIME": RedisCommand(self._time, 0),
            b"TYPE": RedisCommand(self._type, 1),
            b"FLUSHALL": RedisCommand(self._flush_all, 0, writes=True),
            b"EXISTS": RedisCommand(self._exists, 1),
            b"DEL": RedisCommand(self._del, 1, writes=True),
            b"PEXPIRE": RedisCommand(self._pexpire, 2, writes=True),
            b"PEXPIREAT": RedisCommand(self._pexpireat, 2, writes=True),
            b"GET": RedisCommand(self._get, 1),
            b"SET": RedisCommand(self._set, 2, writes=True, grows=True),
            b"HGET": RedisCommand(self._hget, 2),
            b"HMGET": RedisCommand(self._hmget, 2),
            b"HSET": RedisCommand(self._hset, 3, writes=True, grows=True),
            b"HDEL": RedisCommand(self._hdel, 2, writes=True),
            b"HLEN": RedisCommand(self._hlen, 1),
            b"HEXISTS": RedisCommand(self._hexists, 2),
            b"HGETALL": RedisCommand(self._hgetall, 1),
            b"HSCAN": RedisCommand(self._hscan, 2),
            b"ZADD": RedisCommand(self._zadd, 3, writes=True, grows=True),
            b"ZREM": RedisCommand(self._zrem, 2, writes=True),
            b"ZRANGEBYSCORE": RedisCommand(self._zrangebyscore, 3),
        }

    def run(self, name: bytes, arguments: Sequence[bytes]) -> RedisReply:
        """Run a known command. Raises RedisRefusalError."""
        command = self.commands[name]
        if len(arguments) < command.arguments:
            raise RedisRefusalError(f"ERR wrong number of arguments for '{name.decode().lower()}' command")
        return command.run(*arguments)

    def dump(self) -> dict[bytes, RedisValue]:
        """Return copies of all values by key."""
        alive = ((key, self._find(key)) for key in list(self._values))
        return {key: value if isinstance(value, bytes) else value.copy() for key, value in alive if value is not None}

    def copy(self, now_us: Callable[[], int]) -> RedisKeyspace:
        """Return a copy with another clock."""
        other = RedisKeyspace(now_us)
        other._values, other._until_ms = self.dump(), self.expiries()
        return other

    def expiries(self) -> dict[bytes, int]:
        """Return the expiry of keys that have one, in ms since 1970."""
        return {key: until for key, until in self._until_ms.items() if self._find(key) is not None}

    def check_integrity(self) -> None:
        """Raise AssertionError for an empty value or an expiry without a key."""
        assert all(value or isinstance(value, bytes) for value in self._values.values()), "an empty hash or sorted set"
        assert self._until_ms.keys() <= self._values.keys(), "a time to live without its key"

    def _find(self, key: bytes) -> RedisValue | None:
        if key in self._until_ms and self._until_ms[key] * 1000 <= self._now_us():
            self._drop(key)
        return self._values.get(key)

    def _drop(self, key: bytes) -> None:
        self._values.pop(key, None)
        self._until_ms.pop(key, None)

    def _read(self, key: bytes, kind: type[V]) -> V:
        """Return a key's value, an empty one by default. Raises RedisRefusalError for another type."""
        value = self._find(key)
        if value is None:
            return kind()
        if type(value) is not kind:
            raise RedisRefusalError(WRONG_TYPE)
        return value

    def _change(self, key: bytes, kind: type[V]) -> V:
        """Return a key's value as :meth:`_read` does, storing an empty one, to which the caller adds."""
        value = self._read(key, kind)
        self._values[key] = value
        return value

    def _remove(self, key: bytes, kind: type[V], members: Sequence[bytes]) -> int:
        value = self._read(key, kind)
        removed = sum(value.pop(member, None) is not None for member in members)
        if not value:
            self._drop(key)
        return removed

    def _time(self) -> list[bytes]:
        seconds, micros = divmod(self._now_us(), 1_000_000)
        return [b"%d" % seconds, b"%d" % micros]

    def _type(self, key: bytes) -> SimpleStatus:
        names = {type(None): b"none", bytes: b"string", dict: b"hash", ScoredMembers: b"zset"}
        return SimpleStatus(names[type(self._find(key))])

    def _flush_all(self) -> SimpleStatus:
        self._values, self._until_ms = {}, {}
        return SimpleStatus(b"OK")

    def _exists(self, *keys: bytes) -> int:
        return sum(self._find(key) is not None for key in keys)

    def _del(self, *keys: bytes) -> int:
        found = [key for key in dict.fromkeys(keys) if self._find(key) is not None]
        for key in found:
            self._drop(key)
        return len(found)

    def _pexpire(self, key: bytes, milliseconds: bytes) -> int:
        return self._expire_at(key, self._now_us() // 1000 + _integer(milliseconds))

    def _pexpireat(self, key: bytes, milliseconds: bytes) -> int:
        return self._expire_at(key, _integer(milliseconds))

    def _expire_at(self, key: bytes, until_ms: int) -> int:
        if self._find(key) is None:
            return 0
        self._until_ms[key] = until_ms
        self._find(key)
        return 1

    def _get(self, key: bytes) -> bytes | None:
        value = self._find(key)
        if value is not None and not isinstance(value, bytes):
            raise RedisRefusalError(WRONG_TYPE)
        return value

    def _set(self, key: bytes, value: bytes, *options: bytes) -> SimpleStatus | None:
        if [option.upper() for option in options] not in ([], [b"NX"]):
            raise RedisRefusalError("ERR syntax error")
        if options and self._find(key) is not None:
            return None
        self._drop(key)
        self._values[key] = value
        return SimpleStatus(b"OK")

    def _hget(self, key: bytes, field: bytes) -> bytes | None:
        return self._read(key, dict).get(field)

    def _hmget(self, key: bytes, *fields: bytes) -> list[bytes | None]:
        value = self._read(key, dict)
        return [value.get(field) for field in fields]

    def _hset(self, key: bytes, *words: bytes) -> int:
        if len(words) % 2:
            raise RedisRefusalError("ERR wrong number of arguments for HSET")
        value = self._change(key, dict)
        before = len(value)
        value.update(zip(words[::2], words[1::2], strict=True))
        return len(value) - before

    def _hdel(self, key: bytes, *fields: bytes) -> int:
        return self._remove(key, dict, fields)

    def _hlen(self, key: bytes) -> int:
        return len(self._read(key, dict))

    def _hexists(self, key: bytes, field: bytes) -> int:
        return int(field in self._read(key, dict))

    def _hgetall(self, key: bytes) -> list[bytes]:
        return [word for row in self._read(key, dict).items() for word in row]

    def _hscan(self, key: bytes, cursor: bytes, *options: bytes) -> list[RedisReply]:
        """Walk a large hash in the order of its fields' checksums, so that fields that remain are returned exactly
        once."""
        count = 10
        if options:
            if len(options) != 2 or options[0].upper() != b"COUNT":
                raise RedisRefusalError("ERR syntax error")
            count = _integer(options[1])
        at, value = _integer(cursor), self._read(key, dict)
        rows = [(0, field) for field in value]
        if len(value) > SMALL_HASH_FIELDS or any(
            len(word) > SMALL_VALUE_BYTES for row in value.items() for word in row
        ):
            rows = sorted((zlib.crc32(field), field) for field in value)
            rows = [row for row in rows if row[0] >= at]
            # Fields of one checksum go into one answer.
            end = next((i for i in range(count, len(rows)) if rows[i][0] != rows[i - 1][0]), len(rows))
            left, rows = rows[end:], rows[:end]
            cursor = b"%d" % left[0][0] if left else b"0"
        else:
            cursor = b"0"
        return [cursor, [word for _, field in rows for word in (field, value[field])]]

    def _zadd(self, key: bytes, *words: bytes) -> int:
        greater = words[0].upper() == b"GT"
        pairs = words[1:] if greater else words
        if not pairs or len(pairs) % 2:
            raise RedisRefusalError("ERR syntax error")
        scored = [(_score(score), member) for score, member in zip(pairs[::2], pairs[1::2], strict=True)]
        members = self._change(key, ScoredMembers)
        before = len(members)
        for score, member in scored:
            if not greater or score > members.get(member, -math.inf):
                members[member] = score
        return len(members) - before

    def _zrem(self, key: bytes, *members: bytes) -> int:
        return self._remove(key, ScoredMembers, members)

    def _zrangebyscore(self, key: bytes, least: bytes, most: bytes, *options: bytes) -> list[bytes]:
        low, above = _bound(least)
        high, below = _bound(most)
        found = [
            (score, member)
            for score, member in _ordered(self._read(key, ScoredMembers))
            if (score > low if above else score >= low) and (score < high if below else score <= high)
        ]
        if options:
            if len(options) != 3 or options[0].upper() != b"LIMIT":
                raise RedisRefusalError("ERR syntax error")
            first, count = _integer(options[1]), _integer(options[2])
            found = found[first:] if count < 0 else found[first : first + count]
        return [member for _, member in found]


def _ordered(members: ScoredMembers) -> Iterator[tuple[float, bytes]]:
    return iter(sorted((score, member) for member, score in members.items()))


def _bound(text: bytes) -> tuple[float, bool]:
    """Parse a bound of a range of scores; return the score, and whether the bound is exclusive."""
    return (_score(text[1:]), True) if text.startswith(b"(") else (_score(text), False)


def _score(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        raise RedisRefusalError("ERR value is not a valid float") from None


def _integer(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise RedisRefusalError("ERR value is not an integer or out of range") from None
