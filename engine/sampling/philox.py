"""Random numbers without a state: Philox-4x32-10, keyed by a row's seed and counted by the position it draws for.

A counter has four words: position (low, high), index, stream. Streams are what the numbers are for, see
``pillion.engine.sampling.gumbel``; nothing has to be carried along when a request moves (I6), and any number can be
had alone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt64 = npt.NDArray[np.uint64]
Int64 = npt.NDArray[np.int64]

WORDS_PER_COUNTER = 4

# Arrays without dimensions: numpy takes them faster than its scalars.
_WORD = np.array(0xFFFFFFFF, np.uint64)
_HALF = np.array(32, np.uint64)
_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
_KEY_STEPS = np.array([0x9E3779B9, 0xBB67AE85], np.uint64)
_ROUNDS = 10


def philox(counter: tuple[UInt64, UInt64, UInt64, UInt64], key: tuple[UInt64, UInt64]) -> UInt64:
    """Philox-4x32-10 (Salmon et al., 2011), with the constants of Random123 and Triton.

    Takes four counter words and two key words, 32 bits each, in uint64 arrays that broadcast to one shape; gives the
    four output words on a new last axis.
    """
    shape = np.broadcast_shapes(*(word.shape for word in (*counter, *key)))
    # Words 0 and 2 go through the same operations, and so do 1 and 3: each pair is one array.
    even, odd = _pair(counter[0], counter[2], shape), _pair(counter[1], counter[3], shape)
    pair = (2, *(1 for _ in shape))
    multipliers, steps = _MULTIPLIERS.reshape(pair), _KEY_STEPS.reshape(pair)
    rounds = np.arange(_ROUNDS, dtype=np.uint64).reshape(_ROUNDS, *pair[1:], 1)
    for keys in (_pair(*key, key[0].shape) + rounds * steps) & _WORD:
        # Upper halves of odd words carry rubbish; only low words count, and they are cut out before they multiply.
        product = ((even & _WORD) * multipliers)[::-1]
        even = (product >> _HALF) ^ odd ^ keys
        odd = product
    return np.stack((even[0], odd[0], even[1], odd[1]), -1) & _WORD


def random_words(seeds: UInt64, positions: Int64, index: UInt64, stream: UInt64) -> UInt64:
    """The four words, on a new last axis, of counters (position, index, stream) under keys ``seeds``; the arrays
    broadcast together."""
    places = positions.astype(np.uint64)
    counter = (places & _WORD, places >> _HALF, index, stream)
    return philox(counter, (seeds & _WORD, seeds >> _HALF))


def _pair(first: UInt64, second: UInt64, shape: tuple[int, ...]) -> UInt64:
    both = np.empty((2, *shape), np.uint64)
    both[0], both[1] = first, second
    return both
