"""Converts sampled tokens to what a client may see: detokenization, stop ids and stop strings.

token --> text --> (reasoning and calls: :mod:`pillion.gateway.formats`) --> stop strings --> delta

The detokenizer converts ids one by one, without partial UTF-8 characters; the concatenated result equals a full decode.
Stop strings are found across piece boundaries: StopStrings is a request's Aho-Corasick automaton, with a StopMatcher
per answer.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from functools import lru_cache
from typing import NamedTuple, Protocol

import tokenizers
from tokenizers import decoders

from pillion.types import TokenLogprob, ToolCallDelta

# Max tokens that may together be an incomplete character.
MAX_HELD_TOKENS = 4
_REPLACEMENT = "\ufffd"
_SPACE = "\u2581"
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


class Spellings:
    """Cached texts of one model's tokens, for all its answers.

    The cache has at most one entry of each kind per token id. Thread-safe.

    Attributes:
        codec: the tokenizer.
        byte_level: whether the vocabulary is byte-level, i.e. a token's bytes do not depend on its neighbours.
        whole: cached texts of tokens that are whole characters, by id; byte-level only.
        hides_specials: whether special tokens have no text.
    """

    __slots__ = ("_own", "_parts", "_showing", "_specials", "byte_level", "codec", "hides_specials", "whole")

    def __init__(self, codec: tokenizers.Tokenizer, *, hides_specials: bool = True) -> None:
        self.codec = codec
        self.hides_specials = hides_specials
        self._showing: Spellings | None = None
        self.byte_level = isinstance(codec.decoder, decoders.ByteLevel)
        self.whole: dict[int, str] = {}
        self._parts: dict[int, bytes] = {}
        self._own: dict[int, bytes] = {}
        # Called once: the library builds the whole table at each call.
        added = codec.get_added_tokens_decoder().values()
        self._specials = frozenset(token.content for token in added if token.special)

    def showing_specials(self) -> Spellings:
        """Return the same model's spellings in which special tokens have their text."""
        if self._showing is None:
            self._showing = Spellings(self.codec, hides_specials=False)
        return self._showing

    def is_text(self, token_id: int) -> bool:
        """Return whether the id is in the vocabulary and not that of a hidden special token."""
        token = self.codec.id_to_token(token_id)
        return token is not None and not (self.hides_specials and token in self._specials)

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token of a byte-level vocabulary; b"" for an unknown id or a hidden special token."""
        cached = self._parts.get(token_id)
        if cached is not None:
            return cached
        token = self.codec.id_to_token(token_id)
        if token is None:
            # Not cached, since the number of unknown ids is unlimited.
            return b""
        raw = _bytes_of(token)
        if token in self._specials:
            raw = b"" if self.hides_specials else token.encode()
        try:
            self.whole[token_id] = raw.decode()
        except UnicodeDecodeError:
            self._parts[token_id] = raw
        return raw

    def own_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token without context; a special token has its text, an unknown id b""."""
        cached = self._own.get(token_id)
        if cached is not None:
            return cached
        token = self.codec.id_to_token(token_id)
        if token is None:
            return b""
        if token in self._specials:
            raw = token.encode()
        elif self.byte_level:
            raw = _bytes_of(token)
        elif _BYTE_TOKEN.fullmatch(token):
            raw = bytes([int(token[3:5], 16)])
        else:
            raw = token.replace(_SPACE, " ").encode()
        self._own[token_id] = raw
        return raw


class Detokenizer(Protocol):
    """Incremental decoder of one answer. Hidden special tokens and unknown ids have no text."""

    def push(self, token_id: int) -> str:
        """Return the text that is complete with this token; often one word, sometimes nothing."""

    def flush(self) -> str:
        """Return the text still held back, with U+FFFD for a partial character. Call it once, at the end."""


def new_detokenizer(codec: tokenizers.Tokenizer | Spellings) -> Detokenizer:
    """Create a decoder for one answer. ``codec`` is the tokenizer, or its cached spellings.

    Byte-level vocabularies (GPT-2's family: Llama 3, Qwen, SmolLM) map each token to bytes independently, which is
    exact and cheap. Others (SentencePiece's family) are decoded over a window of the last tokens. Only there, the text
    can differ from a full decode, if a model writes invalid UTF-8 right after a whole character in byte tokens: a full
    decode revokes the character, a stream cannot.
    """
    spellings = codec if isinstance(codec, Spellings) else Spellings(codec)
    return _ByteLevelDetokenizer(spellings) if spellings.byte_level else _WindowDetokenizer(spellings)


class NoText:
    """:class:`Detokenizer` for answers of which only the tokens are requested."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class _ByteLevelDetokenizer:
    """Decoder of tokens that are bytes, independently of their neighbours."""

    __slots__ = ("_in_character", "_spellings", "_utf8", "_whole")

    def __init__(self, spellings: Spellings) -> None:
        self._spellings = spellings
        self._whole = spellings.whole
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._in_character = False

    def push(self, token_id: int) -> str:
        if not self._in_character:
            text = self._whole.get(token_id)
            if text is not None:
                return text
        text = self._utf8.decode(self._spellings.bytes_of(token_id))
        self._in_character = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        return self._utf8.decode(b"", True)


class _WindowDetokenizer:
    """Decodes a window: the tokens emitted last, and those held back, whose text is new. The former are context, since
    a token's text depends on its predecessor (leading spaces)."""

    __slots__ = ("_codec", "_context", "_held", "_spellings")

    def __init__(self, spellings: Spellings) -> None:
        self._codec = spellings.codec
        self._spellings = spellings
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        if not self._spellings.is_text(token_id):
            return ""
        self._held.append(token_id)
        return self._decode(final=len(self._held) >= MAX_HELD_TOKENS)

    def flush(self) -> str:
        return self._decode(final=True)

    def _decode(self, final: bool) -> str:
        """Return the text of the held tokens, unless it ends within a character and is not ``final``."""
        if not self._held:
            return ""
        hides = self._spellings.hides_specials
        before = self._codec.decode(self._context, skip_special_tokens=hides)
        after = self._codec.decode(self._context + self._held, skip_special_tokens=hides)
        if after.endswith(_REPLACEMENT) and not final:
            return ""
        self._context, self._held = self._held, []
        return str(after[len(before) :])


def _bytes_of(token: str) -> bytes:
    """Return the bytes of a byte-level vocabulary's token. An added token, with characters outside the byte alphabet,
    is plain text."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's byte alphabet, bytes by character: printable Latin-1 is itself, other bytes are U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


class StopStrings:
    """Aho-Corasick automaton of stop strings, with a constant cost per character.

    A state is a prefix of a stop string; a text's state is its longest suffix that is one. A string's states have
    consecutive numbers, so that an integer and a character describe most of them.

    Attributes:
        stops: the strings, none of them empty.
        begin: the strings' first characters.
        matched: per state, the length of the longest stop string that is its suffix, or 0.
        held: per state, the number of last characters that can still become a stop string.
    """

    __slots__ = ("_branches", "_failure", "_labels", "begin", "held", "matched", "stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self.begin = frozenset(stop[0] for stop in self.stops)
        # Per state, the character that leads to the next number's state, or "".
        self._labels = [""]
        self._branches: dict[int, dict[str, int]] = {}
        # Per state: its parent, the character from there, its length, and the length again if it is a whole stop
        # string, else 0.
        parents, characters, lengths, ends = [0], [""], [0], [0]
        for stop in self.stops:
            state = length = 0
            while length < len(stop) and (following := self._edge(state, stop[length])):
                state, length = following, length + 1
            rest, first = stop[length:], len(ends)
            if rest:
                self._add_edge(state, rest[0], first)
                self._labels += [*rest[1:], ""]
                parents += [state, *range(first, first + len(rest) - 1)]
                characters += rest
                lengths += range(length + 1, len(stop) + 1)
                ends += [0] * len(rest)
                state = len(ends) - 1
            ends[state] = len(stop)
        self._link(parents, characters, lengths, ends)

    def step(self, state: int, character: str) -> int:
        """Return the state after ``character``."""
        labels, branches = self._labels, self._branches
        while labels[state] != character:
            if state in branches and character in branches[state]:
                return branches[state][character]
            if not state:
                return 0
            state = self._failure[state]
        return state + 1

    def _edge(self, state: int, character: str) -> int:
        """Return the state to which ``character`` leads from ``state``, or 0."""
        return state + 1 if self._labels[state] == character else self._branches.get(state, {}).get(character, 0)

    def _add_edge(self, state: int, character: str, following: int) -> None:
        if following == state + 1:
            self._labels[state] = character
        else:
            self._branches.setdefault(state, {})[character] = following

    def _link(self, parents: list[int], characters: list[str], lengths: list[int], ends: list[int]) -> None:
        """Compute the failure links: each state's longest proper suffix that is a state, in order of length."""
        labels, branches, step, count = self._labels, self._branches, self.step, len(ends)
        matched, held, suffixes = ends, lengths.copy(), [0] * count
        self.matched, self.held, self._failure = matched, held, (failure := [0] * count)
        for state in sorted(range(1, count), key=lengths.__getitem__):
            suffix = step(suffixes[parents[state]], characters[state]) if parents[state] else 0
            suffixes[state] = suffix
            matched[state] = matched[state] or matched[suffix]
            label = labels[state]
            if not label and state not in branches:
                held[state] = held[suffix]
            # Skip a suffix that has no other next character: it would fail too.
            fails_too = suffix not in branches and labels[suffix] in ("", label)
            failure[state] = failure[suffix] if fails_too else suffix


# An application's requests, and the prompts of one request, usually have the same stop strings.
@lru_cache(16)
def stop_strings(stops: tuple[str, ...]) -> StopStrings:
    """Return the shared automaton of ``stops``."""
    return StopStrings(stops)


@dataclass(slots=True, eq=False)
class StopMatcher:
    """Filter of an answer's text that stops at a stop string, which is emitted only if ``included``.

    Text that could still become a stop string is held back. The match that ends first wins, of two that end together
    the longer one, so that the result does not depend on how the text is split. A stop string that ends within text
    given to :meth:`pass_by` is ignored; one that begins there and ends later counts.

    Attributes:
        found: the complete stop string, or "".
    """

    _strings: StopStrings
    _included: bool = False
    _state: int = 0
    _held: str = ""
    found: str = ""

    @property
    def stopped(self) -> bool:
        """True if a stop string is complete."""
        return bool(self.found)

    def push(self, piece: str) -> str:
        """Read a piece of the answer, and return the text that is certain now; "" once ``stopped``."""
        return "" if self.found else self._read(piece, self._strings.matched)

    def pass_by(self, piece: str) -> str:
        """Read a piece in which stop strings may begin but not end; return the text that is certain now."""
        return self._read(piece, None)

    def flush(self) -> str:
        """Return the text held back. Call it once, at the end."""
        held, self._held = self._held, ""
        return held

    def _read(self, piece: str, matched: Sequence[int] | None) -> str:
        """Read ``piece`` up to the first complete stop string; ``matched``: their lengths by state, None to ignore
        them."""
        strings, state = self._strings, self._state
        if not state and strings.begin.isdisjoint(piece):
            # Fast path of nearly all pieces.
            return piece
        text = self._held + piece
        for end, character in enumerate(piece, len(self._held) + 1):
            state = strings.step(state, character)
            if matched is not None and matched[state]:
                begin = end - matched[state]
                self._held, self.found = "", text[begin:end]
                return text[: end if self._included else begin]
        self._state = state
        certain = len(text) - strings.held[state]
        self._held = text[certain:]
        return text[:certain]


class StopRules(NamedTuple):
    """Conditions that end an answer: stop strings and stop ids, after ``min_tokens``. ``included``: the text keeps the
    stop string or stop token."""

    strings: StopStrings
    ids: frozenset[int]
    min_tokens: int
    included: bool = False


class AnswerDelta(NamedTuple):
    """New parts of an answer: content that is certain, tokens, their log probabilities if requested, reasoning,
    and tool calls."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(slots=True, eq=False)
class AnswerText:
    """Text of one growing answer, over all attempts.

    ``stopped`` turns true with the token that completes a stop string; later tokens are not part of the answer. The
    stop string's text is part of it only if ``included``. A stop id is part of the tokens, and of the text only if
    ``included``. The first ``min_tokens`` tokens complete no stop string, but may begin one.

    Attributes:
        completion_tokens: number of tokens so far.
        reasoning_tokens: tokens of the reasoning, up to the one that ended it.
        calls: number of tool calls begun.
    """

    _detokenizer: Detokenizer
    strings: InitVar[StopStrings]
    # Ids whose text is not emitted.
    _stop_ids: frozenset[int]
    min_tokens: int = 0
    included: InitVar[bool] = False
    _has_stops: bool = field(init=False)
    _stops: StopMatcher = field(init=False)
    _ended: bool = field(default=False, init=False)
    completion_tokens: int = field(default=0, init=False)
    reasoning_tokens: int = field(default=0, init=False)
    calls: int = field(default=0, init=False)

    def __post_init__(self, strings: StopStrings, included: bool) -> None:
        self._has_stops, self._stops = bool(strings.stops), StopMatcher(strings, included)
        if included:
            self._stop_ids = frozenset()

    @property
    def stopped(self) -> bool:
        """True if a stop string is complete."""
        return self._stops.stopped

    @property
    def stop_string(self) -> str:
        """Complete stop string, or ""."""
        return self._stops.found

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> AnswerDelta:
        """Add tokens to the answer, up to the one that completes a stop string.

        Args:
            token_ids: the answer's next tokens.
            logprobs: a log probability for each token, or none.
        """
        if not self._has_stops:
            # Fast path: most answers have no stop strings.
            self.completion_tokens += len(token_ids)
            pushed = [self._detokenizer.push(one) for one in token_ids if one not in self._stop_ids]
            return AnswerDelta("".join(pushed), tuple(token_ids), tuple(logprobs))
        return self._push_each(token_ids, logprobs)

    def _push_each(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> AnswerDelta:
        texts: list[str] = []
        for token_id in token_ids:
            if self.stopped:
                break
            self.completion_tokens += 1
            texts.append(self._match_stops(self._content_of(token_id)))
        return self._delta("".join(texts), tuple(token_ids[: len(texts)]), tuple(logprobs[: len(texts)]))

    def _content_of(self, token_id: int) -> str:
        """Return a token's contribution to the content."""
        return "" if token_id in self._stop_ids else self._detokenizer.push(token_id)

    def _last_content(self, cut: bool) -> str:
        """Return the content held back for a further token."""
        return self._detokenizer.flush()

    def _delta(self, text: str, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> AnswerDelta:
        return AnswerDelta(text, token_ids, logprobs)

    def flush(self, cut: bool = False) -> AnswerDelta:
        """Return the text still held back. Call it once, at the end of the stream. ``cut``: max_tokens ended it."""
        if self._ended or self.stopped:
            return AnswerDelta("", ())
        self._ended = True
        if not self._has_stops:
            return self._delta(self._last_content(cut), (), ())
        last = self._delta(self._match_stops(self._last_content(cut)), (), ())
        return last if self.stopped else last._replace(text=last.text + self._stops.flush())

    def _match_stops(self, text: str) -> str:
        early = self.completion_tokens <= self.min_tokens
        return self._stops.pass_by(text) if early else self._stops.push(text)
