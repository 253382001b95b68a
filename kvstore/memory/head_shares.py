"""Assignment of KV heads to the ranks of a worker and to the shards of a pool. Separate from shards.py, because ranks
import it on GPU machines that only have torch and triton."""

from __future__ import annotations

from itertools import pairwise

from pillion.errors import InvalidRequest

MAX_SHARDS = 16


def shares_of(heads: int, count: int) -> tuple[range, ...]:
    """Return the heads of each of ``count`` parts: contiguous shares that differ by at most one head, larger ones
    first; or, if ``count`` is a multiple of ``heads``, one head per part. Raises InvalidRequest if neither is
    possible."""
    if count > heads and (heads < 1 or count % heads):
        raise InvalidRequest(
            f"{heads} KV heads cannot be divided into {count} parts: at most {heads}, or a multiple of it"
        )
    if count > heads:
        sharers = count // heads
        return tuple(range(part // sharers, part // sharers + 1) for part in range(count))
    each, extra = divmod(heads, count)
    starts = [part * each + min(part, extra) for part in range(count + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(starts))


def own_rows(rows: int, index: int, count: int) -> range:
    """Return the rows of a block that shard ``index`` of ``count`` shards with the same heads contributes; its other
    rows are copies, or unused."""
    return range(index * rows // count, (index + 1) * rows // count)
