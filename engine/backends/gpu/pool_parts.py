"""The location of a process's KV heads in a pool, and how they are written and attended there.

    a pool in one piece        one part, with all heads of the process
    a pool divided over GPUs   with as many ranks as shards, also one part: each rank's heads are in its own shard.
                               Otherwise a process has a part per shard with any of its heads, and accesses other GPUs'
                               memory directly (peer access).

A part with all heads works on the projections in place. Otherwise the part's columns are gathered into a buffer, KV is
written and attention computed as if there were no other heads, and the output is copied to the part's columns.

In models whose layers differ in their KV heads, there is a part for each kind of KV heads. Their pools are not divided.
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
    """Some KV heads of a process in one shard of a pool; a pool in one piece is one shard.

    Attributes:
        kind: KV heads, in the whole model, of the layers that this part is for.
        shard: index of the shard.
        shard_heads: KV heads in the shard.
        heads: KV heads in the shard that the process writes.
        attended: True if the process reads them from this shard; heads in several shards are read from the first.
        copied: True if this process copies whole slots of the shard, as the first process that uses a shard does.
    """

    kind: LayerHeads
    shard: int
    shard_heads: range
    heads: range
    attended: bool = True
    copied: bool = True


def parts_of(config: ModelConfig, own: ModelShard, shares: Sequence[range]) -> list[PoolPart]:
    """Return a rank's parts of a divided pool. ``config``: of the whole model; ``shares``: KV heads of each shard."""
    (kind,), parts, read = config.all_heads, [], own.kv_heads.start
    for shard in _used(own, shares):
        share = shares[shard]
        heads = range(max(share.start, own.kv_heads.start), min(share.stop, own.kv_heads.stop))
        copied = not any(shard in _used(other, shares) for other in own.lower(config))
        parts.append(PoolPart(kind, shard, share, heads, attended=heads.stop > read, copied=copied))
        read = max(read, heads.stop)
    return parts


def whole_parts(config: ModelConfig, own: ModelShard) -> Iterator[PoolPart]:
    """Yield a rank's parts of a pool in one piece, one per kind of KV heads. ``config``: of the whole model."""
    for number, kind in enumerate(config.all_heads):
        heads = own.kv_heads_of(kind.kv_heads)
        yield PoolPart(kind, 0, range(kind.kv_heads), heads, copied=own.leads and number == 0)


def _used(own: ModelShard, shares: Sequence[range]) -> list[int]:
    """Return the shards that a rank writes: its own if there is one per rank, otherwise all with any of its heads."""
    if len(shares) == own.size:
        return [own.rank]
    heads = own.kv_heads
    return [shard for shard, share in enumerate(shares) if share.start < heads.stop and heads.start < share.stop]


def part_layout(layout: KVLayout, part: PoolPart) -> KVLayout:
    """Return the layout of a slot in a part's shard."""
    count = len(part.shard_heads)
    if count == part.kind.kv_heads:
        # Not divided; other layers may have other numbers of KV heads.
        return layout
    layers = tuple(None if heads is None else replace(heads, kv_heads=count) for heads in layout.layers)
    return replace(layout, num_kv_heads=count, layers=layers)


@dataclass(frozen=True, slots=True)
class LayerRows:
    """View of a pool, for attention kernels, that contains the layers with one kind of KV heads.

    Attributes:
        pool: [slots, places, planes, heads, block_size, head_dim], or [slots, places, planes, heads, bytes] in FP8. If
            other layers are between these layers, places overlap, and only those in ``places`` are meaningful.
        places: by layer, its index in the second dimension of ``pool``.
    """

    pool: torch.Tensor
    places: Mapping[int, int]

    @classmethod
    def of(cls, pool: torch.Tensor, layout: KVLayout, part: PoolPart, dtype: torch.dtype) -> LayerRows:
        """Return the view of a part's layers in a shard, bytes [slots, block_bytes]. ``layout``: of the whole pool."""
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
    """Latents (MLA) in a shard, the only KV head of every rank. ``attention``: None if the shard is only written."""

    def __init__(self, rows: LayerRows, attention: LatentAttention | None) -> None:
        self.pool, self.places, self.attention = rows.pool, rows.places, attention

    @property
    def attention_words(self) -> int:
        return 0 if self.attention is None else self.attention.planner.max_record_words

    def attend(
        self, index: int, queries: torch.Tensor, out: torch.Tensor, record: torch.Tensor, *, chunks: bool
    ) -> None:
        """Compute attention for queries [T, heads, rank + rotary], into ``out`` [T, heads * rank]: weighted sums of
        latents."""
        if self.attention is not None:
            self.attention.attend(self.places[index], queries, out, record, with_chunks=chunks)


class PartRows:
    """Writer of a part's keys and values, and attention over them.

    Attributes:
        places: by layer, its index in the view of the shard (:class:`LayerRows`).
        attention: None if the shard is only written.
        attention_words: max length of the attention plan.
    """

    def __init__(
        self,
        num_heads: int,
        own_heads: range,
        part: PoolPart,
        rows: LayerRows,
        attention: PagedAttention | None,
        max_tokens: int,
        like: torch.Tensor,
    ) -> None:
        """Allocate the buffers of a part. ``num_heads``, ``own_heads``: the process's query heads and KV heads in the
        part's layers. ``like``: a tensor with the device and type of projections."""
        self.part, self.attention = part, attention
        self.places, self._pool = rows.places, rows.pool
        group, size = num_heads // len(own_heads), part.kind.head_dim
        self.heads, self._head_dim = len(part.heads) * group, size
        # A part with all heads works in place.
        self._whole = part.attended and part.heads == own_heads
        first, count = part.heads.start - own_heads.start, len(part.heads)
        # Columns of the part's queries, keys and values in the process's projection.
        ranges = (
            (first * group, self.heads),
            (num_heads + first, count),
            (num_heads + len(own_heads) + first, count),
        )
        self._columns = [slice(begin * size, (begin + length) * size) for begin, length in ranges]
        # Heads of queries and keys, by which norm weights of single heads are selected.
        self._normed = torch.cat([torch.arange(begin, begin + length) for begin, length in ranges[:2]])
        self._norms: dict[int, HeadNorm] = {}
        self._sinks: dict[int, torch.Tensor] = {}
        gathered = 0 if self._whole else max_tokens
        self._buffer = like.new_zeros(gathered, (self.heads + 2 * count) * size)
        self._out = like.new_zeros(gathered, self.heads * size)

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
        """Norm and rotate the part's queries of layer ``index``, and write its keys and values to ``rows`` of the pool
        unless it reads those of another layer, ``source``. ``qkv``: projections [T, ...] of all of the process's
        heads."""
        part, writes = self.part, source == index
        columns = self._own_columns(qkv)
        # Pools of models with layers that share KV are not divided.
        assert writes or self._whole
        if not self._whole:
            torch.cat([qkv[:, part_columns] for part_columns in self._columns], 1, out=columns)
            if norm is not None:
                norm = self._norm_of(index, norm)
        first = part.heads.start - part.shard_heads.start
        kv_write(
            columns,
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
        """Compute attention of layer ``index``, whose queries :meth:`write` has rotated, over the keys and values of
        layer ``source``, into the part's columns of ``out`` [T, heads * head_dim]. ``sinks``: of all of the process's
        heads [heads]."""
        if self.attention is None:
            return
        tokens, width = len(qkv), self.heads * self._head_dim
        queries = self._own_columns(qkv)[:, :width].view(tokens, self.heads, self._head_dim)
        part_out = out if self._whole else self._out[:tokens]
        own_sinks = None if sinks is None else self._sinks_of(index, sinks)
        place = self.places[source]
        self.attention.attend(place, queries, part_out, record, window=window, with_chunks=chunks, sinks=own_sinks)
        if not self._whole:
            out[:, self._columns[0]].copy_(part_out)

    def _own_columns(self, qkv: torch.Tensor) -> torch.Tensor:
        """Return the part's projections: ``qkv`` itself, or the buffer."""
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
            heads = self._normed.to(norm.weight.device)
            self._norms[index] = norm._replace(weight=norm.weight.index_select(0, heads))
        return self._norms[index]
