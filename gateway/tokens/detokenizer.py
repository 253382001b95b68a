"""Turns ids into text, token by token: never half a UTF-8 character, and in the end the text of a full decode."""

from __future__ import annotations

import codecs
import re
from typing import Protocol

import tokenizers
from tokenizers import decoders

# A character of UTF-8 is at most four bytes, so at most four tokens can be waiting to become one.
MAX_HELD_TOKENS = 4
_REPLACEMENT = "\ufffd"
# How vocabularies of SentencePiece's family write a space, and a byte that is no character.
_SPACE = "\u2581"
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


class Spellings:
    """What each token of one model adds to a text by itself, remembered for all its answers.

    At most one entry of each kind for each id that the tokenizer knows. Threads may share it.

    Attributes:
        codec: the tokenizer.
        byte_level: whether a token's bytes do not depend on its neighbours.
        whole: texts of tokens met so far that are whole characters, for a byte-level vocabulary.
    """

    __slots__ = ("_own", "_parts", "_specials", "byte_level", "codec", "whole")

    def __init__(self, codec: tokenizers.Tokenizer) -> None:
        self.codec = codec
        self.byte_level = isinstance(codec.decoder, decoders.ByteLevel)
        self.whole: dict[int, str] = {}
        self._parts: dict[int, bytes] = {}
        self._own: dict[int, bytes] = {}
        # The library makes the whole table anew at each call, which takes longer than all else here.
        added = codec.get_added_tokens_decoder().values()
        self._specials = frozenset(token.content for token in added if token.special)

    def is_text(self, token_id: int) -> bool:
        """Whether the id is known and no special token's."""
        token = self.codec.id_to_token(token_id)
        return token is not None and token not in self._specials

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that a token of a byte-level vocabulary adds to a text; none for a special or unknown one."""
        found = self._parts.get(token_id)
        if found is not None:
            return found
        token = self.codec.id_to_token(token_id)
        if token is None:
            # Not cached: the number of unknown ids has no bound.
            return b""
        raw = b"" if token in self._specials else _bytes_of(token)
        try:
            self.whole[token_id] = raw.decode()
        except UnicodeDecodeError:
            self._parts[token_id] = raw
        return raw

    def own_bytes(self, token_id: int) -> bytes:
        """The bytes of one token by itself, of a special one its own text; none where the id is not known."""
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
    """One answer's incremental decoder. Special tokens, and ids that the tokenizer does not know, are no text."""

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; often one word, sometimes nothing."""

    def flush(self) -> str:
        """The text that is still held back. Half a character reads as U+FFFD. Call once, at the end."""


def new_detokenizer(codec: tokenizers.Tokenizer | Spellings) -> Detokenizer:
    """A decoder for one answer. ``codec`` is the tokenizer, or what is cached of it.

    Byte-level vocabularies (GPT-2's family: Llama 3, Qwen, SmolLM) map each token to bytes by itself, which is exact
    and cheap. Others (SentencePiece's family) are decoded over a window of the last tokens. There, and only there, the
    text can differ from a full decode, where a model writes broken UTF-8 right behind a whole character in byte tokens:
    a full decode takes the whole character back, a stream cannot.
    """
    spellings = codec if isinstance(codec, Spellings) else Spellings(codec)
    return _ByteLevelDetokenizer(spellings) if spellings.byte_level else _WindowDetokenizer(spellings)


class _ByteLevelDetokenizer:
    __slots__ = ("_amid", "_spellings", "_utf8", "_whole")

    def __init__(self, spellings: Spellings) -> None:
        self._spellings = spellings
        self._whole = spellings.whole
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # Whether half a character is held back.
        self._amid = False

    def push(self, token_id: int) -> str:
        if not self._amid:
            # Whole characters behind whole characters: nothing to decode.
            text = self._whole.get(token_id)
            if text is not None:
                return text
        text = self._utf8.decode(self._spellings.bytes_of(token_id))
        self._amid = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        return self._utf8.decode(b"", True)


class _WindowDetokenizer:
    """Decodes the last emitted tokens together with the held ones; the text after that of the emitted ones is new.

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
        before = self._codec.decode(self._context, skip_special_tokens=True)
        after = self._codec.decode(self._context + self._held, skip_special_tokens=True)
        if after.endswith(_REPLACEMENT) and not final:
            return ""
        self._context, self._held = self._held, []
        return str(after[len(before) :])


def _bytes_of(token: str) -> bytes:
    """The bytes of a token. One outside the byte alphabet was added by hand and stands for its own text."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: printable Latin-1 stands for itself, the other bytes for U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
