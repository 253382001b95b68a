"""Answers scripted as deltas, served by a real gateway."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from pillion.errors import PillionError
from pillion.gateway.request.admitted_request import NO_GRAMMAR
from pillion.gateway.request.validation import ModelLimits, resolve
from pillion.types import Delta, FinishReason, GenerateRequest, SamplingParams, Timings, ToolCallDelta, Usage
from tests.support.fake_components import FINGERPRINT, FakeCluster


class ScriptedRunner:
    """Stand-in for a RequestRunner: yields ``script`` one delta at a time, and raises errors in it.

    ``together``: all deltas are available at once, so that one write may contain them all.
    """

    def __init__(self, script: Sequence[Delta | PillionError], usage: Usage, together: bool) -> None:
        sampling, _ = resolve(SamplingParams(), 0, (), ModelLimits("toy", 256, 256), 0)
        self.admitted: Any = SimpleNamespace(
            system_fingerprint=FINGERPRINT, sampling=sampling, cut=False, grammar=NO_GRAMMAR
        )
        self._left = list(script)
        self._usage = usage
        self._together = together
        self.cancelled = False

    @property
    def pending(self) -> bool:
        return self._together and bool(self._left)

    def usage(self) -> Usage:
        return self._usage

    def cancel(self) -> None:
        self.cancelled = True

    async def __anext__(self) -> Delta:
        if not self._left:
            raise StopAsyncIteration
        match self._left.pop(0):
            case Delta() as delta:
                return delta
            case PillionError() as error:
                raise error


class ScriptedGateway:
    """Replaces the requests of ``fakes``: ``requests`` are the received ones, each answered by ``script``."""

    def __init__(self, fakes: FakeCluster) -> None:
        self.script: Sequence[Delta | PillionError] = ()
        self.usage = Usage(30, 16, 9, 4)
        self.together = False
        self.requests: list[GenerateRequest] = []
        fakes.gateway.gateway.generate = self._generate  # type: ignore[method-assign]

    async def _generate(self, request: GenerateRequest, **_: Any) -> Any:
        self.requests.append(request)
        return ScriptedRunner(self.script, self.usage, self.together)


def said(text: str = "", **fields: Any) -> Delta:
    """Return a delta of one token."""
    return Delta("r", text, (1,), **fields)


def called(index: int, arguments: str = "", **names: str) -> Delta:
    """Return a delta with a part of a tool call."""
    return Delta("r", "", (1,), tool_calls=(ToolCallDelta(index, arguments=arguments, **names),))


def ended(reason: FinishReason = FinishReason.STOP, **fields: Any) -> Delta:
    """Return the last delta."""
    return Delta("r", "", (), reason, Usage(30, 16, 9, 4), Timings(), **fields)


def thought_said_and_called(first_id: str, second_id: str) -> list[Delta]:
    """Return an answer of reasoning, text and two calls with these ids, each in pieces."""
    return [
        said(reasoning="Let me"),
        said(reasoning=" see."),
        said("I "),
        said("look."),
        called(0, id=first_id, name="weather"),
        called(0, '{"city": "R'),
        called(0, 'ome"}'),
        called(1, "{}", id=second_id, name="time"),
        ended(FinishReason.TOOL_CALLS),
    ]
