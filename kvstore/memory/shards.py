"""Division of a pool over several GPUs into shards, each with some KV heads of every block.

    a block, in its canonical layout   [rows][heads][piece]                   rows: layers, keys before values
    its part in a shard                [rows][heads of the shard][piece]      in the same slot of every shard

Hashes, checksums, tiers and other nodes only use the canonical layout. Blocks are gathered from shards and scattered
into them by rectangles: rows of contiguous bytes on both sides. With more shards than heads, several shards share a
head: each contributes some of its rows, and receives all of them. So data without copies, such as a rank's part of a
state, can be stored in a shard's own rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from pillion.errors import InvalidRequest
from pillion.kvstore.memory.head_shares import MAX_SHARDS, own_rows, shares_of


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Strided copy between a block and its part in ``shard``: ``rows`` rows of ``width_bytes`` each. Row i is at offset
    ``shard_at`` + i * ``shard_pitch`` of the part, and at ``block_at`` + i * ``block_pitch`` of the block."""

    shard: int
    rows: int
    width_bytes: int
    shard_at: int
    shard_pitch: int
    block_at: int
    block_pitch: int


@dataclass(frozen=True, slots=True)
class Shards:
    """Division of blocks into shards. A block has ``rows`` rows of ``heads`` pieces of ``piece_bytes``. Raises
    InvalidRequest for an invalid division.

    Attributes:
        shares: the heads of each shard, in order, which together are all heads.
    """

    rows: int
    heads: int
    piece_bytes: int
    shares: tuple[range, ...]

    def __post_init__(self) -> None:
        if min(self.rows, self.heads, self.piece_bytes) < 1 or not 1 <= len(self.shares) <= MAX_SHARDS:
            raise InvalidRequest(
                f"blocks of {self.rows} rows of {self.heads} heads of {self.piece_bytes} bytes cannot be divided into "
                f"{len(self.shares)} shards; at most {MAX_SHARDS} are allowed"
            )
        start = stop = 0
        for share in self.shares:
            # Shares are contiguous and in order; several shards may have the same heads.
            if not (share and share.step == 1 and start <= share.start <= stop <= share.stop <= self.heads):
                break
            start, stop = share.start, share.stop
        else:
            if stop == self.heads:
                return
        raise InvalidRequest(f"{list(self.shares)} are not shares of {self.heads} heads")

    @classmethod
    def whole(cls, block_bytes: int) -> Shards:
        """Return the trivial division into one shard."""
        return cls(1, 1, block_bytes, (range(1),))

    @classmethod
    def divided(cls, block_bytes: int, rows: int, heads: int, count: int) -> Shards:
        """Divide blocks of ``rows`` rows of ``heads`` pieces of one size over ``count`` shards."""
        pieces = rows * heads
        if pieces < 1 or block_bytes % pieces:
            raise InvalidRequest(
                f"a block of {block_bytes} bytes cannot be divided into {rows} rows of {heads} KV heads"
            )
        return cls(rows, heads, block_bytes // pieces, shares_of(heads, count))

    def layout_id(self, namespace: str, device_uuids: Sequence[str]) -> str:
        """Return an identifier (64 hexadecimal digits) of a namespace's blocks in this division over these GPUs."""
        shares = [(share.start, share.stop) for share in self.shares]
        description = repr((namespace, tuple(device_uuids), self.rows, self.heads, self.piece_bytes, shares))
        return hashlib.sha256(description.encode()).hexdigest()

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in its canonical layout."""
        return self.rows * self.heads * self.piece_bytes

    def shard_bytes(self, shard: int) -> int:
        """Return the bytes of a block's part in a shard."""
        return self.rows * len(self.shares[shard]) * self.piece_bytes

    def scattered(self) -> list[Rectangle]:
        """Return the rectangles that copy a block into all of its shards."""
        return [self._rectangle(shard, share, range(self.rows)) for shard, share in enumerate(self.shares)]

    def gathered(self) -> list[Rectangle]:
        """Return the rectangles that assemble a block from its shards, each byte once."""
        end, rectangles = 0, []
        for share, sharers in groupby(enumerate(self.shares), key=itemgetter(1)):
            shards, heads, end = [shard for shard, _ in sharers], range(end, share.stop), max(end, share.stop)
            for index, shard in enumerate(shards):
                rows = own_rows(self.rows, index, len(shards))
                if heads and rows:
                    rectangles.append(self._rectangle(shard, heads, rows))
        return rectangles

    def _rectangle(self, shard: int, heads: range, rows: range) -> Rectangle:
        share, piece = self.shares[shard], self.piece_bytes
        shard_pitch, block_pitch = len(share) * piece, self.heads * piece
        return Rectangle(
            shard=shard,
            rows=len(rows),
            width_bytes=len(heads) * piece,
            shard_at=rows.start * shard_pitch + (heads.start - share.start) * piece,
            shard_pitch=shard_pitch,
            block_at=rows.start * block_pitch + heads.start * piece,
            block_pitch=block_pitch,
        )
