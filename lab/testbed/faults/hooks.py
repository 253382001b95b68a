"""Hooks of a component's process: modules with seams are patched on import to pass fault points, and Redis calls wait
longer if the test asks for it.

The role is the word after ``-m pillion`` on the command line. The fork server has the seams of all roles, and each fork
passes the points of its own. A seam stays the same for its callers: a function, coroutine function or asynchronous
generator function of the same name.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import inspect
import os
import pathlib
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from lab.testbed.defaults import change_module, modules_to_change
from lab.testbed.faults.board import BOARD_VARIABLE, REDIS_PATIENCE_VARIABLE, FaultBoard
from lab.testbed.faults.points import POINTS

Pass = Callable[[], None]
# Role of the fork server, whose forks may have any role.
EVERY_ROLE = "every role"
_FORK_SERVER = "pillion.supervisor.standbys.fork_server_main"
_REDIS_LINK = "pillion.kvstore.index.redis_link"


def role_of(words: Sequence[str]) -> str:
    """Return the role of a component by its command line; EVERY_ROLE for the fork server, "" for any other program."""
    for place, word in enumerate(words[:-1]):
        if pathlib.Path(word).name == "pillion" and words[place - 1] == "-m":
            return words[place + 1]
    return EVERY_ROLE if _FORK_SERVER in words else ""


def install(role: str) -> None:
    """Make this process pass the points of ``role`` once their modules are imported, on the board that its environment
    names; with ``EVERY_ROLE`` its forks pass those of their own roles, each on its own environment's board."""
    numbers: dict[tuple[str, str, str], dict[str, int]] = defaultdict(dict)
    for point in POINTS:
        if role in (point.role, EVERY_ROLE):
            module, _, name = point.seam.partition(":")
            numbers[module, name, point.moment][point.role] = point.number
    seams: dict[str, dict[str, dict[str, Pass]]] = defaultdict(lambda: defaultdict(dict))
    for (module, name, moment), by_role in numbers.items():
        seams[module][name][moment] = functools.partial(_pass, by_role)
    if seams:
        sys.meta_path.insert(0, _ChangeFinder({name: functools.partial(_wrap, found) for name, found in seams.items()}))


def wait_for_redis() -> None:
    """Extend the timeout of each Redis call, in this process and its forks, to the environment's minimum if it has one.
    The product's deadlines are those of requests, which continue without an answer; on a busy machine a healthy Redis
    may take a second."""

    def lengthen(module: ModuleType) -> None:
        call_each = module.RedisLink.call_each

        async def patiently(link: Any, *args: Any, **options: Any) -> Any:
            longer = max(options.pop("deadline_ms"), float(os.environ.get(REDIS_PATIENCE_VARIABLE, 0)))
            return await call_each(link, *args, **options, deadline_ms=longer)

        module.RedisLink.call_each = patiently

    sys.meta_path.insert(0, _ChangeFinder({_REDIS_LINK: lengthen}))


def change_defaults() -> None:
    """Make this process and its forks use the defaults that its environment sets."""
    found = modules_to_change()
    if found:
        sys.meta_path.insert(0, _ChangeFinder(dict.fromkeys(found, change_module)))


def _pass(by_role: dict[str, int]) -> None:
    role, board = _now(os.getpid())
    number = by_role.get(role)
    if number is not None and board is not None:
        board.passes(number)


@functools.cache
def _now(pid: int) -> tuple[str, FaultBoard | None]:
    """Return the role and board of this process (id ``pid``)."""
    path = os.environ.get(BOARD_VARIABLE)
    return role_of(sys.orig_argv), FaultBoard(pathlib.Path(path)) if path else None


def _wrap(seams: Mapping[str, Mapping[str, Pass]], module: ModuleType) -> None:
    for name, passes in seams.items():
        owner, _, last = name.rpartition(".")
        holder = getattr(module, owner) if owner else module
        setattr(holder, last, wrapped(getattr(holder, last), passes["before"], passes["after"]))


class _ChangeFinder(importlib.abc.MetaPathFinder):
    """Import finder that patches some modules after Python has run them."""

    def __init__(self, changes: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._changes = changes
        self._finding: set[str] = set()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._changes or name in self._finding:
            return None
        self._finding.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._finding.discard(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _ChangeLoader(spec.loader, self._changes[name])
        return spec


class _ChangeLoader(importlib.abc.Loader):
    def __init__(self, inner: Any, change: Callable[[ModuleType], None]) -> None:
        self._inner = inner
        self._change = change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._inner.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        self._change(module)


def wrapped(seam: Callable[..., Any], before: Pass, after: Pass) -> Callable[..., Any]:
    """Wrap a seam with its two points. A seam that raises does not pass the second."""
    if inspect.isasyncgenfunction(seam):

        @functools.wraps(seam)
        async def messages(*args: Any, **kwargs: Any) -> Any:
            async with aclosing(seam(*args, **kwargs)) as found:
                async for message in found:
                    before()
                    yield message
                    after()

        return messages
    if inspect.iscoroutinefunction(seam):

        @functools.wraps(seam)
        async def call(*args: Any, **kwargs: Any) -> Any:
            before()
            answer = await seam(*args, **kwargs)
            after()
            return answer

        return call

    @functools.wraps(seam)
    def plain(*args: Any, **kwargs: Any) -> Any:
        before()
        answer = seam(*args, **kwargs)
        after()
        return answer

    return plain
