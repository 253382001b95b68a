"""Defines the classes that describe a decoder layer: its operations, in order, and the tensors that they read.

A family lists the operations of a layer (:mod:`pillion.engine.models.families`), and everything else follows from that
list: the names and shapes of tensors in checkpoints, how they are loaded, packed and shared out to ranks, and what each
backend computes. Between :class:`Norm` and :class:`AddToResidual` each operation makes new rows of the last one's.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from enum import Enum

# This is the slope of the activation xIELU at 0.
XIELU_SLOPE = 0.5


class Share(Enum):
    """Names the unit in which the entries along a dimension of a tensor are divided among the processes that share a
    model."""

    WHOLE = "each process has all of them"
    HEADS = "query heads"
    KV_HEADS = "KV heads"
    INNER = "inner values of an MLP, or of an expert"
    CHANNELS = "channels between the two matrices of a short convolution"
    STATE_HEADS = "heads that have a matrix in the layer's state"
    STATE_KEYS = "what several such heads share: keys and queries, or what writes and what reads"


@dataclass(frozen=True, slots=True)
class Entries:
    """Describes entries that follow one another along a dimension of a tensor.

    Attributes:
        size: how many there are.
        head: how many of the entries belong to a head, where they are shared out by heads.
        rotated: how many of a head's entries are rotated, where a family rotates a part of them, or neighbours; 0
            elsewhere. The decoder has them in another order than checkpoints
            (:func:`pillion.engine.models.rope.partial_order`).
        interleaved: whether neighbours are rotated with each other.
        still: how many of a head's entries stand before those that ``rotated`` is about.
        convolved: whether a convolution reads the entries, whose last inputs are a part of the layer's state. Such
            pieces of a tensor follow one another, and a process has whole pieces of the state of them
            (:class:`pillion.engine.models.model_shard.Channels`).
        stored: how many of a head's entries checkpoints have, the first ones; zeros stand behind them. 0 for all.
    """

    size: int
    share: Share = Share.WHOLE
    head: int = 1
    rotated: int = 0
    interleaved: bool = False
    still: int = 0
    convolved: bool = False
    stored: int = 0

    @property
    def in_files(self) -> int:
        """Gives how many of the entries checkpoints have."""
        return self.size // self.head * self.stored if self.stored else self.size


class Role(Enum):
    """Says what a tensor is for, which decides how it is loaded and packed."""

    NORM = "the weight of a norm, and perhaps its bias"
    HEAD_NORM = "the weights of a norm over each head, one row for each; of a LayerNorm if they are by head, else RMS"
    MATRIX = "the matrix of a linear layer, which may be quantized, and perhaps its bias"
    EXACT_MATRIX = "a matrix that is never quantized, because its few products choose or weigh whole rows"
    HEAD_MATRICES = "a matrix for each head, widened on load, of which a part is multiplied from the other side"
    TAPS = "the factors of a convolution of each channel on its own, and perhaps its bias"
    VECTOR = "numbers that are used as they are"
    EXACT_VECTOR = "numbers that stay float32, because a choice depends on them"


# Roles of tensors that are multiplied by rows.
MATRICES = (Role.MATRIX, Role.EXACT_MATRIX, Role.HEAD_MATRICES)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTensor:
    """Describes a tensor of a layer.

    Attributes:
        name: the name of the tensor within its layer, as the decoder's code has it.
        rows: the parts, each with its size, that make up its first dimension.
        inputs: the parts that make up its second dimension; () for a vector.
        checkpoint_names: its names in checkpoints, relative to the layer and without ".weight" and ".bias": each is a
            list of tensors which, stacked along their first dimension, are this one. One tensor for each piece of
            ``rows``, or fewer, of which the first one has the first pieces. In the names of an expert's tensors {}
            stands for its number. A norm without checkpoint names has a weight of ones, and no tensor.
        bias: whether a linear layer or a norm has a bias.
        by_head: whether a norm over each head subtracts the mean first (LayerNorm), and checkpoints have a weight of
            its own for each head, in one tensor for each piece of ``rows``.
        experts: the number of experts that each have such a matrix; 0 where the layer has one matrix.
        stacked: the names that one tensor for all experts has in checkpoints: transformers 5's and a family's own. That
            of their biases is called NAME_bias.
        transposed: whether plain stacked tensors are [experts, inputs, outputs] in checkpoints; None where they are so
            in some, and [experts, outputs, inputs] in others.
        alternating: whether the rows of the two pieces are in turn in checkpoints: the first of one, the first of the
            other...
        eps: a norm's smallest variance where it is not the model's; 0 elsewhere.
        suffix: how a norm's names in checkpoints end.
        factor: the factor of a norm's weight.
        groups: where checkpoints have so many groups, each with its part of every piece of ``rows``; 0 elsewhere.
        scales: factors of the pieces of ``rows``, with which loading multiplies them; () for none.
        gated: whether checkpoints have, for each head of the first two pieces, its query and then its gate; the decoder
            has all gates first.
        ones: how many dimensions of one entry checkpoints have before a vector's own, and behind it.
        optional: whether zeros stand for an exact vector that a checkpoint lacks.
        centered: whether a norm is a LayerNorm although the model's are RMS norms.
    """

    name: str
    role: Role
    rows: tuple[Entries, ...]
    inputs: tuple[Entries, ...] = ()
    checkpoint_names: tuple[tuple[str, ...], ...]
    bias: bool = False
    by_head: bool = False
    experts: int = 0
    stacked: tuple[str, ...] = ()
    transposed: bool | None = False
    alternating: bool = False
    eps: float = 0.0
    suffix: str = ".weight"
    factor: float = 1.0
    groups: int = 0
    scales: tuple[float, ...] = ()
    gated: bool = False
    ones: tuple[int, int] = (0, 0)
    optional: bool = False
    centered: bool = False

    def pieces_of(self, names: Sequence[str]) -> list[slice]:
        """Return which pieces of ``rows`` each tensor of one choice of names holds, in the order of ``names``. Where
        there are fewer names than pieces, the first tensor holds several pieces, the first ones."""
        joined = len(self.rows) - len(names) + 1
        return [slice(0, joined), *(slice(number, number + 1) for number in range(joined, len(self.rows)))]

    @property
    def shape(self) -> tuple[int, ...]:
        """Gives the shape of the tensor, or of one expert's."""
        return tuple(sum(piece.size for piece in dimension) for dimension in (self.rows, self.inputs) if dimension)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Gives the shape of the tensor, or of one expert's, in checkpoints."""
        return tuple(sum(piece.in_files for piece in dimension) for dimension in (self.rows, self.inputs) if dimension)

    @property
    def padded(self) -> bool:
        """Says whether zeros stand behind some of what checkpoints have."""
        return self.shape != self.stored_shape


def matrix(
    name: str,
    rows: tuple[Entries, ...],
    inputs: tuple[Entries, ...],
    *checkpoint_names: tuple[str, ...],
    bias: bool = False,
) -> LayerTensor:
    """Describe a linear layer's matrix; each of ``checkpoint_names`` names its parts in checkpoints."""
    return LayerTensor(
        name=name, role=Role.MATRIX, rows=rows, inputs=inputs, checkpoint_names=checkpoint_names, bias=bias
    )


@dataclass(frozen=True, slots=True)
class LayerOperation:
    """Represents an operation of a layer; its fields are the tensors that it reads, and numbers."""


@dataclass(frozen=True, slots=True)
class Norm(LayerOperation):
    """Makes rows of the residual stream: normed, or as they are where a model has no norm there."""

    weight: LayerTensor | None


@dataclass(frozen=True, slots=True)
class Multiply(LayerOperation):
    """Multiplies rows by a matrix, and adds its bias. In front of :class:`Attend` its outputs are queries, keys and
    values."""

    matrix: LayerTensor


@dataclass(frozen=True, slots=True)
class NormHeads(LayerOperation):
    """Norms each head of queries and keys."""

    weight: LayerTensor


@dataclass(frozen=True, slots=True)
class NormValues(LayerOperation):
    """Norms each head of values, by an RMS norm without weights."""


@dataclass(frozen=True, slots=True)
class NormProjections(LayerOperation):
    """Norms all queries of a row together, and all its keys."""

    queries: LayerTensor
    keys: LayerTensor


@dataclass(frozen=True, slots=True)
class Rotate(LayerOperation):
    """Rotates queries and keys by the model's rotary embedding number ``rope``."""

    rope: int


@dataclass(frozen=True, slots=True)
class GrowQueries(LayerOperation):
    """Multiplies queries by a factor that grows with their position
    (:class:`pillion.engine.models.model_config.QueryGrowth`)."""


@dataclass(frozen=True, slots=True)
class Attend(LayerOperation):
    """Writes keys and values into the pool, and attends the queries. A layer whose queries see the keys and values of
    an earlier one (``ModelConfig.kv_sources``) makes queries alone, and writes nothing.

    Attributes:
        window: how many tokens a query sees, itself included; 0 means all tokens up to it.
        sinks: one score for each query head that every softmax counts beside those of the tokens, and that takes no
            value (gpt-oss); None where a family has none.
        chunked: whether a query sees not the last ``window`` tokens, but those since the last multiple of ``window``.
    """

    window: int
    sinks: LayerTensor | None = None
    chunked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIndex:
    """The indexer of DeepSeek's sparse attention (DSA, arXiv 2512.02556): each query attends to ``top`` tokens only.

    Attributes:
        heads: index queries per token.
        dim: values of an index query and of a token's only index key, of which the rotated ones are the first.
        top: max tokens that a query attends to.
        interleaved: whether neighbors are rotated with each other.
    """

    heads: int
    dim: int
    top: int
    interleaved: bool


@dataclass(frozen=True, slots=True)
class AttendLatents(LayerOperation):
    """Attends over latents (multi-head latent attention, DeepSeek V2): writes each row's latents and rotated key into
    the pool, and makes rows of all heads' results.

    A head's key is ``up``'s first part times the latents, beside the rotated key that all heads share; its value is the
    second part times the latents. So that no key or value is made of a row of KV, the first part multiplies queries
    instead, and the second one the weighted sums of latents.

    Attributes:
        query_down, query_norm: what makes the few values of which ``query_up`` makes queries, and their norm; None
            where ``query_up`` reads the rows themselves.
        query_up: makes queries; in each head the values that are rotated are the last.
        down: makes a row's latents, and behind them the rotated key.
        norm: the norm of the latents.
        up: for each head the matrix that makes its key and its value of the latents. Where a checkpoint has it
            quantized, it is widened when it is loaded.
        rope: the number of the rotary embedding; None where nothing is rotated, and the values that would be are used
            as they are (Kimi-Linear).
        grows: whether queries are multiplied by a factor that grows with their position (:class:`GrowQueries`).
        index: the indexer; None where queries see all tokens.
        index_queries, index_key, index_norm, index_weights: make index queries of what ``query_up`` reads, and of the
            layer's rows a token's index key, its LayerNorm, and a weight per index query. All None in a layer that
            reuses the selection of the layer before (GLM-5).
    """

    query_down: LayerTensor | None
    query_norm: LayerTensor | None
    query_up: LayerTensor
    down: LayerTensor
    norm: LayerTensor
    up: LayerTensor
    rope: int | None
    grows: bool = False
    index: TokenIndex | None = None
    index_queries: LayerTensor | None = None
    index_key: LayerTensor | None = None
    index_norm: LayerTensor | None = None
    index_weights: LayerTensor | None = None


@dataclass(frozen=True, slots=True)
class KeepGate(LayerOperation):
    """Takes the first ``values`` values of each row away, and keeps them as the gate of :class:`Gate`."""

    values: Entries


@dataclass(frozen=True, slots=True)
class Gate(LayerOperation):
    """Multiplies rows by the sigmoid of the gate that :class:`KeepGate` keeps; each of its values is for as many
    neighbours of a row, one or those of a head."""


@dataclass(frozen=True, slots=True)
class ShortConvolution(LayerOperation):
    """Computes a causal convolution of each channel on its own, over the last tokens of its sequence (LFM2): of three
    parts of a row, the first times the third is convolved, and the second multiplies the result.

    The last inputs of ``taps`` are the layer's state (:mod:`pillion.engine.models.layer_states`).
    """

    taps: LayerTensor


@dataclass(frozen=True, slots=True)
class DeltaRule(LayerOperation):
    """Computes the gated delta rule (arXiv 2412.06464), token by token: each head has a matrix, which decays, forgets
    what it holds for the token's key, learns the token's value for it, and is read by the token's query.

    Reads normed rows, and makes rows of all heads' results, normed and gated. Queries, keys and values pass a
    convolution first. The matrices and the convolution's last inputs are the layer's state.

    Attributes:
        inputs: makes queries, keys, values and, unless ``gate_up`` makes it, the gate of each value.
        rates: makes for each head of values how much it learns and, unless ``forget_up`` makes it, how much it forgets.
        taps: the convolution.
        decay, shift: logarithms of how fast each head forgets, and what is added to its rate.
        forget_down, forget_up: what makes the few values of which ``forget_up`` makes how much each row of a head's
            matrix forgets on its own (Kimi-Linear); None where a head has one rate for all rows.
        gate_down, gate_up: what makes the few values of which ``gate_up`` makes gates, which are sigmoids then.
        norm: the weight of the norm of each head's results, which ``eps`` belongs to.
        key_heads, heads: how many heads there are of queries and keys, and of values; neighbours share a key.
        key_dim, head_dim: how many values a query and a key have, and a value.
        doubled: whether what is learnt counts twice.
    """

    inputs: LayerTensor
    rates: LayerTensor
    taps: LayerTensor
    decay: LayerTensor
    shift: LayerTensor
    norm: LayerTensor
    eps: float
    key_heads: int
    heads: int
    key_dim: int
    head_dim: int
    doubled: bool = False
    forget_down: LayerTensor | None = None
    forget_up: LayerTensor | None = None
    gate_down: LayerTensor | None = None
    gate_up: LayerTensor | None = None


@dataclass(frozen=True, slots=True)
class StateSpace(LayerOperation):
    """Computes a state space with a decay for each token (Mamba-2, arXiv 2405.21060), token by token: each head has a
    matrix, which decays, gets its token's values times what makes them, and is read.

    Reads normed rows, and makes rows of all heads' results, gated and normed.

    Attributes:
        inputs: makes gates, values, what writes and what reads, both for each group of heads, and the steps of time.
        taps: the convolution of values and of what writes and reads.
        decay, shift, skip: for each head the logarithm of how fast it forgets, what is added to its step of time, and
            how much of its values is added to its results.
        norm: the weight of the norm of each group's results, which ``eps`` belongs to; None where they are not normed.
        heads, head_dim: how many heads there are, and how many values each has.
        groups, state_dim: how many groups there are, and how many columns a head's matrix has.
        gate_first: whether gated results are normed, not normed results gated.
    """

    inputs: LayerTensor
    taps: LayerTensor
    decay: LayerTensor
    shift: LayerTensor
    skip: LayerTensor
    norm: LayerTensor | None
    eps: float
    heads: int
    head_dim: int
    groups: int
    state_dim: int
    gate_first: bool = True


@dataclass(frozen=True, slots=True)
class SelectiveScan(LayerOperation):
    """Computes a state space whose channels each have a row of their own, all of whose values decay on their own
    (Mamba-1, arXiv 2312.00752), token by token.

    Reads normed rows, and makes rows of all channels' results, gated. Its state is in matrices of ``head_dim``
    channels.

    Attributes:
        inputs: makes the channels' values and gates.
        taps: the convolution of values.
        sides: makes of convolved values the few values of which ``steps`` makes steps of time, what writes and what
            reads; all channels share the two.
        step_norm, write_norm, read_norm: the norms of these three.
        steps: makes each channel's step of time.
        decay, skip: for each channel the logarithms [state_dim] of how fast its row forgets, and how much of its values
            is added to its results.
        heads, head_dim: how many matrices there are, and how many channels each has.
        state_dim: how many values a channel's row has.
    """

    inputs: LayerTensor
    taps: LayerTensor
    sides: LayerTensor
    step_norm: LayerTensor
    write_norm: LayerTensor
    read_norm: LayerTensor
    steps: LayerTensor
    decay: LayerTensor
    skip: LayerTensor
    heads: int
    head_dim: int
    state_dim: int

    @property
    def few(self) -> int:
        """Gives how many values steps of time are made of."""
        return self.steps.shape[1]


# These operations carry a state from token to token.
StateOperation = ShortConvolution | DeltaRule | StateSpace | SelectiveScan


@dataclass(frozen=True, slots=True)
class Mlp(LayerOperation):
    """Computes down(activation(gate) * up), where ``gate_up`` makes gate and up; without a gate, down(activation(up)),
    where it makes up alone.

    Attributes:
        row_gate: a matrix of one row; the sigmoid of its product with a row multiplies all of the row's results. An MLP
            that has it comes after :class:`Experts`, and reads the same rows.
        bends: for the activation "xielu" two numbers, whose softplus says how fast it grows and how much it bends below
            0; None for other activations.
    """

    gate_up: LayerTensor
    down: LayerTensor
    activation: str
    gated: bool = True
    row_gate: LayerTensor | None = None
    bends: LayerTensor | None = None


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """Describes gpt-oss's activation of gate and up: (up + 1) * gate * sigmoid(``alpha`` * gate), where gate is at most
    ``limit``, and up is between -``limit`` and ``limit``."""

    alpha: float
    limit: float


# On torch and on GPUs so many rows of a mixture of experts are computed at once.
MAX_MIXED_ROWS = 8192


@dataclass(frozen=True, slots=True)
class Experts(LayerOperation):
    """Computes a mixture of experts, each of which is an MLP as in :class:`Mlp`.

    Attributes:
        per_token: how many experts the router chooses for a row.
        normalize: whether the scores of the chosen experts are scaled to a sum of 1.
        sigmoid: whether scores are sigmoids of the router's products, not their softmax.
        choice_bias: numbers that are added to the scores where experts are chosen, and only there.
        scale: the factor of the scores.
        exact: whether the router's products are not rounded, although there are neither sigmoids nor a bias.
        groups: the number of groups of neighbouring experts. A row's experts are those of its best ``kept_groups``; how
            good a group is, is the sum of its best ``group_best`` scores, those with the bias (DeepSeek V2 and V3).
        router_bias: what is added to the router's products.
        clamped: the activation, where it is not the one that is named.
        scaled_inputs: whether scores multiply the rows that experts read, not their results.
        router_norm: the norm of the residual stream whose rows the router reads, where it does not read what experts
            read.
        expert_scales: a factor of the scores for each expert.
        gated: whether experts have gates; where they do not, ``gate_up`` makes what the activation alone is applied to.
    """

    router: LayerTensor
    gate_up: LayerTensor
    down: LayerTensor
    activation: str
    per_token: int
    normalize: bool
    sigmoid: bool = False
    choice_bias: LayerTensor | None = None
    scale: float = 1.0
    exact: bool = False
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 2
    router_bias: LayerTensor | None = None
    clamped: ClampedSwiglu | None = None
    scaled_inputs: bool = False
    router_norm: LayerTensor | None = None
    expert_scales: LayerTensor | None = None
    gated: bool = True


@dataclass(frozen=True, slots=True)
class AddUp(LayerOperation):
    """Adds the rows to those that the layer's operations of this kind before it have added up, and goes on from the
    sum. Where there is a norm, the rows are normed before."""

    norm: LayerTensor | None


@dataclass(frozen=True, slots=True)
class ApplyTokenInputs(LayerOperation):
    """Computes projection(activation(gate(rows)) * the rows of this layer that the token has beside its embedding
    (:class:`pillion.engine.models.model_config.TokenInputs`)). Each process computes all of it."""

    gate: LayerTensor
    projection: LayerTensor
    activation: str


@dataclass(frozen=True, slots=True)
class ScaleResidual(LayerOperation):
    """Multiplies the residual stream by a number."""

    factor: LayerTensor


@dataclass(frozen=True, slots=True)
class AddToResidual(LayerOperation):
    """Adds scale * rows to the residual stream; where there is a norm, the rows are normed before."""

    norm: LayerTensor | None
    scale: float


@dataclass(frozen=True, slots=True)
class Keep(LayerOperation):
    """Keeps the rows as they are now for a later :class:`Again`. Pairs of both nest as brackets do."""


@dataclass(frozen=True, slots=True)
class Again(LayerOperation):
    """Restores the rows that the :class:`Keep` of the same pair kept. Pairs of both nest as brackets do."""


Layer = tuple[LayerOperation, ...]


def tensors_of(operations: Iterable[LayerOperation]) -> Iterator[LayerTensor]:
    """Yield the tensors that operations read, in their order."""
    for operation in operations:
        for field in fields(operation):
            value = getattr(operation, field.name)
            if isinstance(value, LayerTensor):
                yield value
