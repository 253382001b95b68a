"""What each rank of a worker computes, where a worker is several processes (tensor parallelism). Imports no torch.

    attention       each rank has whole KV heads with their queries; with more ranks than KV heads, several ranks have
                    the same KV head, and write the same KV, for different queries
    MLP, experts    each rank has a range of the inner values
    vocabulary      each rank has a range of the tokens: rows of the embedding, and logits

What a layer adds to the residual stream is a sum over all ranks, in their order; the residual stream, norms and routers
are the same everywhere. (Megatron-LM, arXiv 1909.08053; shares need not be equal here.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pillion.engine.models.model_config import ModelConfig
from pillion.errors import ConfigError
from pillion.kvstore.memory.shards import shares_of

# Inner values and tokens are shared out in units of so many: what the narrowest packed panel of a kernel holds.
UNIT = 32


@dataclass(frozen=True, slots=True)
class RankSplit:
    """The share of rank ``rank`` of ``size``. Made by :meth:`of`.

    Attributes:
        kv_heads, heads: the model's KV heads and query heads that the rank has.
    """

    rank: int
    size: int
    kv_heads: range
    heads: range

    @classmethod
    def of(cls, config: ModelConfig, rank: int, size: int) -> RankSplit:
        """Shares out a model. Raises ConfigError for one that ``size`` ranks cannot share."""
        kv_heads, group = config.num_kv_heads, config.num_heads // config.num_kv_heads
        inner = [config.intermediate_size] if config.moe is None or not all(config.moe.layers) else []
        inner += [config.moe.intermediate_size] if config.moe is not None else []
        least = min(*inner, config.vocab_size)
        if least <= (size - 1) * UNIT:
            raise ConfigError(f"--tensor-parallel-size {size} is too much to share {least} values in units of {UNIT}")
        if size <= kv_heads:
            mine = shares_of(kv_heads, size)[rank]
            return cls(rank, size, mine, range(mine.start * group, mine.stop * group))
        sharers = size // kv_heads
        if size % kv_heads or group % sharers:
            raise ConfigError(
                f"--tensor-parallel-size {size} does not fit {config.num_heads} heads over {kv_heads} KV heads: at most"
                f" {kv_heads} ranks, or a multiple of {kv_heads} that divides {config.num_heads}"
            )
        mine, own = shares_of(kv_heads, size)[rank], group // sharers
        return cls(rank, size, mine, range(rank * own, (rank + 1) * own))

    @property
    def whole(self) -> bool:
        """Whether there is nothing to share."""
        return self.size == 1

    @property
    def cpu_name(self) -> str:
        """How the rank's packed weights for the CPU kernels are named in the models' cache."""
        return "cpu" if self.whole else f"cpu{self.rank}of{self.size}"

    @property
    def leads(self) -> bool:
        """Whether this rank adds what is to be added once, such as the biases of sums over all ranks."""
        return self.rank == 0

    def inner(self, width: int) -> range:
        """The inner values of an MLP, or of each expert, that the rank has out of ``width``."""
        return _share(width, UNIT, self.rank, self.size)

    def vocabulary(self, tokens: int) -> range:
        """The tokens whose embeddings and logits the rank has out of ``tokens``."""
        return _share(tokens, UNIT, self.rank, self.size)

    def local(self, config: ModelConfig) -> ModelConfig:
        """The shape of the rank's own layers. The vocabulary, the hidden size and the layers are those of the model."""
        if self.whole:
            return config
        moe = config.moe
        if moe is not None:
            moe = replace(moe, intermediate_size=len(self.inner(moe.intermediate_size)))
        return replace(
            config,
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=len(self.inner(config.intermediate_size)),
            moe=moe,
        )


def _share(total: int, unit: int, rank: int, size: int) -> range:
    """Rank ``rank``'s part of ``total`` in whole units: shares differ by one unit at most, the larger ones first, and
    the last rank's ends with ``total``."""
    units = -(-total // unit)
    each, more = divmod(units, size)
    first = rank * each + min(rank, more)
    last = first + each + (rank < more)
    return range(min(first * unit, total), min(last * unit, total))
