"""Limits what llguidance may spend on a grammar. The gateway compiles with the worker's limits, so that it rejects what
would fail at the worker. The module imports nothing.
"""

from __future__ import annotations

from typing import Any

# A worker's error about a request's grammar begins with these words, which the gateway replaces by the names of the
# client's fields.
GRAMMAR_FAULT = "the answer's grammar"
MAX_GRAMMAR_BYTES = 2**20
# Arguments of llguidance's LLParserLimits. With its defaults an ambiguous grammar can delay one mask by seconds; with
# these the worst case found takes 0.15 s, and a lexer 100 MB.
PARSER_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 5_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
