"""Writes log probabilities in OpenAI's two forms: an entry for each token for conversations, a list for each field for
completions.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from pillion.gateway.tokens.answer_text import Spellings
from pillion.types import TokenLogprob

# JSON has no infinity; OpenAI uses this number for a token that is as good as impossible.
LEAST_LOGPROB = -9999.0


class TokenTexts:
    """Finds the bytes and texts of a model's tokens. With ``by_ids``, a token's text is "token_id:" and its id, as vLLM
    writes it, because several tokens may have one text."""

    def __init__(self, spellings: Spellings, *, by_ids: bool = False) -> None:
        # This function returns a token's own bytes, which may be a part of a character.
        self.bytes_of = spellings.own_bytes
        # This function says whether a token is no special one.
        self.is_text = spellings.is_text
        self._by_ids = by_ids

    def text_of(self, token_id: int) -> str:
        """Returns the token's text; bytes that are no whole characters are written as OpenAI does, ``bytes:\\xe2``."""
        if self._by_ids:
            return f"token_id:{token_id}"
        raw = self.bytes_of(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def chat(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Returns log probabilities for a conversation: one entry for each token, each with its alternatives."""
        content = [
            {
                **self._entry(one.token_id, one.logprob),
                "top_logprobs": [self._entry(*top) for top in zip(one.top_ids, one.top_logprobs, strict=True)],
            }
            for one in logprobs
        ]
        return {"content": content, "refusal": None}

    def prompt(self, logprobs: Sequence[TokenLogprob], most: int) -> list[dict[str, Any] | None]:
        """Returns log probabilities of a prompt in vLLM's form: null for its first token, then each token and its
        ``most`` likeliest alternatives, by id."""
        return [None, *(self._ranked(one, most) for one in logprobs)]

    def _ranked(self, one: TokenLogprob, most: int) -> dict[str, Any]:
        tops = enumerate(zip(one.top_ids[:most], one.top_logprobs[:most], strict=True), 1)
        ranked = [(one.token_id, one.logprob, one.rank), *((top, value, rank) for rank, (top, value) in tops)]
        # A prompt's own token goes first, with its own rank, and is not listed again among the likeliest.
        return {
            str(token_id): {
                "logprob": _finite(logprob),
                "rank": rank,
                "decoded_token": self.bytes_of(token_id).decode(errors="replace"),
            }
            for token_id, logprob, rank in [*ranked[:1], *(top for top in ranked[1:] if top[0] != one.token_id)]
        }

    def completion(
        self, logprobs: Sequence[TokenLogprob], place: TextPlace, first_token: int | None = None
    ) -> dict[str, Any]:
        """Returns log probabilities of a completion's next tokens, one list for each field; ``place`` is where they
        begin in its text, and moves on. ``first_token``, of an echoed prompt, goes before them and has no log
        probability."""
        tokens, offsets, tops = [], [], []
        values: list[float | None] = [_finite(one.logprob) for one in logprobs]
        if first_token is not None:
            tokens.append(self.text_of(first_token))
            offsets.append(place.pass_by(first_token))
            values.insert(0, None)
        for one in logprobs:
            text = self.text_of(one.token_id)
            tokens.append(text)
            offsets.append(place.pass_by(one.token_id))
            alternatives = zip(one.top_ids, one.top_logprobs, strict=True)
            # The answer's token itself is always among the alternatives, so there may be one more than was asked for.
            tops.append(
                {self.text_of(top): _finite(value) for top, value in alternatives} | {text: _finite(one.logprob)}
            )
        return {
            "text_offset": offsets,
            "token_logprobs": values,
            "tokens": tokens,
            "top_logprobs": tops if first_token is None else [None, *tops],
        }

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self.bytes_of(token_id)
        text = self.text_of(token_id) if self._by_ids else raw.decode(errors="replace")
        return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}


class TextPlace:
    """Finds where each of the tokens of a text begins in it, in characters.

    Args:
        tokens: the texts of the tokens.
        echoed: the prompt with which the text begins; "" where it begins with none.
        prompt_tokens: so many of the tokens are the echoed prompt's.
        shows_specials: whether special tokens of the answer stand in the text.
    """

    def __init__(self, tokens: TokenTexts, echoed: str, prompt_tokens: int, shows_specials: bool) -> None:
        self._tokens = tokens
        self._echoed = echoed
        self._left = prompt_tokens
        self._shows_specials = shows_specials
        self._offset = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def pass_by(self, token_id: int) -> int:
        """Returns where the text's next token begins. A token that brings the rest of a character begins where the
        character does."""
        begin, text = self._offset, self._utf8.decode(self._tokens.bytes_of(token_id))
        is_text = self._tokens.is_text(token_id)
        if not self._left:
            self._offset += len(text) if is_text or self._shows_specials else 0
            return begin
        # What the tokenizer has put before a prompt is not in it: a beginning-of-text token, and a space.
        bare = text.removeprefix(" ")
        if self._echoed.startswith(text, begin):
            self._offset += len(text)
        elif is_text:
            self._offset += len(bare if self._echoed.startswith(bare, begin) else text)
        self._left -= 1
        if not self._left:
            self._offset = len(self._echoed)
            self._utf8.reset()
        return begin


def _finite(logprob: float) -> float:
    """Returns ``logprob``, or LEAST_LOGPROB where it is less or NaN."""
    return logprob if logprob >= LEAST_LOGPROB else LEAST_LOGPROB
