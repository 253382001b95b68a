"""Turns sampled tokens into what a client may see: detokenizing, stop ids and stop strings.

token --> text --> (what else the answer may hold: :mod:`pillion.gateway.formats`) --> stop strings --> delta

The detokenizer turns ids into text, token by token: it never gives half a UTF-8 character, and its pieces add up to the
text of a full decode. Stop strings are found wherever the pieces of text are cut: StopStrings is the automaton of one
request (Aho and Corasick's), and each of its answers has a StopMatcher over it.
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

# A character of UTF-8 is at most four bytes, so at most four tokens can be waiting to become one.
MAX_HELD_TOKENS = 4
_REPLACEMENT = "\ufffd"
# Vocabularies of SentencePiece's family write a space with this character.
_SPACE = "\u2581"
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


class Spellings:
    """Remembers what each token of one model adds to a text by itself, for all its answers.

    The memory has at most one entry of each kind for each id that the tokenizer knows. Threads may share it.

    Attributes:
        codec: the tokenizer.
        byte_level: whether a token's bytes do not depend on its neighbours.
        whole: texts of tokens met so far that are whole characters, for a byte-level vocabulary.
        hides_specials: whether special tokens add no text.
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
        # The library makes the whole table anew at each call, which takes longer than the rest of this method.
        added = codec.get_added_tokens_decoder().values()
        self._specials = frozenset(token.content for token in added if token.special)

    def showing_specials(self) -> Spellings:
        """Returns the spellings of the same model for texts that show special tokens."""
        if self._showing is None:
            self._showing = Spellings(self.codec, hides_specials=False)
        return self._showing

    def is_text(self, token_id: int) -> bool:
        """Returns whether the tokenizer knows the id, and it is not that of a special token that adds no text."""
        token = self.codec.id_to_token(token_id)
        return token is not None and not (self.hides_specials and token in self._specials)

    def bytes_of(self, token_id: int) -> bytes:
        """Gives the bytes that a token of a byte-level vocabulary adds to a text; none for an unknown one, nor for a
        special one that adds no text."""
        found = self._parts.get(token_id)
        if found is not None:
            return found
        token = self.codec.id_to_token(token_id)
        if token is None:
            # This result is not cached, because the number of unknown ids has no bound.
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
        """Returns the bytes of one token by itself, for a special token its own text; none if the id is not known."""
        found = self._own.get(token_id)
        if found is not None:
            return found
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
    """Decodes one answer step by step. Special tokens, where they are not shown, and ids that the tokenizer does not
    know add no text."""

    def push(self, token_id: int) -> str:
        """Returns the text that became certain with this token; often one word, sometimes nothing."""

    def flush(self) -> str:
        """Returns the text that is still held back. Half a character reads as U+FFFD. Call it once, at the end."""


def new_detokenizer(codec: tokenizers.Tokenizer | Spellings) -> Detokenizer:
    """Makes a decoder for one answer. ``codec`` is the tokenizer, or its cached spellings.

    Byte-level vocabularies (GPT-2's family: Llama 3, Qwen, SmolLM) map each token to bytes by itself, which is exact
    and cheap. Others (SentencePiece's family) are decoded over a window of the last tokens. There, and only there, the
    text can differ from a full decode, where a model writes broken UTF-8 right after a whole character in byte tokens:
    a full decode takes the whole character back, a stream cannot.
    """
    spellings = codec if isinstance(codec, Spellings) else Spellings(codec)
    return _ByteLevelDetokenizer(spellings) if spellings.byte_level else _WindowDetokenizer(spellings)


class NoText:
    """Implements :class:`Detokenizer` for answers of which only the tokens are wanted."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class _ByteLevelDetokenizer:
    __slots__ = ("_amid", "_spellings", "_utf8", "_whole")

    def __init__(self, spellings: Spellings) -> None:
        self._spellings = spellings
        self._whole = spellings.whole
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # This says whether half a character is held back.
        self._amid = False

    def push(self, token_id: int) -> str:
        if not self._amid:
            # A token of whole characters that follows whole characters needs no decoding.
            text = self._whole.get(token_id)
            if text is not None:
                return text
        text = self._utf8.decode(self._spellings.bytes_of(token_id))
        self._amid = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        return self._utf8.decode(b"", True)


class _WindowDetokenizer:
    """Decodes an answer's last emitted tokens together with those that are held back; the text after that of the
    emitted ones is new.

    The window begins with tokens already emitted because a token's text depends on the one before it (leading spaces).
    """

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
        return self._take(final=len(self._held) >= MAX_HELD_TOKENS)

    def flush(self) -> str:
        return self._take(final=True)

    def _take(self, final: bool) -> str:
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
    """Returns the bytes of a token. A token with characters outside of the byte alphabet was added to the vocabulary
    later and stands for its own text."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """Returns the characters that GPT-2 prints for bytes, with the bytes: printable Latin-1 stands for itself, the
    other bytes for U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


# Requests of one application have the same stop strings, and so have the prompts of one list, so this many automata of
# stop strings are kept.
_KEPT_AUTOMATA = 16


class StopStrings:
    """Holds stop strings as an automaton over characters: reading a character costs the same however many and long they
    are.

    A state is a beginning of some stop string, and the text's state is the longest one with which the text ends. States
    of one string are numbered one after the other, so one integer and one character describe most of them.

    Attributes:
        stops: the strings, none of them empty.
        begin: the characters with which a stop string begins.
        matched: for each state, the length of the longest stop string with which it ends; 0 where it ends with none.
        held: for each state, how many of the text's last characters can still become a stop string.
    """

    __slots__ = ("_branches", "_instead", "_labels", "begin", "held", "matched", "stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self.begin = frozenset(stop[0] for stop in self.stops)
        # For each state this is the character that leads to the state with the next number; "" where none does.
        self._labels = [""]
        # These are the other edges: for each state, where its further characters lead.
        self._branches: dict[int, dict[str, int]] = {}
        # For each state these lists have the state before it, the character between them, its length, and that of the
        # stop string that it is.
        before, characters, lengths, ends = [0], [""], [0], [0]
        for stop in self.stops:
            state = length = 0
            while length < len(stop) and (following := self._edge(state, stop[length])):
                state, length = following, length + 1
            rest, first = stop[length:], len(ends)
            if rest:
                self._add_edge(state, rest[0], first)
                self._labels += [*rest[1:], ""]
                before += [state, *range(first, first + len(rest) - 1)]
                characters += rest
                lengths += range(length + 1, len(stop) + 1)
                ends += [0] * len(rest)
                state = len(ends) - 1
            ends[state] = len(stop)
        self._link(before, characters, lengths, ends)

    def step(self, state: int, character: str) -> int:
        """Returns the state after ``character``."""
        labels, branches = self._labels, self._branches
        while labels[state] != character:
            if state in branches and character in branches[state]:
                return branches[state][character]
            if not state:
                return 0
            state = self._instead[state]
        return state + 1

    def _edge(self, state: int, character: str) -> int:
        """Returns the state to which ``character`` leads from ``state``; 0 where it leads nowhere."""
        return state + 1 if self._labels[state] == character else self._branches.get(state, {}).get(character, 0)

    def _add_edge(self, state: int, character: str, following: int) -> None:
        if following == state + 1:
            self._labels[state] = character
        else:
            self._branches.setdefault(state, {})[character] = following

    def _link(self, before: list[int], characters: list[str], lengths: list[int], ends: list[int]) -> None:
        """Finds, for each state's text, the longest proper suffix that is a state too; those of shorter states must be
        known by then."""
        labels, branches, step, count = self._labels, self._branches, self.step, len(ends)
        matched, held, suffixes = ends, lengths.copy(), [0] * count
        self.matched, self.held, self._instead = matched, held, (instead := [0] * count)
        for state in sorted(range(1, count), key=lengths.__getitem__):
            suffix = step(suffixes[before[state]], characters[state]) if before[state] else 0
            suffixes[state] = suffix
            matched[state] = matched[state] or matched[suffix]
            label = labels[state]
            if not label and state not in branches:
                held[state] = held[suffix]
            # A suffix without an edge of another character would be tried in vain.
            in_vain = suffix not in branches and labels[suffix] in ("", label)
            instead[state] = instead[suffix] if in_vain else suffix


@lru_cache(_KEPT_AUTOMATA)
def stop_strings(stops: tuple[str, ...]) -> StopStrings:
    """Returns the automaton of ``stops``, which all answers of all requests with the same strings share."""
    return StopStrings(stops)


@dataclass(slots=True, eq=False)
class StopMatcher:
    """Lets an answer's text through until a stop string is complete; nothing of a stop string is ever let through, or
    all of it where it is ``included``.

    Text that could still become a stop string is held back: less than the longest of them. The match that is complete
    first wins, and of two that end together the longer one, so the outcome does not depend on where pieces are cut.
    A stop string that ends in text that is only passed counts for nothing; one that begins there and ends later counts.

    Attributes:
        found: the stop string that is complete; "" while none is.
    """

    _strings: StopStrings
    _included: bool = False
    _state: int = 0
    _held: str = ""
    found: str = ""

    @property
    def stopped(self) -> bool:
        """Says whether a stop string is complete."""
        return bool(self.found)

    def push(self, piece: str) -> str:
        """Reads a piece of the answer, and returns the text that is certain now. Once ``stopped`` is true, later pieces
        give nothing."""
        return "" if self.found else self._read(piece, self._strings.matched)

    def pass_by(self, piece: str) -> str:
        """Reads a piece that no stop string may end in, and returns the text that is certain now. A stop string that
        ends in ``piece`` comes too early and is ignored."""
        return self._read(piece, None)

    def flush(self) -> str:
        """Returns text that was held back and turned out to be no stop string. Call it once, at the end."""
        held, self._held = self._held, ""
        return held

    def _read(self, piece: str, matched: Sequence[int] | None) -> str:
        """Moves on through ``piece``, to the first stop string that is complete by ``matched``."""
        strings, state = self._strings, self._state
        if not state and strings.begin.isdisjoint(piece):
            # Nearly every piece of text begins no stop string and takes this short way.
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
    """Says when an answer ends by its text or tokens: by stop strings and stop ids, but not before ``min_tokens``. What
    stops it is part of its text where it is ``included``."""

    strings: StopStrings
    ids: frozenset[int]
    min_tokens: int
    included: bool = False


class AnswerDelta(NamedTuple):
    """Holds new text that is certain, and the tokens it came with, with their log probabilities if they are known."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(slots=True, eq=False)
class AnswerText:
    """Follows one answer as it grows, over all attempts.

    ``stopped`` turns true with the token that completes a stop string; tokens after it are not part of the answer. The
    stop string's own text is only where it is ``included``. A stop id is part of the tokens, and of the text only where
    what stops the answer is included. The first ``min_tokens`` tokens complete no stop string; one that begins in them
    may be completed by a later token.

    Attributes:
        completion_tokens: number of tokens so far.
        reasoning_tokens: how many of these tokens were reasoning, up to the one that ended it.
        calls: number of calls of tools that have begun.
    """

    _detokenizer: Detokenizer
    strings: InitVar[StopStrings]
    # The texts of these ids are no part of the answer's.
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
        """Says whether a stop string is complete."""
        return self._stops.stopped

    @property
    def stop_string(self) -> str:
        """Gives the stop string that is complete; "" while none is."""
        return self._stops.found

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> AnswerDelta:
        """Adds tokens to the answer: all of them, or those up to the one that completes a stop string.

        Args:
            token_ids: the answer's next tokens.
            logprobs: a log probability for each token, or none.
        """
        if not self._has_stops:
            # Most answers have no stop strings, so there is nothing to look for.
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
        """Returns the text that a token adds to the answer's content."""
        return "" if token_id in self._stop_ids else self._detokenizer.push(token_id)

    def _last_content(self, cut: bool) -> str:
        """Returns the content that was held back for want of a further token."""
        return self._detokenizer.flush()

    def _delta(self, text: str, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> AnswerDelta:
        return AnswerDelta(text, token_ids, logprobs)

    def flush(self, cut: bool = False) -> AnswerDelta:
        """Returns the text that is still held back. Call it once, when the stream has ended. ``cut``: max_tokens ended
        it."""
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
