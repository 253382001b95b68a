"""Accuracy of quantized weights on a text: perplexity, and divergence from and agreement with the plain weights.

Each token of a window but the first is predicted from those before it by both models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer

from pillion.engine.backends.host_backend import HostBackend
from pillion.errors import ConfigError
from pillion.kernels.step import StepBatch

WINDOW_TOKENS = 256
# Shown name of the text, which is installed with Python.
TEXT = "Python's documentation of its language (pydoc_data)"


class TextScorer:
    """Log probabilities on a CPU backend, over a pool of one window."""

    def __init__(self, backend: HostBackend, window_tokens: int = WINDOW_TOKENS) -> None:
        self._backend = backend
        self._blocks = -(-window_tokens // backend.layout.block_size)
        self._pool = bytearray(self._blocks * backend.layout.block_bytes)
        backend.bind_pool(memoryview(self._pool), self._blocks)

    def score(self, ids: Sequence[int]) -> torch.Tensor:
        """Return log probabilities [T, vocab] of the token after each of a window's T tokens."""
        count = len(ids)
        batch = StepBatch(
            token_ids=np.array(ids, np.int32),
            positions=np.arange(count, dtype=np.int32),
            query_starts=np.array([0, count], np.int32),
            context_lens=np.array([count], np.int32),
            block_tables=np.arange(self._blocks, dtype=np.int32).reshape(1, -1),
            sample_rows=np.arange(count, dtype=np.int32),
        )
        return torch.log_softmax(self._backend.forward(batch).float(), -1)


@dataclass(slots=True)
class Accuracy:
    """Sums over tokens, from which the properties are computed.

    Attributes:
        tokens: number of predicted tokens.
        surprise: negative log probability of the text's tokens.
        divergence: Kullback-Leibler divergence from the exact model, in nats.
        agreed: tokens with the same most likely prediction in both models.
    """

    tokens: int = 0
    surprise: float = 0.0
    divergence: float = 0.0
    agreed: int = 0

    def add(self, ids: Sequence[int], exact: torch.Tensor, other: torch.Tensor) -> None:
        """Add a window: its tokens, and both models' log probabilities [T, vocab]."""
        exact, other = exact[:-1], other[:-1]
        self.tokens += len(other)
        self.surprise -= float(other.gather(1, torch.tensor(ids[1:])[:, None]).sum())
        self.divergence += float((exact.exp() * (exact - other)).sum())
        self.agreed += int((exact.argmax(1) == other.argmax(1)).sum())

    @property
    def perplexity(self) -> float:
        return math.exp(self.surprise / self.tokens)

    @property
    def mean_divergence(self) -> float:
        return self.divergence / self.tokens

    @property
    def agreement(self) -> float:
        """Share of tokens with the same most likely prediction in both models."""
        return self.agreed / self.tokens


def windows(ids: Sequence[int], window_tokens: int = WINDOW_TOKENS) -> Iterator[list[int]]:
    """Yield the whole windows of a text."""
    for begin in range(0, len(ids) - window_tokens + 1, window_tokens):
        yield list(ids[begin : begin + window_tokens])


def text_windows(tokenizer: Tokenizer, count: int, window_tokens: int = WINDOW_TOKENS) -> list[list[int]]:
    """Return up to ``count`` windows spread over TEXT. Raises ConfigError if this Python has no TEXT."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ConfigError(f"this installation of Python lacks {TEXT}, on which weights are compared") from None
    ids = tokenizer.encode("\n".join(topics[name] for name in sorted(topics)), add_special_tokens=False).ids
    whole = list(windows(ids, window_tokens))
    return whole[:: max(1, len(whole) // count)][:count]
