"""Real grammars for the fake model: a tokenizer of its 97 tokens, and its answers under a grammar."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from lab.testbed.conditions import wait_for
from pillion.engine.grammars.grammar_state import GrammarState
from tests.support.fake_backend import EOS, VOCAB_SIZE, kv_of, logits_of

# Tokens 0 to 94 are the printable ASCII characters; 95 is a word of two of them.
WORD = '":'


def follow(state: GrammarState) -> None:
    """Wait until a step could continue an answer: at once, unless a slow mask (e.g. on a busy machine) is followed by
    the computation of the next one."""
    wait_for("an answer to be followed", state.follow)


def write_tokenizer(folder: pathlib.Path) -> str:
    """Write the tokenizer of the fake model; return the folder."""
    letters = ["\u0120", *(chr(code) for code in range(33, 127))]
    vocab = {letter: number for number, letter in enumerate(letters)} | {WORD: 95}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(WORD[0], WORD[1])]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    assert tokenizer.token_to_id("<eos>") == EOS
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


def text_of(tokens: Sequence[int]) -> str:
    """Return the text of tokens; an end token has none."""
    return "".join(WORD if token == 95 else chr(32 + token) for token in tokens if token != EOS)


class GrammarOracle:
    """The fake model's answers under a grammar, token by token, each chosen from the whole vocabulary."""

    def __init__(self, folder: str) -> None:
        text = (pathlib.Path(folder) / "tokenizer.json").read_text()
        self._tokenizer = LLTokenizer(text, n_vocab=VOCAB_SIZE, eos_token=EOS)

    def greedy(self, prompt: Sequence[int], grammar: str, count: int) -> list[int]:
        """Return up to ``count`` tokens of the answer to ``prompt``; ends when only the end is allowed."""
        matcher = LLMatcher(self._tokenizer, grammar)
        tokens = list(prompt)
        while len(tokens) < len(prompt) + count and not matcher.is_stopped():
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.unpackbits(bits, bitorder="little")[:VOCAB_SIZE].astype(bool)
            logits = logits_of(kv_of(tokens, np.arange(len(tokens))))
            tokens.append(int(np.argmax(np.where(allowed, logits, -np.inf))))
            assert matcher.consume_token(tokens[-1])
            if tokens[-1] == EOS:
                break
        return tokens[len(prompt) :]
