"""Random answers to a schema, chosen uniformly among the tokens that the grammar allows."""

from __future__ import annotations

import json
import random
from decimal import Decimal
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from lab.testbed.toy_tokenizer import byte_tokenizer
from pillion.errors import InvalidRequest
from pillion.gateway.grammars.answer_grammar import join
from pillion.gateway.grammars.structured_outputs import structured_piece
from pillion.rules.grammar_limits import PARSER_LIMITS
from pillion.types import StructuredOutputs

MAX_TOKENS = 400
TOKENIZER = LLTokenizer(byte_tokenizer().to_str(), eos_token=[257])
END = 257
CLOSERS = sum(1 << byte_tokenizer().encode(one).ids[0] for one in '"]},')


def structured_matcher(structured: StructuredOutputs) -> LLMatcher:
    """Return a matcher for a structure that the gateway accepts. Raises InvalidRequest otherwise."""
    grammar = join([structured_piece(structured)])
    matcher = LLMatcher(TOKENIZER, grammar.text, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))
    if matcher.is_error():
        raise InvalidRequest(matcher.get_error())
    return matcher


def matcher_of(schema: Any) -> LLMatcher | None:
    """Return a matcher for answers that fit ``schema``; None if the gateway refuses it."""
    try:
        return structured_matcher(StructuredOutputs(json=json.dumps(schema)))
    except InvalidRequest:
        return None


def allows(matcher: LLMatcher, text: str) -> bool:
    """Return True if ``text`` may be the whole answer."""
    tokens = TOKENIZER.tokenize_bytes(text.encode())
    reader = matcher.deep_copy()
    return reader.try_consume_tokens(tokens) == len(tokens) and reader.is_accepting()


def answer(matcher: LLMatcher, rng: random.Random) -> str | None:
    """Return a random answer, biased to end; None if it was cut."""
    tokens: list[int] = []
    for _ in range(MAX_TOKENS):
        forced = matcher.compute_ff_tokens()
        if forced:
            assert matcher.consume_tokens(forced)
            tokens += forced
        if matcher.is_stopped():
            return TOKENIZER.decode_bytes(tokens).decode()
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        assert not matcher.is_error(), (TOKENIZER.decode_bytes(tokens), matcher.get_error())
        if mask >> END & 1 and (mask == 1 << END or rng.random() < 0.6):
            return TOKENIZER.decode_bytes(tokens).decode()
        mask &= ~(1 << END)
        if mask & CLOSERS and rng.random() < 0.5:
            mask &= CLOSERS
        token = rng.choice([n for n, bit in enumerate(reversed(f"{mask:b}")) if bit == "1"])
        assert matcher.consume_token(token)
        tokens.append(token)
    return None


def exact(text: str) -> Any:
    return json.loads(text, parse_float=Decimal)
