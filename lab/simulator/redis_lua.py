"""Redis's scripts in Lua 5.1, as Redis runs them, so that there is no second version of a script.

Lua is lupa's. Of Redis's library it has ``redis.call``, ``redis.pcall`` and part of ``struct``. fakeredis was rejected:
its clock cannot be replaced, refusals cannot be switched, and it has no ``struct``. Sans-IO.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from lupa import lua51

from lab.simulator.redis_keyspace import RedisRefusalError, RedisReply, SimpleStatus

# Runs one command of a script. Raises RedisRefusalError.
ScriptCommand = Callable[[bytes, list[bytes]], RedisReply]


class LuaInterpreter:
    """A Lua runtime with its compiled scripts, shared by all servers of this process. ``command``: runs commands of the
    current script; set by each run."""

    def __init__(self) -> None:
        self.command: ScriptCommand | None = None
        self._functions: dict[bytes, Any] = {}
        # Shared, since no script of Pillion's modifies replies.
        self._statuses: dict[bytes, Any] = {}
        self._lua = lua51.LuaRuntime(
            encoding=None, unpack_returned_tuples=True, register_eval=False, register_builtins=False
        )
        self._names = self._lua.globals()
        self._names[b"redis"] = self._lua.table_from({b"call": self._call, b"pcall": self._pcall})
        self._names[b"struct"] = self._lua.table_from({b"pack": _pack, b"unpack": _unpack})

    def run(self, text: bytes, keys: Sequence[bytes], arguments: Sequence[bytes]) -> RedisReply:
        """Run a script. Raises RedisRefusalError if a command is refused, or on an error of the script."""
        self._names[b"KEYS"], self._names[b"ARGV"] = self._lua.table_from(keys), self._lua.table_from(arguments)
        try:
            function = self._functions.get(text)
            if function is None:
                function = self._functions[text] = self._lua.compile(text)
            return _reply(function())
        except lua51.LuaError as error:
            raise RedisRefusalError(f"ERR {error}") from None

    def _call(self, name: bytes, *words: Any) -> Any:
        assert self.command is not None
        arguments = [word if type(word) is bytes else _word(word) for word in words]
        reply = self.command(name, arguments)
        kind = type(reply)
        return reply if kind is bytes or kind is int else self._to_lua(reply)

    def _pcall(self, name: bytes, *words: Any) -> Any:
        try:
            return self._call(name, *words)
        except RedisRefusalError as refusal:
            return self._lua.table_from({b"err": refusal.message.encode()})

    def _to_lua(self, reply: RedisReply) -> Any:
        if reply is None:
            return False
        if isinstance(reply, SimpleStatus):
            if reply not in self._statuses:
                self._statuses[reply] = self._lua.table_from({b"ok": bytes(reply)})
            return self._statuses[reply]
        if isinstance(reply, list):
            return self._lua.table_from([one if type(one) is bytes else self._to_lua(one) for one in reply])
        return reply


_interpreter: LuaInterpreter | None = None


def run_script(command: ScriptCommand, text: bytes, keys: Sequence[bytes], arguments: Sequence[bytes]) -> RedisReply:
    """Run a script with ``command`` for its commands. Raises RedisRefusalError if one is refused, or on an error of the
    script."""
    global _interpreter
    if _interpreter is None:
        _interpreter = LuaInterpreter()
    _interpreter.command = command
    return _interpreter.run(text, keys, arguments)


def _word(word: Any) -> bytes:
    """Convert a script's argument of a command to bytes, as Redis does."""
    if isinstance(word, bytes):
        return word
    if isinstance(word, bool) or not isinstance(word, int | float):
        raise RedisRefusalError("ERR Lua redis() command arguments must be strings or integers")
    return b"%.17g" % word


def _reply(value: Any) -> RedisReply:
    """Convert a script's result to a client's reply: numbers are truncated, lists end at nil."""
    if isinstance(value, bool):
        return 1 if value else None
    if isinstance(value, float):
        return int(value)
    if lua51.lua_type(value) != "table":
        return value
    for name in (b"ok", b"err"):
        if (text := value[name]) is not None:
            if name == b"err":
                raise RedisRefusalError(text.decode(errors="replace"))
            return SimpleStatus(text)
    found: list[RedisReply] = []
    while (one := value[len(found) + 1]) is not None:
        found.append(_reply(one))
    return found


def _pack(layout: bytes, *numbers: Any) -> bytes:
    return struct.pack(_layout(layout), *map(int, numbers))


def _unpack(layout: bytes, packed: bytes) -> tuple[int, ...]:
    """Return the unpacked numbers and the offset of the rest."""
    size = struct.calcsize(_layout(layout))
    return (*struct.unpack_from(_layout(layout), packed), size + 1)


def _layout(layout: bytes) -> str:
    """Translate a layout of Redis's ``struct`` for Python; Pillion uses 4-byte numbers only."""
    if layout.replace(b"I4", b"") != b">":
        raise RedisRefusalError(f"ERR the model packs no {layout!r}")
    return ">" + "I" * layout.count(b"I4")
