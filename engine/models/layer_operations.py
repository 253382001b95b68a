"""Vocabulary for describing a decoder layer: its operations, in order, and the tensors that they read.

A family lists the operations of a layer (:mod:`pillion.engine.models.families`), and everything else follows from that
list: names and shapes of tensors in checkpoints, how they are loaded, packed and sharded, and what each backend
computes. Between :class:`Norm` and :class:`AddToResidual` each operation transforms the rows of the one before. Imports
no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from enum import Enum

# Slope at 0 of the activation xIELU (``beta`` in transformers).
XIELU_SLOPE = 0.5


class Share(Enum):
    """Unit by which a dimension of a tensor is sharded among processes."""

    WHOLE = "each process has all of them"
    HEADS = "query heads"
    KV_HEADS = "KV heads"
    INNER = "inner values of an MLP, or of an expert"
    CHANNELS = "channels between the two matrices of a short convolution"
    STATE_HEADS = "heads of the layer's state, each with a matrix"
    STATE_KEYS = "keys and queries, or write and read vectors, that several state heads share"


@dataclass(frozen=True, slots=True)
class Entries:
    """Consecutive entries along a dimension of a tensor.

    Attributes:
        size: number of entries.
        head: entries per head, if sharded by heads.
        rotated: rotated entries per head, if only a part of the head is rotated, or neighbors are rotated together;
            else 0. The decoder reorders these heads (:func:`pillion.engine.models.rope.partial_order`).
        interleaved: True if neighbors are rotated together.
        rotated_start: index of the first rotated entry in a head.
        convolved: True for inputs of a convolution, which are consecutive in a tensor. A process has all channels of
            each piece of the convolution's state that it writes
            (:class:`pillion.engine.models.model_shard.Channels`).
        stored: leading entries of each head that checkpoints have; zeros are appended on load. 0: all.
    """

    size: int
    share: Share = Share.WHOLE
    head: int = 1
    rotated: int = 0
    interleaved: bool = False
    rotated_start: int = 0
    convolved: bool = False
    stored: int = 0

    @property
    def in_files(self) -> int:
        """Number of entries in checkpoints."""
        return self.size // self.head * self.stored if self.stored else self.size


class Role(Enum):
    """Purpose of a tensor, which decides how it is loaded and packed."""

    NORM = "weight of a norm, and its bias if it has one"
    HEAD_NORM = "weights of a norm over each head, a row per head: of a LayerNorm if ``by_head``, else of an RMS norm"
    MATRIX = "matrix of a linear layer, which may be quantized, and its bias if it has one"
    EXACT_MATRIX = "matrix that is never quantized, because its outputs select experts or tokens, or gate whole rows"
    HEAD_MATRICES = "a matrix per head, dequantized on load, since the absorbed form of MLA transposes a part of it"
    TAPS = "kernel of a depthwise convolution, and its bias if it has one"
    VECTOR = "numbers in the type of the weights"
    EXACT_VECTOR = "numbers in float32, e.g. decay rates, and biases for the choice of experts"


MATRICES = (Role.MATRIX, Role.EXACT_MATRIX, Role.HEAD_MATRICES)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTensor:
    """A tensor of a layer.

    Attributes:
        name: its name within the layer, in the decoder.
        rows: pieces of its first dimension.
        inputs: pieces of its second dimension; () for a vector.
        checkpoint_names: alternatives, of which a checkpoint has one: names of tensors to stack along their first
            dimension, relative to the layer and without ".weight" and ".bias". There is a tensor per piece of ``rows``,
            or fewer, and then the first tensor has the first pieces. {} stands for an expert's number. A norm without
            names has a weight of ones.
        bias: True if a linear layer or a norm has a bias.
        by_head: True if a norm over each head is a LayerNorm, with a separate weight per head, in one tensor per piece
            of ``rows``.
        experts: number of experts, each with such a matrix; 0 for a single matrix.
        stacked: names in checkpoints of a tensor with the matrices of all experts: transformers 5's and the family's.
            Its bias is NAME_bias.
        transposed: True if plain stacked tensors are [experts, inputs, outputs] in checkpoints; None if only in some
            checkpoints.
        alternating: True if checkpoints interleave the rows of the two pieces.
        eps: a norm's epsilon if not the model's; else 0.
        suffix: suffix of a norm's names in checkpoints.
        factor: factor of a norm's weight.
        groups: number of groups of rows in checkpoints, if each group has a part of every piece of ``rows``; else 0.
        scales: factors of the pieces of ``rows``, applied on load; () for none.
        gated: True if checkpoints alternate query and gate of each head in the first two pieces; the decoder has all
            gates first.
        ones: numbers of dimensions of size 1 before and after a vector's own in checkpoints.
        optional: True if zeros replace an exact vector that a checkpoint lacks.
        centered: True for a LayerNorm in a model of RMS norms.
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
        """Return the indices of the pieces of ``rows`` in each tensor of ``names``, one of the alternatives in
        ``checkpoint_names``. With fewer names than pieces, the first tensor has several pieces."""
        first_count = len(self.rows) - len(names) + 1
        return [slice(0, first_count), *(slice(number, number + 1) for number in range(first_count, len(self.rows)))]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor, or of one expert's."""
        return tuple(sum(piece.size for piece in dimension) for dimension in (self.rows, self.inputs) if dimension)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the tensor, or of one expert's, in checkpoints."""
        return tuple(sum(piece.in_files for piece in dimension) for dimension in (self.rows, self.inputs) if dimension)

    @property
    def padded(self) -> bool:
        """True if the tensor is larger than in checkpoints."""
        return self.shape != self.stored_shape


def matrix(
    name: str,
    rows: tuple[Entries, ...],
    inputs: tuple[Entries, ...],
    *checkpoint_names: tuple[str, ...],
    bias: bool = False,
) -> LayerTensor:
    """Return a linear layer's matrix; arguments as the fields of :class:`LayerTensor`."""
    return LayerTensor(
        name=name, role=Role.MATRIX, rows=rows, inputs=inputs, checkpoint_names=checkpoint_names, bias=bias
    )


@dataclass(frozen=True, slots=True)
class LayerOperation:
    """An operation of a layer; its fields are the tensors that it reads, and numbers."""


@dataclass(frozen=True, slots=True)
class Norm(LayerOperation):
    """Start of a branch: the rows become those of the residual stream, normed if there is a weight."""

    weight: LayerTensor | None


@dataclass(frozen=True, slots=True)
class Multiply(LayerOperation):
    """Matrix product of rows, plus bias. Before :class:`Attend` the outputs are queries, keys and values."""

    matrix: LayerTensor


@dataclass(frozen=True, slots=True)
class NormHeads(LayerOperation):
    """Norm of each head of queries and keys."""

    weight: LayerTensor


@dataclass(frozen=True, slots=True)
class NormValues(LayerOperation):
    """RMS norm of each head of values, without weights."""


@dataclass(frozen=True, slots=True)
class NormProjections(LayerOperation):
    """Norm over all queries of a row together, and over all its keys."""

    queries: LayerTensor
    keys: LayerTensor


@dataclass(frozen=True, slots=True)
class Rotate(LayerOperation):
    """Rotation of queries and keys by the model's rotary embedding ``rope``."""

    rope: int


@dataclass(frozen=True, slots=True)
class GrowQueries(LayerOperation):
    """Position-dependent query scale (:class:`pillion.engine.models.model_config.QueryGrowth`)."""


@dataclass(frozen=True, slots=True)
class Attend(LayerOperation):
    """Attention, after writing keys and values to the pool. A layer that shares an earlier one's KV
    (``ModelConfig.kv_sources``) has queries only, and writes nothing.

    Attributes:
        window: max tokens visible to a query, including its own; 0 for all.
        sinks: attention sinks (gpt-oss): a score per query head in the softmax, without a value; None for none.
        chunked: True if a query sees the tokens since the last multiple of ``window`` instead of the last ``window``.
    """

    window: int
    sinks: LayerTensor | None = None
    chunked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIndex:
    """The indexer of DeepSeek's sparse attention (DSA, arXiv 2512.02556): each query attends to ``top`` tokens only.

    Attributes:
        heads: index queries per token.
        dim: width of an index query, and of a token's single index key; their first values are rotated.
        top: max tokens that a query attends to.
        interleaved: True if neighbors are rotated together.
    """

    heads: int
    dim: int
    top: int
    interleaved: bool


@dataclass(frozen=True, slots=True)
class AttendLatents(LayerOperation):
    """Attention over latents (MLA, DeepSeek V2): writes each row's latents and rotated key to the pool, and returns
    rows of all heads' outputs.

    A head's key is the first part of ``up`` times the latents, followed by the rotated key shared by all heads; its
    value is the second part times the latents. In the absorbed form, the first part multiplies queries instead, and the
    second the weighted sums of latents.

    Attributes:
        query_down, query_norm: low-rank projection of queries and its norm; None if ``query_up`` reads the rows.
        query_up: makes queries; in each head the rotated values are last.
        down: makes a row's latents, then the rotated key.
        norm: norm of the latents.
        up: per head, the matrix from latents to key and value; dequantized on load.
        rope: index of the rotary embedding; None if nothing is rotated (Kimi-Linear).
        grows: True for position-dependent query scale (:class:`GrowQueries`).
        index: the indexer; None if queries see all tokens.
        index_queries, index_key, index_norm, index_weights: make index queries from the inputs of ``query_up``, and
            from the layer's rows a token's index key, its LayerNorm, and a weight per index query. All None in a layer
            that reuses the selection of the layer before (GLM-5).
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
    """Split of each row: its first ``values`` values become the gate of :class:`Gate`."""

    values: Entries


@dataclass(frozen=True, slots=True)
class Gate(LayerOperation):
    """Product of rows and the sigmoid of :class:`KeepGate`'s gate; each gate value applies to one value or one head."""


@dataclass(frozen=True, slots=True)
class ShortConvolution(LayerOperation):
    """Depthwise causal convolution over the last tokens of a sequence (LFM2): of three parts of a row, the product of
    the first and third is convolved, and multiplied by the second.

    The last inputs of ``taps`` are the layer's state (:mod:`pillion.engine.models.layer_states`).
    """

    taps: LayerTensor


@dataclass(frozen=True, slots=True)
class DeltaRule(LayerOperation):
    """Gated delta rule (arXiv 2412.06464), token by token: each head's matrix decays, unlearns its content for the
    token's key, learns the token's value for it, and is read by the token's query.

    Reads normed rows and returns rows of all heads' outputs, normed and gated. Queries, keys and values are convolved
    first. The matrices and the convolution's last inputs are the layer's state.

    Attributes:
        inputs: makes queries, keys, values and, unless ``gate_up`` does, gates.
        rates: makes each value head's learning rate and, unless ``forget_up`` does, its decay.
        taps: the convolution.
        decay, shift: log of each head's decay rate, and the bias of its time step.
        forget_down, forget_up: low-rank projection of a decay per row of a head's matrix (Kimi-Linear); None for one
            decay per head.
        gate_down, gate_up: low-rank projection of gates, then sigmoids.
        norm, eps: norm of each head's output.
        key_heads, heads: numbers of query/key heads and of value heads; adjacent value heads share a key.
        key_dim, head_dim: widths of queries and keys, and of values.
        doubled: True if the learning rate is doubled.
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
    """State-space model with a decay per token (Mamba-2, arXiv 2405.21060), token by token: each head's matrix decays,
    is updated with the token's values times its write vector, and is read.

    Reads normed rows and returns rows of all heads' outputs, gated and normed.

    Attributes:
        inputs: makes gates, values, write and read vectors (B and C) per group of heads, and time steps.
        taps: convolution of values and of write and read vectors.
        decay, shift, skip: per head, log of the decay rate, bias of the time step, and factor of the values added to
            the output (A_log, dt_bias, D).
        norm, eps: norm of each group's output; None for none.
        heads, head_dim: number of heads, and their width.
        groups, state_dim: number of groups, and columns of a head's matrix.
        gate_first: True if outputs are gated before the norm.
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
    """State-space model with a decay per element of each channel's row (Mamba-1, arXiv 2312.00752), token by token.

    Reads normed rows and returns rows of all channels' outputs, gated. The state is stored in matrices of ``head_dim``
    channels.

    Attributes:
        inputs: makes the channels' values and gates.
        taps: convolution of values.
        sides: makes, from convolved values, the inputs of ``steps`` and the write and read vectors (B and C), which all
            channels share.
        step_norm, write_norm, read_norm: norms of the inputs of ``steps``, and of write and read vectors.
        steps: makes each channel's time step.
        decay, skip: per channel, logs [state_dim] of decay rates, and the factor of its values added to the output.
        heads, head_dim: number of matrices, and their channels.
        state_dim: width of a channel's row.
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
        """Width of the inputs of ``steps`` (dt_rank)."""
        return self.steps.shape[1]


StateOperation = ShortConvolution | DeltaRule | StateSpace | SelectiveScan
# Operations that write keys and values, or states.
Mixer = Attend | AttendLatents | StateOperation


@dataclass(frozen=True, slots=True)
class Mlp(LayerOperation):
    """down(activation(gate) * up), where ``gate_up`` makes gate and up; without a gate, down(activation(up)), where
    ``gate_up`` makes only up.

    Attributes:
        row_gate: gate of the shared expert (Qwen): a matrix [1, hidden]. The sigmoid of its product with the inputs
            multiplies the output. The MLP then follows :class:`Experts`, and has the same inputs.
        bends: alpha_p and alpha_n of the activation "xielu", before their softplus; None for other activations.
    """

    gate_up: LayerTensor
    down: LayerTensor
    activation: str
    gated: bool = True
    row_gate: LayerTensor | None = None
    bends: LayerTensor | None = None


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """gpt-oss's activation: (up + 1) * gate * sigmoid(``alpha`` * gate), with gate at most ``limit``, and up within
    +-``limit``."""

    alpha: float
    limit: float


# Max rows per pass of a mixture of experts on torch and GPUs.
MAX_MIXED_ROWS = 8192


@dataclass(frozen=True, slots=True)
class Experts(LayerOperation):
    """Mixture of experts, each of which is an MLP like :class:`Mlp`.

    Attributes:
        per_token: experts per row.
        normalize: True if the scores of the chosen experts are scaled to a sum of 1.
        sigmoid: True if scores are sigmoids of the router's logits, not their softmax.
        choice_bias: added to the scores for choosing experts only.
        scale: factor of the scores.
        exact: True for float32 logits; they are also float32 with ``sigmoid`` or ``choice_bias``.
        groups: number of groups of consecutive experts. A row's experts are in its best ``kept_groups``, ranked by the
            sum of a group's best ``group_best`` scores, with bias (DeepSeek V2 and V3).
        router_bias: bias of the router's logits.
        clamped: activation to use instead of ``activation``, if not None.
        scaled_inputs: True if scores multiply the experts' inputs instead of their outputs.
        router_norm: norm of the residual stream for the router, if it does not read the experts' inputs.
        expert_scales: factor of the scores per expert.
        gated: True if experts have gates; otherwise ``gate_up`` has only up.
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
class AddToLayerSum(LayerOperation):
    """Addition of the rows, normed if there is a norm, to the layer's running sum, which becomes the rows."""

    norm: LayerTensor | None


@dataclass(frozen=True, slots=True)
class ApplyTokenInputs(LayerOperation):
    """projection(activation(gate(rows)) * the layer's part of the per-layer token inputs
    (:class:`pillion.engine.models.model_config.TokenInputs`)). Not sharded."""

    gate: LayerTensor
    projection: LayerTensor
    activation: str


@dataclass(frozen=True, slots=True)
class ScaleResidual(LayerOperation):
    """Product of the residual stream and a number."""

    factor: LayerTensor


@dataclass(frozen=True, slots=True)
class AddToResidual(LayerOperation):
    """Addition of scale * rows, normed if there is a norm, to the residual stream."""

    norm: LayerTensor | None
    scale: float


@dataclass(frozen=True, slots=True)
class SaveRows(LayerOperation):
    """Push of the rows onto the layer's stack."""


@dataclass(frozen=True, slots=True)
class RestoreRows(LayerOperation):
    """Pop of the rows from the layer's stack."""


Layer = tuple[LayerOperation, ...]


def tensors_of(operations: Iterable[LayerOperation]) -> Iterator[LayerTensor]:
    """Yield the tensors that operations read, in order."""
    for operation in operations:
        for field in fields(operation):
            value = getattr(operation, field.name)
            if isinstance(value, LayerTensor):
                yield value
