"""Says what each rank of a worker computes, where a worker is several processes (tensor parallelism). Imports no torch.

    attention       each rank has whole KV heads with their queries; with more ranks than KV heads, several ranks have
                    the same KV head, and write the same KV, for different queries
    MLP, experts    each rank has a range of the inner values
    vocabulary      each rank has a range of the tokens: rows of the embedding, and logits

A layer adds to the residual stream a sum over all ranks, in their order; the residual stream, norms and routers are the
same everywhere. (Megatron-LM, arXiv 1909.08053; shares need not be equal here.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pillion.engine.models.layer_operations import Entries, Layer, Share
from pillion.engine.models.model_config import ModelConfig
from pillion.engine.models.model_shard import ModelShard
from pillion.errors import ConfigError
from pillion.kvstore.memory.head_shares import shares_of

if TYPE_CHECKING:
    from pillion.engine.models.decoder import LayerWeights

# Inner values and tokens are shared out in units of this size, which is that of a kernel's narrowest packed panel.
UNIT = 32


@dataclass(frozen=True, slots=True)
class RankShard(ModelShard):
    """Describes the share of rank ``rank`` out of ``size`` ranks, which are several. :meth:`of` makes it.

    Attributes:
        heads: the model's query heads that the rank has.
        model_heads: how many query heads the model has.
    """

    heads: range = range(0)
    model_heads: int = 0

    @classmethod
    def of(cls, config: ModelConfig, rank: int, size: int) -> RankShard:
        """Computes the share of a rank. Raises ConfigError for a model that ``size`` ranks cannot share."""
        kv_heads, group = config.num_kv_heads, config.num_heads // config.num_kv_heads
        dense = config.moe is None or config.moe.beside or not all(config.moe.layers)
        inner = [config.intermediate_size] if dense else []
        inner += [config.moe.intermediate_size] if config.moe is not None else []
        least = min(*inner, config.vocab_size)
        if least <= (size - 1) * UNIT:
            raise ConfigError(f"--tensor-parallel-size {size} is too much to share {least} values in units of {UNIT}")
        sharers = max(1, size // kv_heads)
        if size > kv_heads and (size % kv_heads or group % sharers):
            raise ConfigError(
                f"--tensor-parallel-size {size} does not fit {config.num_heads} heads over {kv_heads} KV heads: at most"
                f" {kv_heads} ranks, or a multiple of {kv_heads} that divides {config.num_heads}"
            )
        shares = shares_of(kv_heads, size)
        if size > kv_heads:
            heads = [range(each * group // sharers, (each + 1) * group // sharers) for each in range(size)]
        else:
            heads = [range(mine.start * group, mine.stop * group) for mine in shares]
        for count in config.kv_head_counts:
            if not all(_fits(each, config.num_heads // count) for each in heads):
                raise ConfigError(
                    f"--tensor-parallel-size {size} does not fit {config.num_heads} heads over {count} KV heads, as"
                    f" some layers of {config.family} have them"
                )
        return cls(shares[rank], rank, size, heads=heads[rank], model_heads=config.num_heads)

    def kv_heads_of(self, count: int) -> range:
        group = self.model_heads // count
        return range(self.heads.start // group, -(-self.heads.stop // group))

    def lower(self, config: ModelConfig) -> Iterator[ModelShard]:
        return (self.of(config, rank, self.size) for rank in range(self.rank))

    def cut(self, weights: LayerWeights, layer: Layer) -> LayerWeights:
        from pillion.engine.ranks.rank_weights import shard_layer

        return shard_layer(weights, layer, self)

    def inner(self, width: int) -> range:
        return _share(width, UNIT, self.rank, self.size)

    def entries(self, piece: Entries) -> range:
        match piece.share:
            case Share.WHOLE:
                return range(piece.size)
            case Share.INNER:
                return self.inner(piece.size)
            case Share.HEADS:
                heads = self.heads
            case Share.KV_HEADS:
                heads = self.kv_heads_of(piece.size // piece.head)
        return range(heads.start * piece.head, heads.stop * piece.head)

    def vocabulary(self, tokens: int) -> range:
        return _share(tokens, UNIT, self.rank, self.size)

    def local(self, config: ModelConfig) -> ModelConfig:
        moe = config.moe
        if moe is not None:
            inner, shared = len(self.inner(moe.intermediate_size)), len(self.inner(moe.shared))
            moe = replace(moe, intermediate_size=inner, shared=shared)
        mine = {count: len(self.kv_heads_of(count)) for count in config.kv_head_counts}
        return replace(
            config,
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            layer_heads=tuple(
                None if heads is None else replace(heads, kv_heads=mine[heads.kv_heads]) for heads in config.layer_heads
            ),
            intermediate_size=len(self.inner(config.intermediate_size)),
            layer_widths=tuple(len(self.inner(width)) for width in config.layer_widths),
            moe=moe,
        )


def _fits(heads: range, group: int) -> bool:
    """Returns whether query heads are those of whole KV heads, which have ``group`` each, or some of one."""
    whole = heads.start % group == 0 == heads.stop % group
    return whole or heads.start // group == (heads.stop - 1) // group


def _share(total: int, unit: int, rank: int, size: int) -> range:
    """Returns rank ``rank``'s part of ``total`` in whole units: shares differ by one unit at most, the larger ones come
    first, and the last rank's ends with ``total``."""
    units = -(-total // unit)
    each, more = divmod(units, size)
    first = rank * each + min(rank, more)
    last = first + each + (rank < more)
    return range(min(first * unit, total), min(last * unit, total))
