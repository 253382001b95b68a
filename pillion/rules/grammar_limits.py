"""Limits of llguidance's work on a grammar. Gateways compile with the same limits as workers, so that they reject
grammars that would fail at a worker.
"""

from __future__ import annotations

from typing import Any

# Beginning of a worker's error about a grammar; the gateway replaces it by the names of the client's fields.
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
