"""Builds the grammars of requests, in the formats of their model."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, NamedTuple

from pillion.errors import InvalidRequest, PillionError, SchemaViolation
from pillion.gateway.formats.answer_reader import OutputFormat
from pillion.gateway.formats.model_formats import ModelFormats
from pillion.gateway.grammars.answer_grammar import JoinedGrammar, join
from pillion.gateway.grammars.grammar_checker import GrammarChecker
from pillion.gateway.grammars.structured_outputs import structured_piece
from pillion.gateway.grammars.tool_pieces import answer_pieces
from pillion.gateway.request.admitted_request import NO_GRAMMAR, RequestGrammar
from pillion.gateway.request.validation import structured_bytes, tools_bytes
from pillion.gateway.tokens.tokenizer import check_wanted
from pillion.types import GenerateRequest, StructuredOutputs

# Grammars tried per request, each without the place in a tool's schema where the previous one was refused; the last one
# only requires that arguments are objects.
MAX_TRIALS = 8
_PARAMETERS = re.compile(r"tools\.tools\[(\d+)\]\.parameters")


class TenantTurns(NamedTuple):
    """Ways to run a tenant's work outside of the event loop: ``off_loop(bytes, job, *arguments)`` runs a job, on a
    thread if it is long; ``boxed()`` is the tenant's turn at a process that all tenants share."""

    off_loop: Callable[..., Awaitable[Any]]
    boxed: Callable[[], AbstractAsyncContextManager[None]]


class GrammarMaker:
    """Builder of the grammars of requests to one model.

    Args:
        formats: the model's formats of reasoning and tool calls.
        checker: compiles grammars in a separate process.
    """

    def __init__(self, formats: ModelFormats, checker: GrammarChecker) -> None:
        self._formats = formats
        self.checker = checker

    async def grammar(
        self, request: GenerateRequest, output_format: OutputFormat | None, turns: TenantTurns
    ) -> RequestGrammar:
        """Return the grammar of the answers. Raises InvalidRequest, Overloaded and Unavailable."""
        structured, tools = request.sampling.structured_outputs, request.tools
        if structured is None and (output_format is None or output_format.tools is None):
            return NO_GRAMMAR
        if structured is not None:
            async with turns.boxed():
                structured = await self.checker.lark(structured)

        left_out: dict[int, list[str]] = {}

        def write() -> JoinedGrammar:
            check_wanted()
            piece = None if structured is None else structured_piece(structured, self._formats.mark_ids)
            return join(answer_pieces(output_format, self._formats, tools, piece, left_out))

        for left in reversed(range(MAX_TRIALS)):
            try:
                joined: JoinedGrammar = await turns.off_loop(structured_bytes(structured) + tools_bytes(tools), write)
                async with turns.boxed():
                    await self.checker.check(joined)
            except InvalidRequest as error:
                not_strict = [n for n, tool in enumerate(tools.tools) if tool.strict is not True]
                if output_format is None or not _leave_out(error, left_out, not_strict, last=left == 1):
                    raise
            else:
                fields = dict.fromkeys(name.partition("#")[0] for name in joined.sources)
                return RequestGrammar(joined.text, tuple(fields), joined.left_out)
        raise AssertionError("the last trial returns or raises")

    async def warm_up(self) -> None:
        """Start the checking process, which loads the model's tokenizer, by a first check."""
        with suppress(PillionError):
            await self.checker.check(join([structured_piece(StructuredOutputs(json_object=True))]))

    async def aclose(self) -> None:
        """End the checking process."""
        await self.checker.aclose()


def _leave_out(error: InvalidRequest, left_out: dict[int, list[str]], not_strict: Sequence[int], last: bool) -> bool:
    """Exclude from enforcement the place in a tool's schema that an error names, or with ``last`` the whole schemas of
    all tools in ``not_strict``, by adding them to ``left_out``. Return False if that does not apply to the error."""
    violation = error.violations[0] if error.violations else None
    match = _PARAMETERS.match(violation.field) if violation is not None else None
    place = violation.place if isinstance(violation, SchemaViolation) else ""
    number = int(match[1]) if match is not None else -1
    last = last or (violation is not None and not violation.field)
    if (number not in not_strict and not last) or all("" in left_out.get(one, ()) for one in not_strict):
        return False
    if last or place in left_out.get(number, ()):
        left_out |= {one: [""] for one in (not_strict if last or "" in left_out[number] else [number])}
    else:
        left_out.setdefault(number, []).append(place)
    return True
