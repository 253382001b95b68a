"""Bounded waits for a condition, in place of a sleep of a guessed length.

``wait_for`` blocks the thread, ``until`` yields to the event loop, ``within`` awaits, ``result_of`` waits for another
thread's call, and ``loop_turns`` runs a known number of loop iterations. A test that something does *not* happen counts
iterations or drives a clock.

The first line of a timeout's error has what was waited for, what was seen instead, and since when: the condition's
answer or, if that is only false, the operands of the expression that it returned: for ``lambda: len(found) == 3`` the
value of ``len(found)``. ``saw`` overrides this.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import linecache
import reprlib
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from types import CodeType, FrameType
from typing import Any, TypeVar

T = TypeVar("T")

POLL_S = 0.02
# Timeout of a condition: long for loaded machines; only reached where something is broken.
WITHIN_S = 60.0
# Interval at which a longer wait records what the condition sees.
LOOK_EVERY_S = 1.0
# Characters of a value in an error, and of all values.
VALUE_CHARACTERS, LINE_CHARACTERS = 160, 600


def wait_for(
    what: str,
    condition: Callable[[], Any],
    timeout_s: float = WITHIN_S,
    *,
    saw: Callable[[], Any] | None = None,
) -> Any:
    """Return the first true answer of ``condition``. On a timeout raises AssertionError with ``what`` and what was seen
    instead, which is ``saw()`` if given."""
    watch = _Watch(what, condition, timeout_s, saw)
    while True:
        with watch.looking():
            answer = condition()
        if answer:
            return answer
        watch.missed(answer)
        time.sleep(POLL_S)


async def until(
    what: str,
    condition: Callable[[], Any | Awaitable[Any]],
    timeout_s: float = WITHIN_S,
    *,
    saw: Callable[[], Any] | None = None,
) -> Any:
    """Return the first true answer of ``condition``, which may be a coroutine function. Raises as ``wait_for``."""
    watch = _Watch(what, condition, timeout_s, saw)
    while True:
        with watch.looking():
            answer = condition()
            if inspect.isawaitable(answer):
                answer = await answer
        if answer:
            return answer
        watch.missed(answer)
        await asyncio.sleep(POLL_S)


async def within(
    what: str, awaitable: Awaitable[T], timeout_s: float = WITHIN_S, *, saw: Callable[[], Any] | None = None
) -> T:
    """Return the result of ``awaitable``. Raises AssertionError with ``what`` and ``saw()`` on a timeout."""
    try:
        async with asyncio.timeout(timeout_s):
            return await awaitable
    except TimeoutError:
        seen = f"; it saw {short(saw())}" if saw is not None else ""
        raise AssertionError(f"waited {timeout_s:g} s for {what}{seen}") from None


def result_of(what: str, future: Future[T], timeout_s: float = WITHIN_S) -> T:
    """Return the result of another thread's call, or raise its error. Raises AssertionError with ``what`` on a
    timeout."""
    try:
        return future.result(timeout_s)
    except TimeoutError:
        if future.done():
            raise
        raise AssertionError(f"waited {timeout_s:g} s for {what}; it saw {short(future)}") from None


async def loop_turns(count: int = 50) -> None:
    """Run everything that is ready on the event loop, ``count`` times."""
    for _ in range(count):
        await asyncio.sleep(0)


class _Watch:
    """What one wait has seen so far, and its deadline."""

    def __init__(
        self, what: str, condition: Callable[[], Any], timeout_s: float, saw: Callable[[], Any] | None
    ) -> None:
        self._what = what
        self._code = _code_of(condition)
        self._timeout_s = timeout_s
        self._saw = saw
        self._began_s = time.monotonic()
        self._next_look_s = self._began_s + min(LOOK_EVERY_S, timeout_s)
        self._frame: FrameType | None = None
        self._seen, self._since_s = "", self._began_s

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Enclose a call of the condition; if a look is due, record the frame in which it returns."""
        self._frame = None
        if self._saw is not None or self._code is None or time.monotonic() < self._next_look_s:
            yield
            return
        before = sys.getprofile()
        sys.setprofile(self._returned)
        try:
            yield
        finally:
            sys.setprofile(before)

    def missed(self, answer: Any) -> None:
        """Record that the condition does not hold yet. Raises AssertionError after the deadline."""
        now = time.monotonic()
        over = now >= self._began_s + self._timeout_s
        if not over and now < self._next_look_s:
            return
        seen = self._sight(answer)
        if seen != self._seen:
            self._seen, self._since_s = seen, now if self._seen else self._began_s
        self._next_look_s = min(now + LOOK_EVERY_S, self._began_s + self._timeout_s)
        self._frame = None
        if over:
            age_s = now - self._since_s
            raise AssertionError(f"waited {self._timeout_s:g} s for {self._what}; for {age_s:.1f} s it saw {seen}")

    def _sight(self, answer: Any) -> str:
        if self._saw is not None:
            return short(self._saw())
        if answer is not None and not isinstance(answer, bool):
            return short(answer)
        parts = operands(self._frame) if self._frame is not None else {}
        text = ", ".join(f"{name} = {short(value)}" for name, value in parts.items())
        return text[:LINE_CHARACTERS] or short(answer)

    def _returned(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "return" and frame.f_code is self._code:
            self._frame = frame


def short(value: Any) -> str:
    """Return a value as one line of limited length."""
    try:
        text = " ".join(value.split()) if isinstance(value, str) else " ".join(repr(value).split())
    except Exception as error:
        text = f"a value without a repr ({type(error).__name__})"
    if len(text) <= VALUE_CHARACTERS:
        return text
    keep = (VALUE_CHARACTERS - len(reprlib.Repr().fillvalue)) // 2
    return f"{text[:keep]}...{text[-keep:]}"


def operands(frame: FrameType) -> dict[str, Any]:
    """Return the operands of the expression that a frame has returned, by their source: sides of comparisons, and what
    ``not``, ``and`` and ``or`` join. Constants, and what cannot be evaluated again, are left out; if nothing remains,
    the frame's variables."""
    expression = _returned_expression(frame)
    found: dict[str, Any] = {}
    names = {**frame.f_globals, **frame.f_locals}
    for part in _parts(expression) if expression is not None else ():
        text = ast.unparse(part)
        with contextlib.suppress(Exception):
            value = eval(compile(ast.Expression(part), "<condition>", "eval"), names)
            if inspect.iscoroutine(value):
                value.close()
            elif not isinstance(value, Iterator):
                found[text] = value
    return found or {name: value for name, value in frame.f_locals.items() if not inspect.isroutine(value)}


def _parts(expression: ast.expr) -> Iterator[ast.expr]:
    match expression:
        case ast.BoolOp(values=values):
            for value in values:
                yield from _parts(value)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield from _parts(operand)
        case ast.Compare(left=left, comparators=comparators):
            for side in (left, *comparators):
                yield from _parts(side)
        case ast.Call(func=ast.Name(id="bool"), args=[argument]):
            yield from _parts(argument)
        case ast.Call(func=ast.Name(id="any" | "all"), args=[ast.GeneratorExp() as each]):
            # The iterated values explain more than the answer.
            yield from _parts(each.generators[0].iter)
        case ast.Constant():
            return
        case _:
            yield expression


def _returned_expression(frame: FrameType) -> ast.expr | None:
    """Return the source of the expression that a frame has just returned; for a lambda its body."""
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    positions = list(frame.f_code.co_positions())
    index = frame.f_lasti // 2
    if not lines or index >= len(positions):
        return None
    first, last = frame.f_code.co_firstlineno, positions[index][0]
    is_lambda = frame.f_code.co_name == "<lambda>"
    with contextlib.suppress(SyntaxError):
        for node in ast.walk(ast.parse("".join(lines))):
            if is_lambda and isinstance(node, ast.Lambda) and node.lineno == first:
                return node.body
            if not is_lambda and isinstance(node, ast.Return) and node.lineno == last:
                return node.value
    return None


def _code_of(condition: Callable[[], Any]) -> CodeType | None:
    """Return the code of a function or bound method, or None if it is not Python."""
    return getattr(getattr(inspect.unwrap(condition), "__func__", condition), "__code__", None)
