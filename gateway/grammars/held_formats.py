"""Makes answers follow grammars: adds a check of grammars to the formats in which a model writes its answers."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import cast

from pillion.config import AnswerFlags
from pillion.errors import InvalidRequest, PillionError
from pillion.gateway.answer_formats import AskedOutput, FormatMakers, FormatSource, RequestGrammar, TenantTurns
from pillion.gateway.formats.answer_reader import OutputFormat
from pillion.gateway.formats.model_formats import ModelFormats, choose_formats, parser_names
from pillion.gateway.grammars.answer_grammar import JoinedGrammar, join
from pillion.gateway.grammars.grammar_checker import GrammarChecker
from pillion.gateway.grammars.structured_outputs import structured_piece
from pillion.gateway.grammars.tool_pieces import answer_pieces
from pillion.gateway.request.structured_bounds import structured_bytes
from pillion.gateway.request.validation import tools_bytes
from pillion.gateway.tokens.tokenizer import check_wanted
from pillion.types import GenerateRequest, StructuredOutputs


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldFormats(ModelFormats):
    """Builds and checks the grammars that requests ask for, beside the formats in which a model writes its answers."""

    checker: GrammarChecker

    async def grammar(
        self, request: GenerateRequest, output: AskedOutput | None, turns: TenantTurns
    ) -> RequestGrammar | None:
        """Returns the grammar that every answer follows; None where answers may be any text. Raises InvalidRequest,
        Overloaded and Unavailable."""
        output_format = cast("OutputFormat | None", output)
        structured, tools = request.sampling.structured_outputs, request.tools
        if structured is None and (output_format is None or output_format.tools is None):
            return None
        if structured is not None:
            async with turns.boxed():
                structured = await self.checker.lark(structured)

        def write(loose: int) -> JoinedGrammar:
            check_wanted()
            piece = None if structured is None else structured_piece(structured, self.mark_ids)
            return join(answer_pieces(output_format, self, tools, piece, loose))

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


def _names(template: str, flags: AnswerFlags) -> tuple[str, str]:
    return parser_names(template, flags.tool_call_parser, flags.reasoning_parser)


def _make(source: FormatSource, flags: AnswerFlags) -> HeldFormats:
    tokenizer = source.tokenizer
    found = choose_formats(
        tokenizer.chat_template,
        tokenizer.codec,
        flags.tool_call_parser,
        flags.reasoning_parser,
        flags.enable_auto_tool_choice,
    )
    # A token that ends answers stands in no structure.
    ids = {mark: number for mark, number in found.mark_ids.items() if number not in source.eos_token_ids}
    found = replace(found, mark_ids=ids)
    checker = GrammarChecker(source.file, source.vocab_size, source.eos_token_ids)
    return HeldFormats(**{one.name: getattr(found, one.name) for one in fields(found)}, checker=checker)


FORMATS_AND_GRAMMARS = FormatMakers(_names, _make)
