"""Says what one process computes of a model: the whole of it, the share of a rank, or some layers. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from pillion.engine.models.layer_operations import Entries, Layer, Share
from pillion.engine.models.model_config import ModelConfig
from pillion.kernels.cpu.states.pieces import PIECE_CHANNELS

if TYPE_CHECKING:
    import torch

    from pillion.engine.models.layer_weights import LayerWeights


@dataclass(frozen=True, slots=True)
class Channels:
    """Lists the channels of a convolution that a process has. Those of a rank are whole pieces of the layer's state,
    so that processes which write one piece write the same bytes: a rank also has some channels that are nothing to it,
    and the last channel once more where it fills the last piece.

    Attributes:
        numbers: the channels, by their numbers in the model.
        starts: for each part of a row the place here where the process's own entries begin.
    """

    numbers: tuple[int, ...]
    starts: tuple[int, ...]

    @property
    def pieces(self) -> tuple[int, ...]:
        """Gives the numbers of the pieces of the layer's state that the channels take."""
        return tuple(number // PIECE_CHANNELS for number in self.numbers[::PIECE_CHANNELS])


@dataclass(frozen=True, slots=True)
class ModelShard:
    """Describes the share of each layer that process ``rank`` out of ``size`` computes: in this class all of it, in a
    subclass a part.

    Attributes:
        kv_heads: the model's KV heads that the process has.
        layers: the layers that it computes; None stands for all.
        whole_experts: whether it has some of a mixture's experts, and all of each, where processes share a mixture.
    """

    kv_heads: range
    rank: int = 0
    size: int = 1
    layers: range | None = None
    whole_experts: bool = False

    @property
    def whole(self) -> bool:
        """Says whether this process computes the whole of each of its layers."""
        return self.size == 1

    @property
    def gives_logits(self) -> bool:
        """Says whether the process needs what makes logits: a process with some of the layers is a prefill worker's,
        which chooses no tokens."""
        return self.layers is None

    @property
    def leads(self) -> bool:
        """Says whether this process adds what must be added once, such as the biases of sums over all processes."""
        return self.rank == 0

    @property
    def name(self) -> str:
        """Gives the name that tells the files of this share's packed weights from those of other shares; "" for the
        whole model."""
        return "" if self.whole else f"{self.rank}of{self.size}" + "_experts" * self.whole_experts

    def kv_heads_of(self, count: int) -> range:
        """Returns the KV heads that the process has in a layer with ``count`` of them."""
        return range(count)

    def state_heads_of(self, count: int) -> range:
        """Returns those of ``count`` heads with a matrix in a layer's state that the process has."""
        return range(count)

    def state_keys_of(self, count: int) -> range:
        """Returns those of ``count`` keys, or groups, of such heads that the process has."""
        return range(count)

    def channels(self, parts: Sequence[Entries]) -> Channels:
        """Returns the channels of a convolution over these parts of a row that the process has."""
        ends = [sum(part.size for part in parts[:end]) for end in range(len(parts) + 1)]
        return Channels(tuple(range(ends[-1])), tuple(ends[:-1]))

    def own_layers(self, config: ModelConfig) -> range:
        """Returns the layers that the process computes. The first layer comes with the embedding, and the last one with
        the logits."""
        return range(config.num_layers) if self.layers is None else self.layers

    def cut(self, weights: LayerWeights, layer: Layer) -> LayerWeights:
        """Returns the process's share of a layer whose linear layers are plain."""
        return weights

    def lower(self, config: ModelConfig) -> Iterator[ModelShard]:
        """Yields the shares of the processes whose rank is lower."""
        return iter(())

    def inner(self, width: int) -> range:
        """Returns the inner values of an MLP, or of each expert, that the process has out of ``width``."""
        return range(width)

    def experts(self, count: int) -> range:
        """Returns the experts that the process has, or has a part of, out of ``count``."""
        return range(count)

    def entries(self, piece: Entries) -> range:
        """Returns the entries of a piece of a tensor that the process has."""
        return range(piece.size)

    def indices(self, pieces: Sequence[Entries], inner: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the entries that the process has along a dimension of a tensor, as int64. ``inner`` has its inner
        values, where they are not in order."""
        import torch

        found, first = [], 0
        for convolved, some in groupby(pieces, key=lambda piece: piece.convolved):
            parts = [*some]
            if convolved:
                found.append(torch.tensor(self.channels(parts).numbers) + first)
                first += sum(part.size for part in parts)
                continue
            for piece in parts:
                mine = self.entries(piece)
                named = inner if piece.share is Share.INNER else None
                found.append((torch.arange(mine.start, mine.stop) if named is None else named) + first)
                first += piece.size
        return torch.cat(found)

    def vocabulary(self, tokens: int) -> range:
        """Returns the tokens whose embeddings and logits the process has out of ``tokens``."""
        return range(tokens)

    def local(self, config: ModelConfig) -> ModelConfig:
        """Gives the shape of the process's own layers. Vocabulary, hidden size and number of layers are the model's."""
        return config


def whole_model(config: ModelConfig) -> ModelShard:
    """Returns the share of a process that computes all of a model."""
    return ModelShard(range(config.num_kv_heads))
