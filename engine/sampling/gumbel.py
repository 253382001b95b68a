"""Gumbel noise, which turns an argmax into a draw, structured so that most of it need not be computed.

By the Gumbel-max trick, the token with the largest ``score + noise`` is an exact draw from softmax(score) if each
token's noise is Gumbel, which is -log of an exponential number. The exponential number is called the token's *wait*.

Noise for a whole vocabulary is the most expensive part of sampling on a CPU, and nearly all of it is for tokens that
cannot win. So the waits of 128 adjacent tokens, a *group*, are drawn top-down, which gives the same distribution:

    shortest wait in the group   E = Exp(1) / 128          the minimum of 128 exponential numbers
    token with this wait         uniform over the 128      independent of E
    wait of any other token      E + Exp(1)                the exponential distribution is memoryless

One random word determines a group's E and its first token (the one with the shortest wait), and so an upper bound of
the noise of 128 tokens. Groups use stream 1 of the counters (index: group / 4), single tokens stream 0 (index: token /
4). The last group of a vocabulary is padded to 128 tokens.

Random words come from the stateless Philox-4x32-10: the key is a row's seed, the counter (position low, position high,
index, stream). So a stream that moves to another worker takes no generator along (I6), and any number can be computed
separately.
"""

from __future__ import annotations

import numpy as np

from pillion.kernels.step import Float32, Int64, UInt64

GROUP_TOKENS = 128
_GROUP_BITS = 7

WORDS_PER_COUNTER = 4

# Zero-dimensional arrays are faster operands than numpy's scalars.
_WORD = np.array(0xFFFFFFFF, np.uint64)
_HALF = np.array(32, np.uint64)
_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
_KEY_STEPS = np.array([0x9E3779B9, 0xBB67AE85], np.uint64)
_ROUNDS = 10

_TOKEN_STREAM = np.array(0, np.uint64)
_GROUP_STREAM = np.array(1, np.uint64)


def group_waits(seeds: UInt64, positions: Int64, num_groups: int, tokens: Int64) -> tuple[Float32, Int64, Float32]:
    """Return each group's shortest wait and its token within the group (0 .. 127), both [R, num_groups], and the wait
    of the token tokens[i] of each row [R]. ``seeds``, ``positions``: of the rows [R].

    The upper 25 bits of a group's word determine the wait, the lower 7 the token.
    """
    count = -(-num_groups // WORDS_PER_COUNTER)
    counters, streams = np.empty((len(seeds), count + 1), np.uint64), np.full(count + 1, _GROUP_STREAM)
    counters[:, :count], counters[:, count] = np.arange(count), tokens // WORDS_PER_COUNTER
    streams[count] = _TOKEN_STREAM
    drawn = random_words(seeds[:, None], positions[:, None], counters, streams)
    words = drawn[:, :count].reshape(len(seeds), -1)[:, :num_groups]
    waits = _exponential(words >> np.uint64(_GROUP_BITS), 32 - _GROUP_BITS) / np.float32(GROUP_TOKENS)
    firsts = (words & np.uint64(GROUP_TOKENS - 1)).astype(np.int64)
    each, group = np.arange(len(tokens)), tokens // GROUP_TOKENS
    return waits, firsts, _token_waits(drawn[:, count], tokens, waits[each, group], firsts[each, group])


def token_waits(seeds: UInt64, positions: Int64, tokens: Int64, first_waits: Float32, firsts: Int64) -> Float32:
    """Return waits of tokens; all arrays are [N]. ``first_waits``, ``firsts``: the shortest wait of each token's group,
    and the token in the group that has it."""
    index = (tokens // WORDS_PER_COUNTER).astype(np.uint64)
    return _token_waits(random_words(seeds, positions, index, _TOKEN_STREAM), tokens, first_waits, firsts)


def _token_waits(words: UInt64, tokens: Int64, first_waits: Float32, firsts: Int64) -> Float32:
    """Return waits of tokens from the words [N, 4] of their counters, else like :func:`token_waits`."""
    own = _exponential(words[np.arange(len(tokens)), tokens % WORDS_PER_COUNTER], 32)
    own[tokens % GROUP_TOKENS == firsts] = 0.0
    waits: Float32 = first_waits + own
    return waits


def _exponential(words: UInt64, bits: int) -> Float32:
    """Turn uniform words of ``bits`` bits into Exp(1) numbers, none 0 or infinite. Small numbers, which win, have the
    finest resolution."""
    uniform = (words.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-bits)
    np.minimum(uniform, np.float32(1 - 2.0**-24), out=uniform)
    numbers: Float32 = -np.log1p(-uniform)
    return numbers


def philox(counter: tuple[UInt64, UInt64, UInt64, UInt64], key: tuple[UInt64, UInt64]) -> UInt64:
    """Return Philox-4x32-10 (Salmon et al., 2011), with the constants of Random123 and Triton.

    Takes four counter words and two key words, 32 bits each, in uint64 arrays that broadcast to one shape; returns
    the four output words on a new last axis.
    """
    shape = np.broadcast_shapes(*(word.shape for word in (*counter, *key)))
    # Words 0 and 2 pass the same operations, as do words 1 and 3, so each two are one array.
    even, odd = _pair(counter[0], counter[2], shape), _pair(counter[1], counter[3], shape)
    pair = (2, *(1 for _ in shape))
    multipliers, steps = _MULTIPLIERS.reshape(pair), _KEY_STEPS.reshape(pair)
    rounds = np.arange(_ROUNDS, dtype=np.uint64).reshape(_ROUNDS, *pair[1:], 1)
    for keys in (_pair(*key, key[0].shape) + rounds * steps) & _WORD:
        # Only the lower halves are multiplied; the upper halves of odd words are meaningless.
        product = ((even & _WORD) * multipliers)[::-1]
        even = (product >> _HALF) ^ odd ^ keys
        odd = product
    return np.stack((even[0], odd[0], even[1], odd[1]), -1) & _WORD


def random_words(seeds: UInt64, positions: Int64, index: UInt64, stream: UInt64) -> UInt64:
    """Return the four random words of each counter (position, index, stream), keyed by ``seeds``, on a new last
    axis."""
    low_high = positions.astype(np.uint64)
    counter = (low_high & _WORD, low_high >> _HALF, index, stream)
    return philox(counter, (seeds & _WORD, seeds >> _HALF))


def _pair(first: UInt64, second: UInt64, shape: tuple[int, ...]) -> UInt64:
    both = np.empty((2, *shape), np.uint64)
    both[0], both[1] = first, second
    return both
