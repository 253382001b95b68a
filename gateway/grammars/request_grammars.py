"""Makes the grammars that the answers to requests follow, in the formats in which a model writes its answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, NamedTuple

from pillion.errors import InvalidRequest, PillionError
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


class TenantTurns(NamedTuple):
    """Says how a tenant's work leaves the event loop: ``off_loop(bytes, job, *arguments)`` runs a job, on a thread
    where it is long; ``boxed()`` is the tenant's turn at a process that all tenants share."""

    off_loop: Callable[..., Awaitable[Any]]
    boxed: Callable[[], AbstractAsyncContextManager[None]]


class GrammarMaker:
    """Builds and checks the grammars that requests to one model ask for.

    Args:
        formats: how the model writes reasoning and calls of tools.
        checker: compiles grammars in a process of its own.
    """

    def __init__(self, formats: ModelFormats, checker: GrammarChecker) -> None:
        self._formats = formats
        self.checker = checker

    async def grammar(
        self, request: GenerateRequest, output_format: OutputFormat | None, turns: TenantTurns
    ) -> RequestGrammar:
        """Returns the grammar that every answer follows. Raises InvalidRequest, Overloaded and Unavailable."""
        structured, tools = request.sampling.structured_outputs, request.tools
        if structured is None and (output_format is None or output_format.tools is None):
            return NO_GRAMMAR
        if structured is not None:
            async with turns.boxed():
                structured = await self.checker.lark(structured)

        def write(loose: int) -> JoinedGrammar:
            check_wanted()
            piece = None if structured is None else structured_piece(structured, self._formats.mark_ids)
            return join(answer_pieces(output_format, self._formats, tools, piece, loose))

        # A tool that is not "strict" and whose schema cannot be followed is held to the part that can be, or may be
        # called with any object.
        optional = output_format is not None and any(tool.strict is not True for tool in tools.tools)
        for loose in range(3 if optional else 1):
            try:
                joined: JoinedGrammar = await turns.off_loop(
                    structured_bytes(structured) + tools_bytes(tools), write, loose
                )
                async with turns.boxed():
                    await self.checker.check(joined)
            except InvalidRequest:
                if loose == 2 or not optional:
                    raise
            else:
                return RequestGrammar(joined.text, tuple(joined.sources))
        raise AssertionError("the last grammar is good, or is refused")

    async def warm_up(self) -> None:
        """Starts the process that checks grammars, which reads the model's tokenizer."""
        with suppress(PillionError):
            await self.checker.check(join([structured_piece(StructuredOutputs(json_object=True))]))

    async def aclose(self) -> None:
        """Ends the process that checks grammars."""
        await self.checker.aclose()
