"""The real grammar library behind an answer's state: forced tokens, drafts, ends, replay and limits."""

from __future__ import annotations

import json
import os
import pathlib
import random
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from lab.testbed.conditions import WITHIN_S, result_of, wait_for
from pillion.engine.grammars import compiled_grammar
from pillion.engine.grammars import compiler as compiler_module
from pillion.engine.grammars.compiler import MAX_COMPILED_GRAMMARS, GrammarCompiler, read_ahead, read_tokenizer
from pillion.engine.grammars.grammar_state import GrammarState
from pillion.errors import BrokenGrammar, InvalidRequest
from pillion.host.cores import BACKGROUND_NICENESS
from tests.support.fake_backend import EOS, VOCAB_SIZE
from tests.support.grammars import follow, text_of, write_tokenizer

STOPS = frozenset([EOS])
PERSON = (
    'start: "{" "\\"first_name\\":" name ",\\"years\\":" /[1-9][0-9]?/ "}"\n'
    'name: "\\"Ada\\"" | "\\"Alan\\"" | "\\"Grace Hopper\\""\n'
)


@pytest.fixture
def compiler(tmp_path: pathlib.Path) -> GrammarCompiler:
    folder = write_tokenizer(tmp_path)
    made = GrammarCompiler.load(pathlib.Path(folder), VOCAB_SIZE, [EOS])
    yield made
    made.close()


def test_a_preloaded_tokenizer_is_used_until_its_file_changes(tmp_path: pathlib.Path) -> None:
    path = pathlib.Path(write_tokenizer(tmp_path)) / "tokenizer.json"
    read_ahead(json.dumps([str(path), VOCAB_SIZE, [EOS]]))
    first = read_tokenizer(path, VOCAB_SIZE, (EOS,))
    loaded = GrammarCompiler.load(path.parent, VOCAB_SIZE, [EOS, VOCAB_SIZE + 1])
    loaded.close()
    assert loaded._tokenizer is first
    path.write_text(path.read_text() + "\n")
    assert read_tokenizer(path, VOCAB_SIZE, (EOS,)) is not first
    path.write_text("{}")
    read_ahead(json.dumps([str(path), VOCAB_SIZE, [EOS]]))


def started(
    compiler: GrammarCompiler, text: str, answer: tuple[int, ...] = (), stops: frozenset[int] = STOPS
) -> GrammarState:
    return result_of("a grammar to be compiled", compiler.start(text, answer, stops))


def allowed(state: GrammarState, *drafts: int) -> list[int]:
    """Return the tokens that may follow the drafts."""
    follow(state)
    masks = state.place_masks(drafts, 1 + len(drafts))
    assert masks.wait(WITHIN_S), f"waited {WITHIN_S:g} s for the masks of {1 + len(drafts)} tokens"
    return np.flatnonzero(np.unpackbits(masks.bits[-1].view(np.uint8), bitorder="little")).tolist()


def walk(state: GrammarState, seed: int) -> list[int]:
    """Return a random answer."""
    draws, answer = random.Random(seed), []
    while not (state.completes and not state.forced):
        token = draws.choice(allowed(state))
        answer.append(token)
        state.take([token])
        follow(state)
        assert state.failure is None
    return answer


def test_an_answer_replayed_from_any_token_meets_the_same_masks(compiler: GrammarCompiler) -> None:
    for seed in range(4):
        answer = walk(started(compiler, PERSON), seed)
        going = started(compiler, PERSON)
        for end in range(len(answer)):
            again = started(compiler, PERSON, tuple(answer[:end]))
            assert (again.forced, again.completes) == (going.forced, going.completes)
            assert allowed(again) == allowed(going)
            going.take(answer[end : end + 1])
            follow(going)


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has no niceness of its own there")
def test_compiler_threads_yield_to_steps(compiler: GrammarCompiler) -> None:
    asked = compiler._executor.submit(os.getpriority, os.PRIO_PROCESS, 0)
    nice = result_of("a thread that compiles", asked)
    assert nice == min(19, os.getpriority(os.PRIO_PROCESS, 0) + BACKGROUND_NICENESS)


def test_forced_text_is_a_single_run(compiler: GrammarCompiler) -> None:
    state = started(compiler, PERSON)
    assert text_of(state.forced) == '{"first_name":"'
    assert allowed(state) == [state.forced[0]]
    assert allowed(state, *state.forced) == sorted(ord(letter) - 32 for letter in "AG")
    assert state.may_run_ahead is False


def test_a_forced_run_to_the_end_completes_the_answer(compiler: GrammarCompiler) -> None:
    state = started(compiler, 'start: "abc"')
    assert (text_of(state.forced), state.completes) == ("abc", True)


def test_long_forced_text_is_cut_and_joined(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_grammar, "MAX_FORCED_BYTES", 200)
    text = "".join(random.Random(1).choice('abc":') for _ in range(900)).replace('"', "'")
    state = started(compiler, f'start: "{text}" /[xy]/')
    answer, runs = [], 0
    while state.forced:
        assert len(state.forced) <= 200
        runs += 1
        answer += state.forced
        state.take(state.forced)
        follow(state)
    assert text_of(answer) == text
    assert runs > 4
    assert allowed(state) == [ord("x") - 32, ord("y") - 32]


def test_draft_tokens_are_cut_where_they_are_refused_forced_or_the_end(compiler: GrammarCompiler) -> None:
    state = started(compiler, 'start: /[a-f]+/ "-xyz" | /[a-f]+/ "."')
    letters = [ord(letter) - 32 for letter in "abc-xyz"]
    assert state.count_fitting([*letters[:3], 0]) == 3
    assert state.count_fitting(letters) == 4, "after the dash everything is forced"
    assert state.count_fitting([letters[0], ord(".") - 32]) == 1, "the last token of an answer is chosen"
    before = allowed(state)
    assert allowed(state, *letters[:3]) == sorted([*before, ord("-") - 32, ord(".") - 32])
    assert allowed(state) == before


def test_a_grammar_without_rollback_takes_no_draft_tokens(compiler: GrammarCompiler) -> None:
    state = started(compiler, 'start: thought "!" /[0-9]+/\nthought[stop="."]: /[a-z ]+/')
    assert state.count_fitting([ord("a") - 32]) == 0
    follow(state)
    assert state.failure is None


def test_ignored_end_tokens_are_allowed_only_if_nothing_else_is(compiler: GrammarCompiler) -> None:
    """With ignore_eos the answer continues as long as it can."""
    text = "start: /[ab]{1,3}/"
    assert EOS in allowed(started(compiler, text, (65,)))
    state = started(compiler, text, (65,), frozenset())
    assert allowed(state) == [65, 66]
    state.take([65, 65])
    follow(state)
    assert state.completes
    # This grammar allows only the empty answer, so only EOS is allowed.
    assert allowed(started(compiler, 'start: ""', (), frozenset())) == [EOS]


def mask_of(state: GrammarState) -> list[int] | None:
    """Return the allowed tokens once known; None if the request has failed."""
    while True:
        wait_for("the answer is followed", state.follow)
        if state.failure is not None:
            return None
        masks = state.place_masks((), 1)
        if masks.wait(WITHIN_S):
            return np.flatnonzero(np.unpackbits(masks.bits[0].view(np.uint8), bitorder="little")).tolist()


GROWING = "start: /(.*a.{14}b)|(.*b.{15}c)/"
LETTERS = [ord(letter) - 32 for letter in "abc"]


def test_shared_lexer_limits_are_not_reached(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """All answers of a compiled grammar share llguidance's lexer and its cached states."""
    whole, other = started(compiler, GROWING), started(compiler, GROWING)
    expected = []
    draws = random.Random(1)
    for _ in range(40):
        expected.append(mask_of(whole))
        whole.take([draws.choice(LETTERS)])
    compiler._compiled.clear()
    monkeypatch.setitem(compiler_module.PARSER_LIMITS, "max_lexer_states", 400)
    first, other = started(compiler, GROWING), started(compiler, GROWING)
    shared = first._grammar
    draws = random.Random(2)
    while not shared.spent:
        mask_of(first)
        first.take([draws.choice(LETTERS)])
    draws = random.Random(1)
    for mask in expected:
        assert mask_of(other) == mask
        other.take([draws.choice(LETTERS)])
    assert other._grammar is not shared
    assert mask_of(first.sample()) == expected[0]
    assert mask_of(started(compiler, GROWING)) == expected[0]


LONG = 'start: "\'" /[a-z]{1500,2000}/ "\'"'


def test_a_long_answer_is_replayed_as_often_as_that_helps(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A mask looks at six places after every other letter; an answer takes one of them.
    text = 'start: "-" /(a[a-z]|b[a-y]|c[a-x]|d[a-w]|e[a-v]|f[a-u]){700,900}/ "-"'
    monkeypatch.setitem(compiler_module.PARSER_LIMITS, "max_lexer_states", 2600)
    state, first = started(compiler, text), None
    grammars = set()
    letters = [ord(letter) - 32 for letter in "abcdefghijklmnopqrstuvwxyz"]
    for length in range(1300):
        state.take([ord("-") - 32] if length == 0 else letters[:1])
        assert mask_of(state) == (letters if length % 2 else letters[:6]), length
        first = first or state._grammar
        grammars.add(state._grammar)
    assert len(grammars) > 1
    assert first is not None
    assert first.spent


def test_an_error_of_the_library_fails_and_never_ends_an_answer(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llguidance's mask of a failed matcher allows only EOS."""
    monkeypatch.setitem(compiler_module.PARSER_LIMITS, "max_lexer_states", 400)
    for _ in range(3):
        state, length = started(compiler, LONG), 0
        state.take([ord("'") - 32])
        while (mask := mask_of(state)) is not None:
            assert EOS not in mask
            assert len(mask) == 26
            state.take(LETTERS[:1])
            length += 1
        assert length > 100
        assert isinstance(state.failure, BrokenGrammar)
        assert "too many states" in state.failure.message


def test_few_answers_get_their_own_compiled_grammar(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_OWN_GRAMMARS", 2)
    monkeypatch.setitem(compiler_module.PARSER_LIMITS, "max_lexer_states", 400)
    states = [started(compiler, GROWING) for _ in range(4)]
    shared = states[0]._grammar
    draws = random.Random(1)
    while not shared.spent:
        mask_of(states[0])
        states[0].take([draws.choice(LETTERS)])
    assert [mask_of(state) is not None for state in states] == [True, True, False, False]


@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_an_answer_so_far_is_followed_in_pieces(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    """Between pieces, others get the grammar and the GIL."""
    answer = walk(started(compiler, PERSON), 1)
    going = started(compiler, PERSON)
    free = []

    def pause(seconds: float) -> None:
        free.append(going._grammar.try_lock())
        going._grammar.unlock()

    monkeypatch.setattr(compiler_module, "REPLAYED_TOKENS", pieces)
    monkeypatch.setattr(compiler_module, "time", SimpleNamespace(monotonic=time.monotonic, sleep=pause))
    for end in range(len(answer)):
        free.clear()
        again = started(compiler, PERSON, tuple(answer[:end]))
        assert free == [True] * max(0, -(-end // pieces) - 1)
        assert (again.forced, again.completes) == (going.forced, going.completes)
        assert allowed(again) == allowed(going)
        going.take(answer[end : end + 1])
        follow(going)


def test_what_is_kept_is_bounded_by_bytes(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lexer grows with its answers; fuel is rarely read if it does not."""
    reads = 0
    fuel = compiled_grammar.TokenMatcher.fuel

    def counted(matcher: compiled_grammar.TokenMatcher) -> int:
        nonlocal reads
        reads += 1
        return fuel(matcher)

    monkeypatch.setattr(compiled_grammar.TokenMatcher, "fuel", counted)
    small = "start: /[a-c]+/"
    draws, state = random.Random(1), started(compiler, small)
    for _ in range(3000):
        mask_of(state)
        state.take([draws.choice(LETTERS)])
    assert reads < 20
    monkeypatch.setattr(compiler_module, "MAX_COMPILED_BYTES", 16 * 2**20)
    sizes = []
    for number in range(6):
        text = GROWING.replace("14", str(10 + number))
        states = [started(compiler, text) for _ in range(3)]
        for _ in range(200):
            for state in states:
                mask_of(state)
                state.take([draws.choice(LETTERS)])
        sizes.append(compiler._compiled[next(reversed(compiler._compiled))][1].num_bytes)
        started(compiler, small)
        kept = [lexer.num_bytes for _, lexer in compiler._compiled.values()]
        assert sum(kept) <= 16 * 2**20
    assert min(sizes) > 2**20, "about 2 MB"
    assert 1 < len(compiler._compiled) < 7


def test_limits_fail_a_grammar_when_it_is_compiled(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequest, match="does not compile"):
        started(compiler, "start: /" + "|".join(f"(a.{{{n},{n + 900}}}b.*c)" for n in range(60)) + "/ & /x.{2,9000}y/")


def test_the_grammar_cache_evicts_the_least_recently_used(compiler: GrammarCompiler) -> None:
    compiled = 0

    def count(seconds: float) -> None:
        nonlocal compiled
        compiled += 1

    compiler.on_compiled = count
    for number in range(MAX_COMPILED_GRAMMARS + 1):
        started(compiler, f'start: "{number}"')
        started(compiler, 'start: "kept"')
    assert compiled == MAX_COMPILED_GRAMMARS + 2
    started(compiler, 'start: "0"')
    assert compiled == MAX_COMPILED_GRAMMARS + 3
