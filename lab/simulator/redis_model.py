"""A simulated Redis as far as Pillion uses it, on a given clock. Sans-IO: it answers at once.

    execute(words) --a command------------------------------> RedisKeyspace
                   '-EVAL, EVALSHA--> Lua --commands----------^    |
                                                                   '--writes, lag_s later--> the replica's RedisKeyspace

    well --refusing = "replica", "full", "unsaved"--> answers reads, refuses writes --refusing = ""--> well
    well --empty--> well, without data     well --restart--> well, without data and scripts
    well --fail_over--> well, with the replica's data, and without scripts

The path to it (slow, silent, gone) is the client's: redis_client.py. tests/lab/simulator/test_redis_model.py runs the
same commands on the model and a real Redis, and compares replies and data.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from lab.simulator.redis_keyspace import RedisKeyspace, RedisRefusalError, RedisReply, RedisValue, SimpleStatus
from lab.simulator.redis_lua import run_script

# Wall time at 0 of the simulated clock. Pillion's scripts compare times as text of 13 digits.
BEGIN_US: Final = 1_700_000_000_000_000

# Reply to writes, by reason for refusing them.
WRITE_REFUSALS: Final = {
    "replica": "READONLY You can't write against a read only replica.",
    "full": "OOM command not allowed when used memory > 'maxmemory'.",
    "unsaved": "MISCONF Redis is configured to save RDB snapshots, but it is currently not able to persist on disk.",
}
NO_SCRIPT: Final = "NOSCRIPT No matching script. Please use EVAL."

RedisWord = bytes | str | int | float


class RedisModel:
    """One server, or a master with the replica that takes over from it.

    Args:
        now_s: returns the simulated time in seconds; monotonic.
        lag_s: replication lag; None without a replica.

    Attributes:
        refusing: reason for refusing writes, a key of WRITE_REFUSALS, or "".
    """

    def __init__(self, now_s: Callable[[], float], lag_s: float | None = None) -> None:
        self.refusing = ""
        self._now_s = now_s
        self._keys = RedisKeyspace(self._now_us)
        # By the digest that EVALSHA names.
        self._texts: dict[bytes, bytes] = {}
        # True if the running script has written: a full Redis refuses only a script's first write.
        self._wrote = False
        self._lag_us = None if lag_s is None else round(lag_s * 1e6)
        # Writes that the replica lacks, and the time of its last write.
        self._feed: deque[tuple[int, bytes, list[bytes]]] = deque()
        self._fed_us = BEGIN_US
        self._replica = RedisKeyspace(lambda: self._fed_us)

    def execute(self, *words: RedisWord) -> RedisReply:
        """Run a command and return a client's reply: None, int, bytes, SimpleStatus, or a list of these. Raises
        RedisRefusalError."""
        name, *arguments = [_as_word(word) for word in words]
        name = name.upper()
        self._wrote = False
        if name in (b"EVAL", b"EVALSHA"):
            return self._run_script(name, arguments)
        if name == b"SCRIPT":
            return self._forget_scripts(arguments)
        return self._command(name, arguments)

    def empty(self) -> None:
        """Lose all data and keep scripts, as after FLUSHALL."""
        self._keys, self._replica = RedisKeyspace(self._now_us), RedisKeyspace(lambda: self._fed_us)
        self._feed.clear()

    def restart(self) -> None:
        """Lose all data and scripts, and stop refusing writes: a new process without data on disk."""
        self.empty()
        self._forget_scripts([b"FLUSH"])
        self.refusing = ""

    def fail_over(self) -> None:
        """Promote the replica with what it has: writes of the last ``lag_s`` seconds are lost. It has no scripts,
        though a real one may have copied some. A new replica starts as its copy. Raises AssertionError without
        one."""
        assert self._lag_us is not None, "there is no replica"
        self._replicate()
        self._feed.clear()
        self._keys = self._replica.copy(self._now_us)
        self._replica = self._keys.copy(lambda: self._fed_us)
        self._forget_scripts([b"FLUSH"])
        self.refusing = ""

    def dump(self) -> dict[bytes, RedisValue]:
        """Return a copy of all data by key."""
        return self._keys.dump()

    def expiries(self) -> dict[bytes, int]:
        """Return the expiry of keys that have one, in ms since 1970."""
        return self._keys.expiries()

    def check_integrity(self) -> None:
        """Raise AssertionError on data that no Redis can have."""
        self._keys.check_integrity()
        self._replica.check_integrity()
        assert self._lag_us is not None or not self._feed, "writes wait for a replica that is not there"

    def _now_us(self) -> int:
        return BEGIN_US + round(self._now_s() * 1e6)

    def _run_script(self, name: bytes, arguments: list[bytes]) -> RedisReply:
        script, count, *words = arguments
        if name == b"EVAL":
            sha = hashlib.sha1(script, usedforsecurity=False).hexdigest().encode()
            self._texts[sha] = script
        else:
            sha = script.lower()
        if sha not in self._texts:
            raise RedisRefusalError(NO_SCRIPT)
        try:
            return run_script(self._command, self._texts[sha], words[: int(count)], words[int(count) :])
        except RedisRefusalError as refusal:
            where = f"Error running script (call to f_{sha.decode()}): @user_script: -"
            raise RedisRefusalError(f"ERR {where}{refusal.message}") from None

    def _forget_scripts(self, arguments: Sequence[bytes]) -> SimpleStatus:
        if [word.upper() for word in arguments] != [b"FLUSH"]:
            raise RedisRefusalError("ERR the model knows SCRIPT FLUSH only")
        self._texts.clear()
        return SimpleStatus(b"OK")

    def _command(self, name: bytes, arguments: list[bytes]) -> RedisReply:
        """Run a command of a client or of a script."""
        keys = self._keys
        command = keys.commands.get(name) or keys.commands.get(name := name.upper())
        if command is None:
            raise RedisRefusalError(f"ERR unknown command `{name.decode(errors='replace')}`")
        if command.writes:
            if self.refusing and (self.refusing != "full" or (command.grows and not self._wrote)):
                raise RedisRefusalError(WRITE_REFUSALS[self.refusing])
            self._wrote = True
            if self._lag_us is not None:
                self._record(name, arguments)
        return keys.run(name, arguments)

    def _record(self, name: bytes, arguments: list[bytes]) -> None:
        """Send a write to the replica, with its time; keys expire on both servers at once."""
        now_us = self._now_us()
        if name == b"PEXPIRE":
            name, arguments = b"PEXPIREAT", [arguments[0], b"%d" % (now_us // 1000 + int(arguments[1]))]
        self._feed.append((now_us, name, arguments))
        self._replicate()

    def _replicate(self) -> None:
        """Apply the writes to the replica that are old enough."""
        assert self._lag_us is not None
        until_us = self._now_us() - self._lag_us
        while self._feed and self._feed[0][0] <= until_us:
            self._fed_us, name, arguments = self._feed.popleft()
            try:
                self._replica.run(name, arguments)
            except RedisRefusalError:
                # The master refused it for the same reason.
                continue


def _as_word(word: RedisWord) -> bytes:
    if isinstance(word, bytes):
        return word
    return word.encode() if isinstance(word, str) else repr(word).encode()
