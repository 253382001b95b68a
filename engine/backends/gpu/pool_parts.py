"""The location of a process's KV heads in a pool, and how they are written and attended there.

    a pool in one piece              one part: all heads of the process, in place
    a pool of a shard per GPU        its own shard has all heads of a rank, if there are as many ranks as shards: also
                                     one part. Workers of other sizes have a part in each shard with one of their heads,
                                     and access other GPUs' memory over their link (peer access).

A part of all heads works on the projections in place. If there are several parts, the columns of each are gathered into
a separate buffer, written and attended as if the pool had no other heads, and the results are scattered to its columns
of the output.

In models whose layers differ in their KV heads, each kind of heads has a part for the layers with such heads. Their
pools are in one piece.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from pillion.engine.backends.backend import FP8_E4M3, KVLayout
from pillion.engine.models.model_config import LayerHeads, ModelConfig
from pillion.engine.models.model_shard import ModelShard
from pillion.kernels.gpu.attention.kv_write import HeadNorm, Rotary, kv_write
from pillion.kernels.gpu.attention.latent_attention import LatentAttention
from pillion.kernels.gpu.attention.paged_attention import PagedAttention


@dataclass(frozen=True, slots=True)
class PoolPart:
    """Some KV heads of a process in one shard of a pool; a pool in one piece has one shard.

    Attributes:
        kind: all KV heads of the model's layers of this part.
        shard: the shard's number.
        shard_heads: the model's KV heads in the shard.
        heads: the shard's heads that the process writes.
        attended: whether the process reads them here; heads in several shards are read in the first one.
        copied: whether the process copies whole slots here: the first process that uses a shard does.
    """

    kind: LayerHeads
    shard: int
    shard_heads: range
    heads: range
    attended: bool = True
    copied: bool = True


def parts_of(config: ModelConfig, own: ModelShard, shares: Sequence[range]) -> list[PoolPart]:
    """Return the parts of a rank in a pool whose shards have the KV heads ``shares``. ``config``: that of the whole
    model."""
    (kind,), parts, read = config.all_heads, [], own.kv_heads.start
    for shard in _used(own, shares):
        share = shares[shard]
        heads = range(max(share.start, own.kv_heads.start), min(share.stop, own.kv_heads.stop))
        copied = not any(shard in _used(other, shares) for other in own.lower(config))
        parts.append(PoolPart(kind, shard, share, heads, attended=heads.stop > read, copied=copied))
        read = max(read, heads.stop)
    return parts


def whole_parts(config: ModelConfig, own: ModelShard) -> Iterator[PoolPart]:
    """Yield the parts of a rank in a pool in one piece: all of its KV heads, one part per kind. ``config``: that of the
    whole model."""
    for number, kind in enumerate(config.all_heads):
        mine = own.kv_heads_of(kind.kv_heads)
        yield PoolPart(kind, 0, range(kind.kv_heads), mine, copied=own.leads and number == 0)


def _used(own: ModelShard, shares: Sequence[range]) -> list[int]:
    """Return the shards that a rank writes to: its own, or all with one of its heads."""
    if len(shares) == own.size:
        return [own.rank]
    mine = own.kv_heads
    return [shard for shard, share in enumerate(shares) if share.start < mine.stop and mine.start < share.stop]


def part_layout(layout: KVLayout, part: PoolPart) -> KVLayout:
    """Return the layout of a slot in the shard of a part."""
    count = len(part.shard_heads)
    if count == part.kind.kv_heads:
        # Layers of other kinds may have another KV head count; keep it.
        return layout
    layers = tuple(None if heads is None else replace(heads, kv_heads=count) for heads in layout.layers)
    return replace(layout, num_kv_heads=count, layers=layers)


@dataclass(frozen=True, slots=True)
class LayerRows:
    """The layers of a pool with KV heads of one kind, in the layout of attention kernels: ``pool`` [slots, places,
    planes, heads, block_size, head_dim], or for float8 [slots, places, planes, heads, bytes].

    ``places``: the place of each layer. If layers of another kind are between them, places are smaller than a layer,
    and only those listed are meaningful."""

    pool: torch.Tensor
    places: Mapping[int, int]

    @classmethod
    def of(cls, pool: torch.Tensor, layout: KVLayout, part: PoolPart, dtype: torch.dtype) -> LayerRows:
        """View a part's layers in a pool of bytes [slots, block_bytes]. ``layout``: that of the whole pool."""
        layout, heads = part_layout(layout, part), replace(part.kind, kv_heads=len(part.shard_heads))
        fp8 = layout.dtype == FP8_E4M3
        values, size = (pool, 1) if fp8 else (pool.view(dtype), dtype.itemsize)
        own = [layer for layer in range(layout.num_layers) if layout.heads(layer) == heads]
        firsts = [layout.place(layer).offset // size for layer in own]
        piece = (layout.place(own[0]).piece_bytes,) if fp8 else (layout.block_size, heads.head_dim)
        inside = layout.planes, heads.kv_heads, *piece
        step = math.gcd(*firsts) or math.prod(inside)
        shape = len(values), firsts[-1] // step + 1, *inside
        strides = [math.prod(inside[dimension:]) for dimension in range(1, len(inside) + 1)]
        view = values.as_strided(shape, (values.stride(0), step, *strides))
        return cls(view, {layer: first // step for layer, first in zip(own, firsts, strict=True)})


class LatentRows:
    """Attention over the rows of latents in a shard of a pool, ``pool``, whose only KV head all ranks have.
    ``attention``: None if the shard is only written."""

    def __init__(self, rows: LayerRows, attention: LatentAttention | None) -> None:
        self.pool, self.places, self.attention = rows.pool, rows.places, attention

    @property
    def attention_words(self) -> int:
        return 0 if self.attention is None else self.attention.planner.max_record_words

    def attend(
        self, index: int, queries: torch.Tensor, out: torch.Tensor, record: torch.Tensor, *, chunks: bool
    ) -> None:
        """Compute the weighted sums of latents for queries [T, heads, rank + rotary], into ``out`` [T, heads *
        rank]."""
        if self.attention is not None:
            self.attention.attend(self.places[index], queries, out, record, with_chunks=chunks)


class PartRows:
    """One part's queries, keys and values in a step, and attention over them.

    ``places``: those of its layers in the shard. ``attention``: None if the shard is only written. ``attention_words``:
    the length of the attention's record."""

    def __init__(
        self,
        num_heads: int,
        mine: range,
        part: PoolPart,
        rows: LayerRows,
        attention: PagedAttention | None,
        max_tokens: int,
        like: torch.Tensor,
    ) -> None:
        """Allocate the rows of a part. The process has ``num_heads`` query heads per layer, and the KV heads ``mine``.
        ``like``: a tensor of the device and type of projections."""
        self.part, self.attention = part, attention
        self.places, self._pool = rows.places, rows.pool
        group, size = num_heads // len(mine), part.kind.head_dim
        self.heads, self._head_dim = len(part.heads) * group, size
        # Queries may be rotated in place only if one part has all heads.
        self._whole = part.attended and part.heads == mine
        first, count = part.heads.start - mine.start, len(part.heads)
        # Columns of the part's queries, keys and values in the process's projection.
        ranges = (
            (first * group, self.heads),
            (num_heads + first, count),
            (num_heads + len(mine) + first, count),
        )
        self._columns = [slice(begin * size, (begin + many) * size) for begin, many in ranges]
        self._normed = torch.cat([torch.arange(begin, begin + many) for begin, many in ranges[:2]])
        self._norms: dict[int, HeadNorm] = {}
        self._sinks: dict[int, torch.Tensor] = {}
        gathered = 0 if self._whole else max_tokens
        self._buffer = like.new_zeros(gathered, (self.heads + 2 * count) * size)
        self._found = like.new_zeros(gathered, self.heads * size)

    @property
    def attention_words(self) -> int:
        return 0 if self.attention is None else self.attention.planner.max_record_words

    def write(
        self,
        index: int,
        qkv: torch.Tensor,
        rows: torch.Tensor,
        norm: HeadNorm | None,
        rotary: Rotary | None,
        *,
        source: int,
    ) -> None:
        """Norm and rotate the part's queries of layer ``index``, and write its keys and values into the pool's
        ``rows``, unless the layer reads those of another layer, ``source``. ``qkv``: the projections [T, ...] of all
        heads of the process."""
        part, writes = self.part, source == index
        mine = self._mine(qkv)
        # Layers without keys and values are in pools in one piece.
        assert writes or self._whole
        if not self._whole:
            torch.cat([qkv[:, columns] for columns in self._columns], 1, out=mine)
            if norm is not None:
                norm = self._norm_of(index, norm)
        first = part.heads.start - part.shard_heads.start
        kv_write(
            mine,
            self._pool,
            rows,
            self.places[source],
            heads=self.heads,
            kv_heads=range(first, first + len(part.heads)) if writes else range(0),
            norm=norm,
            rotary=rotary,
        )

    def attend(
        self,
        index: int,
        qkv: torch.Tensor,
        out: torch.Tensor,
        record: torch.Tensor,
        *,
        window: int,
        chunks: bool,
        source: int,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Compute the attention of the queries of layer ``index`` that :meth:`write` rotated, over the keys and values
        of layer ``source``, into the part's columns of ``out`` [T, heads * head_dim]. ``sinks`` [heads]: those of the
        process's heads."""
        if self.attention is None:
            return
        tokens, width = len(qkv), self.heads * self._head_dim
        queries = self._mine(qkv)[:, :width].view(tokens, self.heads, self._head_dim)
        found = out if self._whole else self._found[:tokens]
        mine = None if sinks is None else self._sinks_of(index, sinks)
        place = self.places[source]
        self.attention.attend(place, queries, found, record, window=window, with_chunks=chunks, sinks=mine)
        if not self._whole:
            out[:, self._columns[0]].copy_(found)

    def _mine(self, qkv: torch.Tensor) -> torch.Tensor:
        return qkv if self._whole else self._buffer[: len(qkv)]

    def _sinks_of(self, index: int, sinks: torch.Tensor) -> torch.Tensor:
        """Return the sinks of the part's heads in float32, selected once per layer."""
        if index not in self._sinks:
            begin = self._columns[0].start // self._head_dim
            self._sinks[index] = sinks[begin : begin + self.heads].to(torch.float32, copy=True)
        return self._sinks[index]

    def _norm_of(self, index: int, norm: HeadNorm) -> HeadNorm:
        """Return a norm with the weights of the part's heads, selected once per layer."""
        if index not in self._norms:
            mine = self._normed.to(norm.weight.device)
            self._norms[index] = norm._replace(weight=norm.weight.index_select(0, mine))
        return self._norms[index]
