"""Changes of a stream's logits by its sampling parameters, compiled once per stream.

Each parameter becomes part of an edit, which kernels apply (:class:`pillion.kernels.step.RowEdit`), or of the mask of
allowed tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

import numpy as np

from pillion.engine.sampling.allowed_masks import mask_of
from pillion.kernels.step import NO_IDS, Ids, Int64, RowEdit, UInt32
from pillion.types import SamplingParams


class LogitEdits:
    """Factory of the logit edits of one stream.

    Attributes:
        allowed: uint32 [ceil(vocab_size / 32)], the mask of ``allowed_token_ids``; None allows all.
        read_history: True if edits depend on the stream's previous tokens.
    """

    __slots__ = (
        *("_always", "_bad_words", "_bias", "_biased", "_frequency", "_min_tokens", "_presence", "_repetition"),
        *("_stop_token_ids", "allowed", "read_history"),
    )

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        """Compile the parameters; ``vocab_size`` is needed only with ``allowed_token_ids``."""
        self._stop_token_ids = params.stop_token_ids
        ids = params.allowed_token_ids
        self.allowed: UInt32 | None = mask_of(ids, vocab_size) if ids else None
        self._min_tokens = params.min_tokens or 0
        self._repetition = 1.0 if params.repetition_penalty is None else params.repetition_penalty
        self._presence, self._frequency = params.presence_penalty or 0.0, params.frequency_penalty or 0.0
        self._biased = _ids(params.logit_bias)
        self._bias = np.array([*params.logit_bias.values()], dtype=np.float32)
        self._bad_words = BadWords(params.bad_words_token_ids) if params.bad_words_token_ids else None
        penalties = self._presence != 0 or self._frequency != 0 or self._repetition != 1.0
        self.read_history = penalties or (self._bad_words is not None and self._bad_words.longest > 0)
        self._always = penalties or len(self._biased) > 0 or self._bad_words is not None

    def change(self, answered: int) -> bool:
        """Return whether the row that samples token ``answered`` of the answer, from 0, has an edit."""
        return self._always or answered < self._min_tokens

    def of_row(self, row: int, tokens: Ids, prompt_tokens: int, position: int) -> RowEdit:
        """Return the edit of row number ``row``, which samples the token at ``position``. ``tokens``: all tokens before
        it, without one that could not be sampled."""
        banned = [*self._stop_token_ids] if position - prompt_tokens < self._min_tokens else []
        if self._bad_words is not None:
            banned += self._bad_words.completing(tokens[max(prompt_tokens, len(tokens) - self._bad_words.longest) :])
        return RowEdit(
            row=row,
            biased=self._biased,
            bias=self._bias,
            seen=tokens if self._repetition != 1.0 else NO_IDS,
            repetition=self._repetition,
            answered=tokens[prompt_tokens:] if self._presence or self._frequency else NO_IDS,
            presence=self._presence,
            frequency=self._frequency,
            banned=_ids(banned),
        )


class BadWords:
    """Token sequences that an answer must not contain, indexed by their last token but one: mostly one lookup per step.

    Attributes:
        longest: length of the longest sequence without its last token.
    """

    __slots__ = ("_after", "_always", "longest")

    def __init__(self, sequences: Iterable[tuple[int, ...]]) -> None:
        self.longest = 0
        self._always: list[int] = []
        # By last token but one: (all tokens but the last, last token) of each sequence.
        self._after: defaultdict[int, list[tuple[tuple[int, ...], int]]] = defaultdict(list)
        for *before, last in sequences:
            self.longest = max(self.longest, len(before))
            if before:
                self._after[before[-1]].append((tuple(before), last))
            else:
                self._always.append(last)

    def completing(self, answered: Ids) -> list[int]:
        """Return the tokens that would complete a sequence. ``answered``: the last tokens of the answer, at most
        ``longest``."""
        ends = self._after.get(int(answered[-1]), ()) if len(answered) else ()
        if not ends:
            return self._always
        tail = tuple(answered.tolist())
        return [*self._always, *(last for before, last in ends if tail[-len(before) :] == before)]


def _ids(ids: Collection[int]) -> Int64:
    return np.fromiter(ids, dtype=np.int64, count=len(ids)) if ids else NO_IDS
