"""Shard of a model that a process of a worker computes: the whole model, a rank's share of each layer (tensor
parallelism), some of the layers, or a rank's share of some layers. Imports no torch.

    attention       each rank has whole KV heads with their queries; with more ranks than KV heads, several ranks have
                    the same KV head, and write the same KV, for different queries
    states          each rank has whole key heads (Mamba-2: groups) with their state heads; with more ranks than key
                    heads, several ranks have the same key head
    convolutions    each rank has the channels of its heads, and the channels that share a piece of the state with them,
                    which other ranks compute, too; in layers without heads, a range of the channels
    MLP, experts    each rank has a range of the inner values; with ``whole_experts`` a range of the experts instead
    vocabulary      each rank has a range of the tokens: rows of the embedding, and logits

A layer adds an all-reduced sum to the residual stream, in rank order; residual stream, norms and routers are
replicated. (Megatron-LM, arXiv 1909.08053; shards need not be equal here.) A single process is a group of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from pillion.engine.models.layer_operations import Entries, Share
from pillion.engine.models.model_config import ModelConfig
from pillion.errors import ConfigError
from pillion.kernels.state_pieces import PIECE_CHANNELS
from pillion.kvstore.memory.head_shares import shares_of

if TYPE_CHECKING:
    import torch

# Sharding unit of FFN channels and vocabulary: the narrowest packed panel.
UNIT = 32


@dataclass(frozen=True, slots=True)
class Channels:
    """Channels of a convolution in a process. A rank's channels fill whole pieces of the layer's state, so that ranks
    that write the same piece write the same bytes. So a rank may have channels that it does not need, and it repeats
    the model's last channel to fill the last piece.

    Attributes:
        numbers: the channels' indices in the model.
        starts: for each part of a row, the index in ``numbers`` of the first channel that the process needs.
    """

    numbers: tuple[int, ...]
    starts: tuple[int, ...]

    @property
    def pieces(self) -> tuple[int, ...]:
        """Indices of the pieces of the layer's state that the channels occupy."""
        return tuple(number // PIECE_CHANNELS for number in self.numbers[::PIECE_CHANNELS])


@dataclass(frozen=True, slots=True)
class ModelShard:
    """Shard of a model that process ``rank`` of ``size`` computes; made by :meth:`of`.

    Attributes:
        kv_heads: KV heads of the process.
        layers: layers that it computes; None for all.
        whole_experts: True if each process has whole experts, False if it has a part of every expert.
        heads: query heads of the process.
        model_heads: query heads of the model.
        state_keys, state_heads: the process's key heads (Mamba-2: groups) of states, and their state heads.
    """

    kv_heads: range
    rank: int = 0
    size: int = 1
    layers: range | None = None
    whole_experts: bool = False
    heads: range = range(0)
    model_heads: int = 0
    state_keys: range = range(0)
    state_heads: range = range(0)

    @classmethod
    def of(cls, config: ModelConfig, rank: int, size: int) -> ModelShard:
        """Return the shard of a rank out of ``size``. Raises ConfigError if the model cannot be divided among ``size``
        ranks."""
        dense = config.moe is None or config.moe.beside or not all(config.moe.layers)
        inner = [config.intermediate_size] if dense else []
        inner += [config.moe.intermediate_size] if config.moe is not None else []
        narrowest = min(*inner, config.vocab_size)
        if narrowest <= (size - 1) * UNIT:
            raise ConfigError(f"--tensor-parallel-size {size} is too large for {narrowest} values in units of {UNIT}")
        shares, heads = _heads_of_ranks(size, config.num_heads, config.num_kv_heads, "KV heads")
        for count in config.kv_head_counts:
            if not all(_fits(own, config.num_heads // count) for own in heads):
                raise ConfigError(
                    f"--tensor-parallel-size {size} does not fit {config.num_heads} heads over {count} KV heads, as"
                    f" some layers of {config.family} have them"
                )
        keys: Sequence[range] = [range(0)] * size
        states = keys
        if config.linear is not None and config.linear.heads:
            state_keys_name = "keys in layers with states"
            keys, states = _heads_of_ranks(size, config.linear.heads, config.linear.key_heads, state_keys_name)
        elif config.linear is not None and config.hidden_size <= (size - 1) * PIECE_CHANNELS:
            raise ConfigError(
                f"--tensor-parallel-size {size} is too large for {config.hidden_size} channels of convolutions in"
                f" units of {PIECE_CHANNELS}"
            )
        return cls(
            *(shares[rank], rank, size),
            heads=heads[rank],
            model_heads=config.num_heads,
            state_keys=keys[rank],
            state_heads=states[rank],
        )

    @property
    def whole(self) -> bool:
        """True if this process computes whole layers."""
        return self.size == 1

    @property
    def gives_logits(self) -> bool:
        """True if the process needs the LM head. Processes with some of the layers belong to prefill workers, which do
        not sample."""
        return self.layers is None

    @property
    def leads(self) -> bool:
        """True for rank 0, which alone adds what is not sharded, e.g. biases, to all-reduced sums."""
        return self.rank == 0

    @property
    def name(self) -> str:
        """Name of this shard in file names of packed weights; "" for the whole model."""
        return "" if self.whole else f"{self.rank}of{self.size}" + "_experts" * self.whole_experts

    def kv_heads_of(self, count: int) -> range:
        """Return the process's KV heads in a layer with ``count`` of them."""
        group = self.model_heads // count
        return range(self.heads.start // group, -(-self.heads.stop // group))

    def channels(self, parts: Sequence[Entries]) -> Channels:
        """Return the process's channels of a convolution over these parts of a row."""
        if self.whole:
            ends = [sum(part.size for part in parts[:end]) for end in range(len(parts) + 1)]
            return Channels(tuple(range(ends[-1])), tuple(ends[:-1]))
        total = sum(part.size for part in parts)
        numbers: list[int] = []
        starts: list[int] = []
        first = 0
        for part in parts:
            needed = self.entries(part)
            begin, end = first + needed.start, first + needed.stop
            filled_start = begin // PIECE_CHANNELS * PIECE_CHANNELS
            starts.append(len(numbers) + begin - filled_start)
            filled = range(filled_start, -(-end // PIECE_CHANNELS) * PIECE_CHANNELS)
            numbers += [min(channel, total - 1) for channel in filled]
            first += part.size
        return Channels(tuple(numbers), tuple(starts))

    def own_layers(self, config: ModelConfig) -> range:
        """Return the process's layers. The process with the first layer also has the embedding, and the process with
        the last layer the LM head."""
        return range(config.num_layers) if self.layers is None else self.layers

    def lower(self, config: ModelConfig) -> Iterator[ModelShard]:
        """Yield the shards of lower ranks."""
        return (self.of(config, rank, self.size) for rank in range(self.rank))

    def inner(self, width: int) -> range:
        """Return the process's inner values of an MLP, or of each expert, out of ``width``."""
        return _share(width, UNIT, self.rank, self.size)

    def experts(self, count: int) -> range:
        """Return the numbers of the experts, out of ``count``, of which the process has all or a part."""
        return _share(count, 1, self.rank, self.size) if self.whole_experts else range(count)

    def entries(self, piece: Entries) -> range:
        """Return the process's entries of a piece of a tensor."""
        match piece.share:
            case Share.WHOLE:
                return range(piece.size)
            case Share.INNER:
                return self.inner(piece.size)
            case Share.HEADS:
                heads = self.heads
            case Share.KV_HEADS:
                heads = self.kv_heads_of(piece.size // piece.head)
            case Share.CHANNELS:
                return _share(piece.size, PIECE_CHANNELS, self.rank, self.size)
            case Share.STATE_HEADS:
                heads = self.state_heads
            case Share.STATE_KEYS:
                heads = self.state_keys
        return range(heads.start * piece.head, heads.stop * piece.head)

    def indices(self, pieces: Sequence[Entries], inner: torch.Tensor | None = None) -> torch.Tensor:
        """Return the indices of the process's entries along a dimension of a tensor, int64. ``inner``: indices to use
        for pieces with Share.INNER; None for the process's range."""
        import torch

        ranges, first = [], 0
        for convolved, group in groupby(pieces, key=lambda piece: piece.convolved):
            parts = [*group]
            if convolved:
                ranges.append(torch.tensor(self.channels(parts).numbers) + first)
                first += sum(part.size for part in parts)
                continue
            for piece in parts:
                own = self.entries(piece)
                reordered = inner if piece.share is Share.INNER else None
                ranges.append((torch.arange(own.start, own.stop) if reordered is None else reordered) + first)
                first += piece.size
        return torch.cat(ranges)

    def vocabulary(self, tokens: int) -> range:
        """Return the tokens whose embeddings and logits the process has, out of ``tokens``."""
        return _share(tokens, UNIT, self.rank, self.size)

    def local(self, config: ModelConfig) -> ModelConfig:
        """Return the config of the process's shard of the layers. Vocabulary, hidden size and number of layers are
        those of the model."""
        moe = config.moe
        if moe is not None:
            width, shared = moe.intermediate_size, len(self.inner(moe.shared))
            inner = width if self.whole_experts else len(self.inner(width))
            moe = replace(moe, intermediate_size=inner, shared=shared)
        kv_heads = {count: len(self.kv_heads_of(count)) for count in config.kv_head_counts}
        return replace(
            config,
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            layer_heads=tuple(
                None if heads is None else replace(heads, kv_heads=kv_heads[heads.kv_heads])
                for heads in config.layer_heads
            ),
            intermediate_size=len(self.inner(config.intermediate_size)),
            layer_widths=tuple(len(self.inner(width)) for width in config.layer_widths),
            moe=moe,
        )


def whole_model(config: ModelConfig) -> ModelShard:
    """Return the shard of a process that computes a whole model."""
    return ModelShard.of(config, 0, 1)


def _heads_of_ranks(size: int, heads: int, keys: int, what: str) -> tuple[Sequence[range], Sequence[range]]:
    """Return each rank's range of the key heads ``keys``, each of which serves an equal number of ``heads``, and each
    rank's range of the heads. Raises ConfigError, with the name ``what`` of the key heads, if ``size`` ranks cannot
    divide them."""
    group, sharers = heads // keys, max(1, size // keys)
    if size > keys and (size % keys or group % sharers):
        raise ConfigError(
            f"--tensor-parallel-size {size} does not fit {heads} heads over {keys} {what}: at most {keys} ranks, or a"
            f" multiple of {keys} that divides {heads}"
        )
    shares = shares_of(keys, size)
    if size > keys:
        return shares, [range(rank * group // sharers, (rank + 1) * group // sharers) for rank in range(size)]
    return shares, [range(own.start * group, own.stop * group) for own in shares]


def _fits(heads: range, group: int) -> bool:
    """Return whether query heads are those of whole KV heads, ``group`` each, or all belong to one KV head."""
    whole = heads.start % group == 0 == heads.stop % group
    return whole or heads.start // group == (heads.stop - 1) // group


def _share(total: int, unit: int, rank: int, size: int) -> range:
    """Return a rank's range of ``total`` values, in whole units. Ranges differ by at most one unit, the larger ones
    come first, and the last one ends at ``total``."""
    units = -(-total // unit)
    units_per_rank, remainder = divmod(units, size)
    first = rank * units_per_rank + min(rank, remainder)
    last = first + units_per_rank + (rank < remainder)
    return range(min(first * unit, total), min(last * unit, total))
