"""Limits what llguidance may spend on a grammar. The gateway compiles with the limits of the worker that follows the
grammar, so that it refuses what would fail at the worker. The module imports nothing.
"""

from __future__ import annotations

from typing import Any

# A refusal by a worker that concerns a request's grammar begins with these words; the gateway replaces the words by the
# names of the client's fields.
GRAMMAR_FAULT = "the answer's grammar"
# One submit may carry a grammar of at most this many bytes.
MAX_GRAMMAR_BYTES = 2**20
# These are the arguments of llguidance's LLParserLimits. With its own defaults an ambiguous grammar can hold one mask
# up for seconds; with these the worst that was found takes 0.15 s, and a lexer 100 MB.
PARSER_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 5_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
