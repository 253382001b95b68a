"""Log probabilities in OpenAI's two forms: one entry per token for chats, one list per field for completions."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from pillion.gateway.tokens.answer_text import Spellings
from pillion.types import TokenLogprob

# OpenAI's log probability of a token of probability 0, since JSON has no infinity.
MIN_LOGPROB = -9999.0


class TokenTexts:
    """Bytes and texts of a model's tokens. With ``by_ids``, a token's text is "token_id:" and its id, as in vLLM, since
    several tokens may have the same text."""

    def __init__(self, spellings: Spellings, *, by_ids: bool = False) -> None:
        self.bytes_of = spellings.own_bytes
        self.is_text = spellings.is_text
        self._by_ids = by_ids

    def text_of(self, token_id: int) -> str:
        """Return the token's text; incomplete characters are escaped as OpenAI does: ``bytes:\\xe2``."""
        if self._by_ids:
            return f"token_id:{token_id}"
        raw = self.bytes_of(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def chat(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return log probabilities for a chat: one entry per token, with its alternatives."""
        content = [
            {
                **self._entry(one.token_id, one.logprob),
                "top_logprobs": [self._entry(*top) for top in zip(one.top_ids, one.top_logprobs, strict=True)],
            }
            for one in logprobs
        ]
        return {"content": content, "refusal": None}

    def prompt(self, logprobs: Sequence[TokenLogprob], max_top: int) -> list[dict[str, Any] | None]:
        """Return log probabilities of a prompt in vLLM's form: null for its first token, then per token itself and its
        ``max_top`` best alternatives, by id."""
        return [None, *(self._ranked(one, max_top) for one in logprobs)]

    def _ranked(self, one: TokenLogprob, max_top: int) -> dict[str, Any]:
        tops = enumerate(zip(one.top_ids[:max_top], one.top_logprobs[:max_top], strict=True), 1)
        ranked = [(one.token_id, one.logprob, one.rank), *((top, value, rank) for rank, (top, value) in tops)]
        # The prompt's token goes first, with its rank, and is not repeated.
        return {
            str(token_id): {
                "logprob": _finite(logprob),
                "rank": rank,
                "decoded_token": self.bytes_of(token_id).decode(errors="replace"),
            }
            for token_id, logprob, rank in [*ranked[:1], *(top for top in ranked[1:] if top[0] != one.token_id)]
        }

    def completion(
        self, logprobs: Sequence[TokenLogprob], position: TokenOffsets, first_token: int | None = None
    ) -> dict[str, Any]:
        """Return log probabilities of a completion's next tokens, one list per field, and advance ``position``.

        ``first_token`` is that of an echoed prompt: it comes first, without a log probability.
        """
        tokens, offsets, tops = [], [], []
        values: list[float | None] = [_finite(one.logprob) for one in logprobs]
        if first_token is not None:
            tokens.append(self.text_of(first_token))
            offsets.append(position.advance(first_token))
            values.insert(0, None)
        for one in logprobs:
            text = self.text_of(one.token_id)
            tokens.append(text)
            offsets.append(position.advance(one.token_id))
            alternatives = zip(one.top_ids, one.top_logprobs, strict=True)
            # The answer's token is always included, so there may be one more than requested.
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


class TokenOffsets:
    """Position in a text, in characters, that advances token by token.

    Args:
        tokens: the texts of the tokens.
        echoed: the prompt that the text starts with, or "".
        prompt_tokens: number of the echoed prompt's tokens.
        shows_specials: whether the text contains special tokens of the answer.
    """

    def __init__(self, tokens: TokenTexts, echoed: str, prompt_tokens: int, shows_specials: bool) -> None:
        self._tokens = tokens
        self._echoed = echoed
        self._prompt_tokens_left = prompt_tokens
        self._shows_specials = shows_specials
        self._offset = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def advance(self, token_id: int) -> int:
        """Return the offset of the next token; one that continues a character has the character's offset."""
        begin, text = self._offset, self._utf8.decode(self._tokens.bytes_of(token_id))
        is_text = self._tokens.is_text(token_id)
        if not self._prompt_tokens_left:
            self._offset += len(text) if is_text or self._shows_specials else 0
            return begin
        # The tokenizer may have put a BOS token and a space before the prompt.
        unspaced = text.removeprefix(" ")
        if self._echoed.startswith(text, begin):
            self._offset += len(text)
        elif is_text:
            self._offset += len(unspaced if self._echoed.startswith(unspaced, begin) else text)
        self._prompt_tokens_left -= 1
        if not self._prompt_tokens_left:
            self._offset = len(self._echoed)
            self._utf8.reset()
        return begin


def _finite(logprob: float) -> float:
    """Return ``logprob``, or MIN_LOGPROB if it is less or NaN."""
    return logprob if logprob >= MIN_LOGPROB else MIN_LOGPROB
