"""Chooses tokens, as a pure function of (logits, seed, position) (I6).

A row's random numbers come from Philox-4x32-10 with key = seed and counter = (position, token id / 4): nothing is
drawn from a state, so nothing has to be carried along when a stream moves. The token is the largest of
``logit / temperature + Gumbel noise`` over the row's candidates (the Gumbel-max trick: an exact draw from the softmax).

Candidates, in this order, as Hugging Face's processors have it: ``top_k`` keeps the k largest logits, ``top_p`` of what
is left the shortest head, by falling probability, whose mass reaches p. Tokens that tie with the last one kept are
kept as well, so that the set depends on the logits alone and not on the order in which equals are sorted.

Rows are taken one by one, in numpy: a row is one vector of the vocabulary, long enough to be worth an array operation
and short enough to stay in the cache, and what is in the batch beside it cannot reach it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]

# Below this, logits / temperature leave float32; the limit of the softmax is the largest logit anyway.
MIN_TEMPERATURE = 1e-5
# A nucleus is first looked for among this many tokens; only a flatter distribution pays for sorting all.
NUCLEUS_HEAD_TOKENS = 1024

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORDS_PER_COUNTER = 4


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How R rows of logits are sampled.

    Attributes:
        temperature: [R] float32; 0 is greedy.
        top_p: [R] float32 in (0, 1]; 1 keeps all.
        top_k: [R] int32; 0 keeps all.
        seeds: [R] uint64.
        positions: [R] int64, the position that the chosen token will have in its sequence.
    """

    temperature: Float32
    top_p: Float32
    top_k: Int32
    seeds: UInt64
    positions: Int64


def sample(logits: torch.Tensor, rows: SamplingRows) -> Int32:
    """One token [R] int32 for each row of logits [R, V] float32. Reads its arguments only."""
    table: Float32 = logits.numpy()
    tokens = np.empty(len(table), np.int32)
    for row, values in enumerate(table):
        if rows.temperature[row] < MIN_TEMPERATURE:
            tokens[row] = values.argmax()
        else:
            scores = (values - values.max()) / rows.temperature[row]
            kept = candidates(scores, int(rows.top_k[row]), float(rows.top_p[row]))
            seed, position = int(rows.seeds[row]), int(rows.positions[row])
            if kept is None:
                tokens[row] = (scores + gumbel_noise(seed, position, len(scores))).argmax()
            else:
                tokens[row] = kept[(scores[kept] + gumbel_noise_at(seed, position, kept)).argmax()]
    return tokens


def candidates(scores: Float32, top_k: int, top_p: float) -> Int64 | None:
    """Ids of the tokens that may be drawn, rising, at least one; None where all may. scores [V]: the largest is 0."""
    kept: Int64 | None = None
    if 0 < top_k < len(scores):
        least = np.partition(scores, -top_k)[-top_k]
        kept = np.flatnonzero(scores >= least)
        scores = scores[kept]
    if top_p < 1.0:
        head = _nucleus(np.exp(scores), top_p)
        kept = head if kept is None else kept[head]
    return kept


def _nucleus(weights: Float32, top_p: float) -> Int64:
    """Indices of the shortest head of weights [N] that has top_p of their sum, and of those that tie with its end."""
    goal = top_p * weights.sum(dtype=np.float64)
    head = weights
    if len(weights) > NUCLEUS_HEAD_TOKENS:
        head = np.partition(weights, -NUCLEUS_HEAD_TOKENS)[-NUCLEUS_HEAD_TOKENS:]
        if head.sum(dtype=np.float64) < goal:
            head = weights
    falling = np.sort(head)[::-1]
    reached = np.searchsorted(falling.cumsum(dtype=np.float64), goal)
    return np.flatnonzero(weights >= falling[min(int(reached), len(falling) - 1)])


def gumbel_noise(seed: int, position: int, vocab_size: int) -> Float32:
    """Noise [vocab_size] float32 of all tokens."""
    counters = np.arange(-(-vocab_size // _WORDS_PER_COUNTER), dtype=np.uint64)
    words = np.stack(philox(_counter(position, counters), _key(seed)), -1)
    return _gumbel(words.reshape(-1)[:vocab_size])


def gumbel_noise_at(seed: int, position: int, tokens: Int64) -> Float32:
    """The same noise, of tokens [N] only."""
    counters, which = np.divmod(tokens, _WORDS_PER_COUNTER)
    words = philox(_counter(position, counters.astype(np.uint64)), _key(seed))
    return _gumbel(np.choose(which, words))


def _counter(position: int, counters: UInt64) -> tuple[UInt64, UInt64, UInt64, UInt64]:
    low, high = np.array([position & _WORD], np.uint64), np.array([position >> 32 & _WORD], np.uint64)
    return low, high, counters, np.zeros(1, np.uint64)


def _key(seed: int) -> tuple[int, int]:
    return seed & _WORD, seed >> 32 & _WORD


def philox(counter: tuple[UInt64, UInt64, UInt64, UInt64], key: tuple[int, int]) -> tuple[UInt64, ...]:
    """Philox-4x32-10 (Salmon et al., 2011), with the constants of Random123 and Triton.

    Takes four 32-bit counter words in uint64 arrays that broadcast together, gives the four output words likewise.
    """
    word, half = np.uint64(_WORD), np.uint64(32)
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # Upper halves of c1 and c3 carry rubbish; only the low words count, and they are cut out before they multiply.
        first, second = (c0 & word) * _MULTIPLIERS[0], (c2 & word) * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (second >> half) ^ c1 ^ np.uint64(k0), second, (first >> half) ^ c3 ^ np.uint64(k1), first
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return tuple(np.broadcast_arrays(c0 & word, c1 & word, c2 & word, c3 & word))


def _gumbel(words: UInt64) -> Float32:
    """Standard Gumbel numbers. Small words make the large ones, where float32 is fine; none is infinite."""
    uniform = (words.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    np.minimum(uniform, np.float32(1 - 2.0**-24), out=uniform)
    noise: Float32 = -np.log(-np.log1p(-uniform))
    return noise
