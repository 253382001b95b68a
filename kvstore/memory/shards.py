"""How a block of KV is divided over the memories of several GPUs, each of which has the KV heads of one rank.

    a block, in its canonical layout   [rows][heads][piece]          rows: layers, keys before values
    its shard in region r              [rows][heads of r][piece]     at the same slot in every region

Hashes, checksums, tiers and other nodes know the canonical layout alone. A block is gathered from its shards and
scattered into them by rectangles: as many rows as the block has, each of some bytes that lie together on both sides.
Heads that several ranks have lie in several regions: they are gathered from the first one and scattered into all.
"""

from __future__ import annotations

from dataclasses import dataclass

from pillion.errors import InvalidRequest

# Most regions of a pool.
MAX_REGIONS = 16


@dataclass(frozen=True, slots=True)
class Rectangle:
    """``rows`` times ``width_bytes``: in the shard of ``region`` from ``shard_at`` on, every ``shard_pitch`` bytes, and
    in the block from ``block_at`` on, every ``block_pitch`` bytes."""

    region: int
    rows: int
    width_bytes: int
    shard_at: int
    shard_pitch: int
    block_at: int
    block_pitch: int


@dataclass(frozen=True, slots=True)
class Shards:
    """The division of blocks of ``rows`` rows of ``heads`` pieces. Raises InvalidRequest for one that is none.

    Attributes:
        shares: the heads of each region, in order; together they are all heads.
    """

    rows: int
    heads: int
    piece_bytes: int
    shares: tuple[range, ...]

    def __post_init__(self) -> None:
        if min(self.rows, self.heads, self.piece_bytes) < 1 or not 1 <= len(self.shares) <= MAX_REGIONS:
            raise InvalidRequest(
                f"blocks of {self.rows} rows of {self.heads} heads of {self.piece_bytes} bytes cannot be divided over "
                f"{len(self.shares)} regions; {MAX_REGIONS} are the most"
            )
        start = stop = 0
        for share in self.shares:
            # Shares follow each other without a gap; what two of them have in common, both have.
            if not (share and share.step == 1 and start <= share.start <= stop <= share.stop <= self.heads):
                break
            start, stop = share.start, share.stop
        else:
            if stop == self.heads:
                return
        raise InvalidRequest(f"{list(self.shares)} are not shares of {self.heads} heads")

    @classmethod
    def whole(cls, block_bytes: int) -> Shards:
        """Blocks that lie in one piece in one region."""
        return cls(1, 1, block_bytes, (range(1),))

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in its canonical layout."""
        return self.rows * self.heads * self.piece_bytes

    def shard_bytes(self, region: int) -> int:
        """Bytes of a block's shard in a region."""
        return self.rows * len(self.shares[region]) * self.piece_bytes

    def scattered(self) -> list[Rectangle]:
        """What brings a block into all of its shards."""
        return [self._rectangle(region, share) for region, share in enumerate(self.shares)]

    def gathered(self) -> list[Rectangle]:
        """What brings a block's shards together: each head once."""
        end, found = 0, []
        for region, share in enumerate(self.shares):
            if share.stop > end:
                found.append(self._rectangle(region, range(end, share.stop)))
                end = share.stop
        return found

    def _rectangle(self, region: int, heads: range) -> Rectangle:
        share, piece = self.shares[region], self.piece_bytes
        return Rectangle(
            region=region,
            rows=self.rows,
            width_bytes=len(heads) * piece,
            shard_at=(heads.start - share.start) * piece,
            shard_pitch=len(share) * piece,
            block_at=heads.start * piece,
            block_pitch=self.heads * piece,
        )
