"""The model of Redis against a real one: the same scripts and arguments, then the same replies and data.

Both see one clock. The real server's scripts are prefixed with lines that answer TIME with the simulated time and
record what PEXPIRE would do, since a real key cannot expire at a simulated time.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import redis as client
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.simulator.redis_keyspace import RedisRefusalError, RedisReply, RedisValue, ScoredMembers
from lab.simulator.redis_model import BEGIN_US, WRITE_REFUSALS, RedisModel, RedisWord
from lab.testbed.redis import RedisServer, running_redis
from lab.testbed.redis_kinds import running_pair
from pillion.kvstore.index import redis_keys as keys
from pillion.kvstore.index.redis_link import script_text
from pillion.kvstore.index.registry import REGISTRY_KEYS
from tests.support.examples import examples
from tests.support.redis_nodes import Chain

EXPIRIES = b"test:expiries"
PRELUDE = """
local real = redis
local redis = {pcall = real.pcall}
function redis.call(name, ...)
  if name == 'TIME' then
    return {'%d', '%d'}
  elseif name == 'PEXPIRE' then
    local key, wait = ...
    -- As PEXPIRE, this is refused by a replica, but not where memory is full; what follows it is not refused then.
    real.call('HDEL', '%s', key)
    real.call('HSET', '%s', key, string.format('%%.0f', %d + wait))
    return real.call('EXISTS', key)
  end
  return real.call(name, ...)
end
"""
# All keys with their types and values.
DUMP = """
local answer = {}
for _, key in ipairs(redis.call('KEYS', '*')) do
  local kind = redis.call('TYPE', key).ok
  local value = kind == 'hash' and redis.call('HGETALL', key) or kind == 'string' and redis.call('GET', key)
  answer[#answer + 1] = {key, kind, value or redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')}
end
return answer
"""
CODES = re.compile("READONLY|OOM|MISCONF|WRONGTYPE|NOSCRIPT")
LAG_S = 1.0

CHAIN = Chain(range(70))
FORK = Chain([*range(40), *range(1000, 1030)])
COMPONENTS = ("a", "b", "worker-1", "worker-2")
ENTRIES = [struct.pack(">II", number, boot) for number, boot in ((1, 7), (1, 8), (2, 7), (3, 1))]
GENERATION = keys.generation(b"")
BUCKETS = [GENERATION, *{CHAIN.bucket(0), CHAIN.bucket(40), FORK.bucket(40)}]
LOADS = [keys.load_key("g1"), keys.load_key("g2")]
OWNERS = [keys.buckets_key("o1"), keys.buckets_key("o2")]

Step = tuple[Any, ...]


class Both:
    """The model and a real server. Both run every step, and are compared."""

    def __init__(self, real: client.Redis) -> None:
        self.real = real
        self.now_s = 0.0
        self.model = RedisModel(lambda: self.now_s, LAG_S)
        real.execute_command("FLUSHALL")
        real.execute_command("SCRIPT FLUSH")

    def script(self, name: str, names: list[bytes], *args: RedisWord) -> None:
        """Run a script by the name of its file."""
        text, now_ms = script_text(name), self.now_ms()
        prelude = PRELUDE % (now_ms // 1000, now_ms % 1000 * 1000, EXPIRIES.decode(), EXPIRIES.decode(), now_ms)
        found = _real(self.real, "EVAL", prelude.encode() + text, len(names), *names, *args)
        assert _model(self.model, "EVAL", text, len(names), *names, *args) == found

    def command(self, *words: RedisWord) -> None:
        """Run a command of another client."""
        assert _model(self.model, *words) == _real(self.real, *words)

    def wait(self, milliseconds: int) -> None:
        """Advance the clock."""
        self.now_s += milliseconds / 1000
        for key, until_ms in self.real.hgetall(EXPIRIES).items():
            if int(until_ms) <= self.now_ms():
                self.real.execute_command("DEL", key)
                self.real.execute_command("HDEL", EXPIRIES, key)

    def now_ms(self) -> int:
        return (BEGIN_US + round(self.now_s * 1e6)) // 1000

    def check(self) -> None:
        """Compare all data, including the order of fields."""
        self.model.check_integrity()
        found = _dump(self.real)
        until_ms = found.pop(EXPIRIES, {})
        assert isinstance(until_ms, dict)
        assert self.model.dump() == found
        for key, value in self.model.dump().items():
            if type(value) is dict:
                assert list(value) == list(found[key]), "another order"
        assert self.model.expiries() == {key: int(until) for key, until in until_ms.items() if key in found}
        # A missing key has no expiry once it is made again.
        if gone := until_ms.keys() - found.keys():
            self.real.execute_command("HDEL", EXPIRIES, *gone)

    def play(self, steps: list[Step]) -> None:
        for step in steps:
            what, *rest = step
            getattr(self, what)(*rest)
            self.check()


def _real(real: client.Redis, *words: RedisWord) -> RedisReply:
    try:
        answer = real.execute_command(*words)
        # redis-py returns True for OK.
        return b"OK" if answer is True else answer
    except client.ResponseError as error:
        return _code(f"{type(error).__name__} {error}")


def _model(model: RedisModel, *words: RedisWord) -> RedisReply:
    try:
        return model.execute(*words)
    except RedisRefusalError as refusal:
        return _code(refusal.message)


def _code(message: str) -> str:
    """Return the kind of a refusal, since texts differ between releases."""
    message = message.replace("ReadOnlyError", "READONLY").replace("OutOfMemoryError", "OOM")
    found = CODES.search(message.replace("NoScriptError", "NOSCRIPT"))
    return "refused: " + (found.group() if found else message)


def _dump(real: client.Redis) -> dict[bytes, RedisValue]:
    return {key: _value(kind, raw) for key, kind, raw in real.execute_command("EVAL", DUMP, 0)}


def _value(kind: bytes, raw: Any) -> RedisValue:
    if kind == b"string":
        return bytes(raw)
    rows = dict(zip(raw[::2], raw[1::2], strict=True))
    return rows if kind == b"hash" else ScoredMembers({member: float(score) for member, score in rows.items()})


def _announce(entry: bytes, most: int, blocks: Chain, first: int, came: int, went: int) -> Step:
    """Announce ``came`` blocks from ``first`` on as added, then ``went`` as removed."""
    middle, end = min(first + came, len(blocks)), min(first + came + went, len(blocks))
    events = blocks.events(first, middle) + blocks.events(middle, end, here=False)
    updates = keys.updates_by_group(events, cluster=False).get(b"", {})
    args = [word for one in updates.values() for word in (bytes(one.arrived), bytes(one.evicted))]
    return "script", "announce", [GENERATION, *updates], entry, b"fresh-%d" % most, most, *args


def _lookup(blocks: Chain, count: int, limit: int) -> Step:
    packed = blocks.head(count)
    return "script", "lookup", keys.chain_buckets(packed), keys.chain_fields(packed), 32, limit


def _registry(name: str, *args: RedisWord) -> Step:
    return "script", name, list(REGISTRY_KEYS), *args


places, few = st.integers(0, 69), st.integers(0, 4)
quota = st.tuples(st.sampled_from([0, 3, 60]), st.integers(-2, 4), st.integers(-1, 80)).map(list)
shared = st.tuples(st.sampled_from(["x", "y", "z"]), st.integers(0, 9), st.sampled_from(["", "v", "w"])).map(list)
scripts = st.one_of(
    st.builds(
        lambda name, load, ttl, node, limit: _registry(
            "heartbeat", name, f"{{{load}}}", ttl, node if len(name) == 1 else b"", limit
        ),
        st.sampled_from(COMPONENTS),
        few,
        st.sampled_from([500, 5000]),
        st.sampled_from([b"\0\0\0\7", b"\0\0\0\b"]),
        st.sampled_from([1, 100]),
    ),
    st.builds(lambda name: _registry("leave", name), st.sampled_from(COMPONENTS)),
    st.builds(lambda ms: _registry("components", ms), st.sampled_from([0, BEGIN_US // 1000, BEGIN_US // 1000 + 400])),
    st.just(_registry("nodes")),
    st.builds(
        lambda ttl, record: ("script", "prefix_pins", [keys.prefix_pins_key("n")], ttl, record),
        st.sampled_from([0, 500]),
        st.sampled_from([b"", b"r"]),
    ),
    st.builds(
        _announce,
        st.sampled_from(ENTRIES),
        st.sampled_from([1, 2, 32]),
        st.sampled_from([CHAIN, FORK]),
        places,
        places,
        places,
    ),
    st.builds(_lookup, st.sampled_from([CHAIN, FORK]), st.integers(1, 70), st.sampled_from([1, 64])),
    st.builds(
        lambda void, budget: ("script", "sweep", BUCKETS, b"swept", b"".join(void), b"0", budget),
        st.lists(st.sampled_from(ENTRIES), max_size=2),
        st.sampled_from([1, 40, 512]),
    ),
    st.builds(
        lambda owner, wanted: ("script", "take_tokens", [owner], *chain.from_iterable(wanted)),
        st.sampled_from(OWNERS),
        st.lists(quota, max_size=3),
    ),
    st.builds(
        lambda most, age, rows: ("script", "share_names", [keys.ADAPTERS], b"", most, age, *chain.from_iterable(rows)),
        st.sampled_from([1, 2, 9]),
        st.sampled_from([100, BEGIN_US]),
        st.lists(shared, max_size=3),
    ),
    st.builds(
        lambda name, whole, rows: ("script", "tell_load", [name], 6000, whole, *chain.from_iterable(rows)),
        st.sampled_from(LOADS),
        st.integers(0, 1),
        st.lists(
            st.tuples(
                st.sampled_from(["w", "x"]),
                st.sampled_from([b"", b"\0\0\0\1\0\0\0\x20", b"\xff\xff\xff\xff\0\0\0\0", b"odd"]),
            ),
            max_size=3,
        ),
    ),
    st.just(("script", "read_loads", LOADS, "w\nx\ny")),
)
stranger = st.one_of(
    st.sampled_from([("command", "SCRIPT", "FLUSH"), ("command", "FLUSHALL")]),
    st.builds(
        lambda key, words: ("command", words[0], key, *words[1:]),
        st.sampled_from([*REGISTRY_KEYS, *BUCKETS, *OWNERS, *LOADS, keys.ADAPTERS]),
        st.sampled_from([("DEL",), ("HSET", "x", "y"), ("ZADD", "3", "x"), ("SET", "x", "NX"), ("HGET", "x")]),
    ),
)
waits = st.builds(lambda ms: ("wait", ms), st.sampled_from([1, 200, 300, 1000, 4999, 60_000]))
steps = st.lists(st.one_of(scripts, scripts, scripts, waits, stranger), max_size=15)
during = st.lists(scripts, min_size=1, max_size=6)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with running_redis() as made:
        yield made


@pytest.fixture(scope="module")
def real(server: RedisServer) -> Iterator[client.Redis]:
    with client.Redis(unix_socket_path=str(server.socket)) as made:
        yield made


@settings(max_examples=examples(100))
@given(steps=steps)
def test_replies_and_data_match_a_real_redis(real: client.Redis, steps: list[Step]) -> None:
    Both(real).play(steps)


@pytest.mark.parametrize("why", WRITE_REFUSALS)
@settings(max_examples=examples(15))
@given(before=steps, refused=during, after=during)
def test_refusals_match_a_real_redis(
    server: RedisServer, real: client.Redis, why: str, before: list[Step], refused: list[Step], after: list[Step]
) -> None:
    both = Both(real)
    both.play(before)
    with server.refusing(why):
        both.model.refusing = why
        both.play(refused)
    both.model.refusing = ""
    both.play(after)


def test_failover_matches_a_real_replica() -> None:
    """It has the writes older than its lag."""
    with (
        running_pair() as (master, replica),
        client.Redis(port=master.port) as old,
        client.Redis(port=replica.port) as new,
    ):

        @settings(max_examples=examples(10))
        @given(before=steps, lost=during, after=during)
        def take_over(before: list[Step], lost: list[Step], after: list[Step]) -> None:
            new.execute_command("REPLICAOF", "127.0.0.1", master.port)
            both = Both(old)
            both.play(before)
            both.wait(int(LAG_S * 1000))
            old.execute_command("WAIT", 1, 0)
            new.execute_command("REPLICAOF", "NO", "ONE")
            both.play(lost)
            both.model.fail_over()
            both.real = new
            both.check()
            both.play(after)

        take_over()


def test_a_large_hash_is_walked_to_its_end(real: client.Redis) -> None:
    """A sweep in pieces over a bucket that is no longer packed: cursors differ, visited and remaining fields do not."""
    long = Chain(range(2000))
    both, bucket = Both(real), keys.bucket(b"\0" * 32)
    fields = [block[: keys.FIELD_BYTES] for block in long.hashes]
    for entry, some in ((ENTRIES[0], fields), (ENTRIES[2], fields[::3])):
        both.script("announce", [GENERATION, bucket], entry, b"fresh", 32, b"".join(some), b"")
    sweep = script_text("sweep")
    for void in (b"", ENTRIES[0]):
        for ask in (real.execute_command, both.model.execute):
            cursor, seen, visits = b"0", set(), 0
            while visits == 0 or cursor != b"0":
                _, done, cursor, packed = ask("EVAL", sweep, 2, GENERATION, bucket, b"fresh", void, cursor, 100)
                seen |= {packed[at : at + 8] for at in range(0, len(packed), 8)}
                visits += 1
                assert done == (cursor == b"0")
            assert seen == ({ENTRIES[0], ENTRIES[2]} if not void else {ENTRIES[2]})
            assert visits > 5
        assert both.model.dump() == _dump(real)
