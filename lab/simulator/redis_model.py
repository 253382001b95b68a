"""Simulates a Redis as far as Pillion uses it, on a clock that the caller provides. Sans-IO: it answers in the moment
in which it is asked.

    execute(words) --a command------------------------------> RedisKeyspace
                   '-EVAL, EVALSHA--> Lua --commands----------^    |
                                                                   '--writes, lag_s later--> the replica's RedisKeyspace

    well --refusing = "replica", "full", "unsaved"--> answers questions, refuses writes --refusing = ""--> well
    well --empty--> well, without data     well --restart--> well, without data and scripts
    well --fail_over--> well, with what the replica had by then, and without scripts

The way to it (slow, silent, gone) is its client's: redis_client.py. tests/lab/simulator/test_redis_model.py asks the
model and a real Redis the same, and compares answers and data.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from lab.simulator.redis_keyspace import RedisKeyspace, RedisRefusalError, RedisReply, RedisValue, SimpleStatus
from lab.simulator.redis_lua import run_script

# This is the time of day at 0 of the simulated clock. Pillion's scripts compare times as texts of 13 digits.
BEGIN_US: Final = 1_700_000_000_000_000

# A server that refuses writes for one of these reasons answers them with these words.
WRITE_REFUSALS: Final = {
    "replica": "READONLY You can't write against a read only replica.",
    "full": "OOM command not allowed when used memory > 'maxmemory'.",
    "unsaved": "MISCONF Redis is configured to save RDB snapshots, but it is currently not able to persist on disk.",
}
NO_SCRIPT: Final = "NOSCRIPT No matching script. Please use EVAL."

RedisWord = bytes | str | int | float


class RedisModel:
    """Represents one server, or a master with the replica that takes over from it.

    Args:
        now_s: returns the simulated time, in seconds; it never goes back.
        lag_s: how far its replica is behind; None where it has none.

    Attributes:
        refusing: why it refuses writes, a key of WRITE_REFUSALS; "" where it takes them.
    """

    def __init__(self, now_s: Callable[[], float], lag_s: float | None = None) -> None:
        self.refusing = ""
        self._now_s = now_s
        self._keys = RedisKeyspace(self._now_us)
        # Scripts are kept by the digest under which EVALSHA asks for them.
        self._texts: dict[bytes, bytes] = {}
        # This says whether the script that runs has written anything, because a full Redis refuses only a script's
        # first write.
        self._wrote = False
        self._lag_us = None if lag_s is None else round(lag_s * 1e6)
        # The first are the writes that the replica does not have yet; the second is the time of the last write that it
        # has.
        self._feed: deque[tuple[int, bytes, list[bytes]]] = deque()
        self._fed_us = BEGIN_US
        self._replica = RedisKeyspace(lambda: self._fed_us)

    def execute(self, *words: RedisWord) -> RedisReply:
        """Runs a command and returns what a client would read: None, int, bytes, SimpleStatus, or a list of these.
        Raises RedisRefusalError."""
        name, *arguments = [_as_word(word) for word in words]
        name = name.upper()
        self._wrote = False
        if name in (b"EVAL", b"EVALSHA"):
            return self._run_script(name, arguments)
        if name == b"SCRIPT":
            return self._forget_scripts(arguments)
        return self._command(name, arguments)

    def empty(self) -> None:
        """Loses all data and keeps its scripts, as after FLUSHALL."""
        self._keys, self._replica = RedisKeyspace(self._now_us), RedisKeyspace(lambda: self._fed_us)
        self._feed.clear()

    def restart(self) -> None:
        """Loses all data and scripts, and refuses nothing any more: a new process that found nothing on its disk."""
        self.empty()
        self._forget_scripts([b"FLUSH"])
        self.refusing = ""

    def fail_over(self) -> None:
        """Makes the replica take over with what it had got by now: writes of the last ``lag_s`` seconds are lost. It
        knows no script, though a real replica may have copied some when it began. A new replica begins as its copy.
        Raises AssertionError where there is no replica."""
        assert self._lag_us is not None, "there is no replica"
        self._replicate()
        self._feed.clear()
        self._keys = self._replica.copy(self._now_us)
        self._replica = self._keys.copy(lambda: self._fed_us)
        self._forget_scripts([b"FLUSH"])
        self.refusing = ""

    def dump(self) -> dict[bytes, RedisValue]:
        """Returns a copy of all data, by key."""
        return self._keys.dump()

    def expiries(self) -> dict[bytes, int]:
        """Returns when keys with a time to live expire, in ms since 1970."""
        return self._keys.expiries()

    def check_integrity(self) -> None:
        """Raises AssertionError where the data is not such as a Redis can have."""
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
        """Runs a command of a client or of a script."""
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
        """Sends a write to the replica, with its own time; a key's time to live ends on both servers at once."""
        now_us = self._now_us()
        if name == b"PEXPIRE":
            name, arguments = b"PEXPIREAT", [arguments[0], b"%d" % (now_us // 1000 + int(arguments[1]))]
        self._feed.append((now_us, name, arguments))
        self._replicate()

    def _replicate(self) -> None:
        """Applies the writes to the replica that are old enough."""
        assert self._lag_us is not None
        until_us = self._now_us() - self._lag_us
        while self._feed and self._feed[0][0] <= until_us:
            self._fed_us, name, arguments = self._feed.popleft()
            try:
                self._replica.run(name, arguments)
            except RedisRefusalError:
                # The replica refuses the command for the same reason as the master did, so it is skipped.
                continue


def _as_word(word: RedisWord) -> bytes:
    if isinstance(word, bytes):
        return word
    return word.encode() if isinstance(word, str) else repr(word).encode()
