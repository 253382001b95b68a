"""Shares out KV heads to the ranks of a worker and to the shards of a pool. It stands apart from the shards, because
ranks on a GPU machine that has torch and triton alone import it."""

from __future__ import annotations

from itertools import pairwise

from pillion.errors import InvalidRequest

# A pool has at most this many shards, each with a descriptor.
MAX_SHARDS = 16


def shares_of(heads: int, count: int) -> tuple[range, ...]:
    """Returns the heads of each of ``count`` parts. Shares differ by one head at most, and the larger ones come first;
    or, where ``count`` is a multiple of ``heads``, each part has one head. Raises InvalidRequest where neither is
    possible."""
    if count > heads and (heads < 1 or count % heads):
        raise InvalidRequest(
            f"{heads} KV heads cannot be shared out to {count}: at most {heads}, or a multiple of that"
        )
    if count > heads:
        sharers = count // heads
        return tuple(range(part // sharers, part // sharers + 1) for part in range(count))
    each, more = divmod(heads, count)
    starts = [part * each + min(part, more) for part in range(count + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(starts))


def own_rows(rows: int, place: int, count: int) -> range:
    """Returns those of a block's ``rows`` that count for the shard number ``place`` of ``count`` shards with the same
    heads: what the others have there is a copy, or nothing."""
    return range(place * rows // count, (place + 1) * rows // count)
