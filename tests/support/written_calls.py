"""Tool calls written by a random writer under a grammar, in each format, and their parsers."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import llguidance.numpy
import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from lab.testbed.toy_tokenizer import byte_tokenizer
from pillion.errors import InvalidRequest
from pillion.gateway.formats.answer_parts import AnswerParts
from pillion.gateway.formats.answer_reader import ReadAnswerText
from pillion.gateway.formats.harmony import HARMONY_MARKS
from pillion.gateway.formats.model_formats import ModelFormats
from pillion.gateway.formats.named_calls import NAMED_FORMS
from pillion.gateway.formats.xml_calls import MINIMAX
from pillion.gateway.grammars.answer_grammar import JoinedGrammar
from pillion.gateway.grammars.grammar_checker import violations_of
from pillion.gateway.grammars.grammar_worker import blame, trial
from pillion.gateway.grammars.request_grammars import GrammarMaker, TenantTurns
from pillion.gateway.request.admitted_request import RequestGrammar
from pillion.gateway.tokens.answer_text import new_detokenizer, stop_strings
from pillion.rules.grammar_limits import PARSER_LIMITS
from pillion.types import ChatMessage, GenerateRequest, ToolOptions

EOS = 257
MAX_TOKENS = 3000
# Tokens after which the writer prefers closing characters.
FREE_TOKENS = 200
CLOSERS = '"]})<>\n'
DEEPSEEK, KIMI = (
    (form.section, form.end_section, *form.inner) for form in (NAMED_FORMS["deepseek_v3"], NAMED_FORMS["kimi_k2"])
)
# A format, its special tokens and its other added ones.
MODELS: dict[str, tuple[str, list[str], list[str]]] = {
    "hermes": ("hermes", [], []),
    "hermes with tokens": ("hermes", [], ["<tool_call>", "</tool_call>", "<think>", "</think>"]),
    "coder": ("qwen3_coder", [], ["<tool_call>", "</tool_call>"]),
    "glm": ("glm45", [], ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]),
    "glm without tokens": ("glm45", [], []),
    "minimax": ("minimax_m2", ["<minimax:tool_call>", "</minimax:tool_call>"], []),
    "seed": ("seed_oss", ["<seed:tool_call>", "</seed:tool_call>"], []),
    "deepseek": ("deepseek_v3", [*DEEPSEEK], []),
    "deepseek v3.1": ("deepseek_v31", [], [*DEEPSEEK]),
    "kimi": ("kimi_k2", [*KIMI], []),
    "granite": ("granite", ["<|tool_call|>"], []),
    "hunyuan": ("hunyuan_a13b", [], ["<tool_calls>", "</tool_calls>"]),
    "llama": ("llama3_json", ["<|python_tag|>"], []),
    "mistral": ("mistral", ["[TOOL_CALLS]"], []),
    "mistral v11": ("mistral", ["[TOOL_CALLS]", "[ARGS]"], []),
    "gpt-oss": ("openai", [*HARMONY_MARKS], []),
    "pythonic": ("pythonic", [], []),
    "llama 4": ("llama4_pythonic", ["<|python_start|>", "<|python_end|>"], []),
    "olmo": ("olmo3", [], []),
    "gemma 4": ("gemma4", ["<|tool_call>", "<tool_call|>", '<|"|>'], []),
    "functiongemma": ("functiongemma", ["<start_function_call>", "<end_function_call>", "<escape>"], []),
    "gemma without tokens": ("gemma4", [], []),
    "cohere": ("cohere_command3", ["<|START_ACTION|>", "<|END_ACTION|>"], []),
    "ernie": ("ernie45", ["<tool_call>", "</tool_call>"], []),
    "phi 4 mini": ("phi4_mini_json", [], []),
    "apertus": ("apertus", ["<|tools_prefix|>", "<|tools_suffix|>"], []),
    "internlm": ("internlm", ["<|action_start|>", "<|plugin|>", "<|action_end|>"], []),
    "lfm": ("lfm2", ["<|tool_call_start|>", "<|tool_call_end|>"], []),
    "xlam": ("xlam", [], []),
    "hunyuan 3": (
        "hy_v3",
        ["<tool_calls>", "</tool_calls>", "<tool_call>", "</tool_call>", "<tool_sep>"],
        ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    ),
    "step": (
        "step3",
        [*(f"<｜tool_{mark}｜>" for mark in ("calls_begin", "calls_end", "call_begin", "call_end", "sep"))],
        [],
    ),
    "deepseek v3.2": ("deepseek_v32", [], []),
    "minimax m3": ("minimax_m3", [MINIMAX], []),
    "minimax m3 without tokens": ("minimax_m3", [], []),
    "kimi k3": ("kimi_k3", ["<|open|>", "<|close|>", "<|sep|>"], []),
    "kimi k3 without tokens": ("kimi_k3", [], []),
}

# Formats that differ from others only by their marks.
ALIKE = (
    *("glm without tokens", "seed", "deepseek v3.1", "granite", "functiongemma", "gemma without tokens", "ernie"),
    *("phi 4 mini", "pythonic", "olmo", "cohere", "lfm", "xlam", "kimi k3 without tokens"),
    "minimax m3 without tokens",
)
CASES = [pytest.param(name, marks=pytest.mark.long if name in ALIKE else ()) for name in MODELS]


def codec_of(model: str) -> Tokenizer:
    codec = byte_tokenizer()
    codec.add_special_tokens([AddedToken(text, special=True) for text in MODELS[model][1]])
    codec.add_tokens([AddedToken(text, special=False) for text in MODELS[model][2]])
    return codec


def written(codec: Tokenizer, grammar: str, seed: int) -> list[int] | None:
    """Return tokens that a random writer chooses among those that the grammar allows; None if it never ends."""
    tokenizer = LLTokenizer(codec.to_str(), eos_token=EOS)
    matcher, chosen, ids = LLMatcher(tokenizer, grammar), random.Random(seed), list[int]()
    closers = frozenset(one for letter in CLOSERS for one in codec.encode(letter).ids)
    assert not matcher.is_error(), matcher.get_error()
    mask = llguidance.numpy.allocate_token_bitmask(1, tokenizer.vocab_size)
    for _ in range(MAX_TOKENS):
        llguidance.numpy.fill_next_token_bitmask(matcher, mask, 0)
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist()
        marks = [one for one in allowed if one > EOS and codec.id_to_token(one) != "añadido"]
        if EOS in allowed and (allowed == [EOS] or chosen.random() < 0.3):
            return ids
        ends = [one for one in allowed if one in closers] if len(ids) > FREE_TOKENS else []
        rest = ends if ends and chosen.random() < 0.5 else [one for one in allowed if one != EOS]
        pick = chosen.choice(marks if marks and chosen.random() < 0.2 else rest)
        assert matcher.consume_token(pick)
        ids.append(pick)
    return None


def read(codec: Tokenizer, formats: ModelFormats, request: GenerateRequest, prompt: str, ids: list[int]) -> Any:
    """Return content and calls of an answer."""
    form = formats.output_format(request, prompt)
    assert form is not None
    answer = ReadAnswerText(new_detokenizer(codec), stop_strings(()), frozenset([EOS]), 0, form, AnswerParts())
    deltas = [*(answer.push([one]) for one in ids), answer.flush()]
    calls: dict[int, list[str]] = {}
    for part in (part for delta in deltas for part in delta.tool_calls):
        call = calls.setdefault(part.index, [part.name, ""])
        call[1] += part.arguments
    return "".join(delta.text for delta in deltas), list(calls.values()), answer.reasoning_tokens


def accepts(codec: Tokenizer, grammar: str, text: str) -> bool:
    matcher = LLMatcher(LLTokenizer(codec.to_str(), eos_token=EOS), grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = codec.encode(text).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


class _CheckerHere:
    """Compile grammars in this process."""

    def __init__(self, codec: Tokenizer) -> None:
        self._tokenizer = LLTokenizer(codec.to_str(), eos_token=EOS)

    async def check(self, grammar: JoinedGrammar) -> None:
        limits = LLParserLimits(**PARSER_LIMITS)
        if reason := trial(self._tokenizer, limits, grammar.text):
            raise InvalidRequest.of(*violations_of(blame(grammar.sources, reason, limits)))


def call_grammar(codec: Tokenizer, formats: ModelFormats, options: ToolOptions) -> RequestGrammar:
    """Return the call grammar that a gateway builds. Raises InvalidRequest."""

    async def off_loop(_: int, job: Any, *arguments: Any) -> Any:
        return job(*arguments)

    request = GenerateRequest(messages=(ChatMessage("user", "x"),), tools=options)
    maker: Any = GrammarMaker(formats, _CheckerHere(codec))  # type: ignore[arg-type]
    turns = TenantTurns(off_loop, contextlib.nullcontext)
    return asyncio.run(maker.grammar(request, formats.output_format(request, ""), turns))  # type: ignore[no-any-return]
