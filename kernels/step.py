"""One step as arrays: the tokens to run, the place of their KV, the parameters of sampled rows, and the chosen tokens.
The interface between the scheduler's plan and kernels and backends. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import is_
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pillion.types import SAMPLING_OPTIONS, SamplingParams, TokenLogprob

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt32 = npt.NDArray[np.uint32]
UInt64 = npt.NDArray[np.uint64]
Bool = npt.NDArray[np.bool_]
Ids = Int32 | Int64
# Inputs of some layers side by side, for each row [T]: float32, or bfloat16 as uint16.
States = npt.NDArray[Any]

# Below this temperature, logits / temperature overflow float32, and sampling is greedy: the softmax's limit. Exactly a
# float32, as temperatures are, so that comparisons in float32 and float64 agree.
MIN_TEMPERATURE = float(np.float32(1e-5))
# Token of a row whose largest logit is NaN or infinite: nothing can be drawn from it.
NO_TOKEN = -1
# Token of a row whose mask was late; a later step computes the row's position again.
MASK_LATE = -2
NO_IDS: Int64 = np.empty(0, np.int64)
# Parameters with a value per row: name, default and type.
_ROW_OPTIONS = [
    (name, one.neutral or 0.0, np.int64 if one.whole else np.float32)
    for name, one in SAMPLING_OPTIONS.items()
    if one.of_rows
]


@dataclass(frozen=True, slots=True)
class LayerState:
    """The state of one layer.

    Attributes:
        inputs: shape [tokens, channels] of the convolution inputs of the last tokens.
        memory: shape [matrices, rows, columns] of the recurrent matrices; () for none.
        transposed: whether kernels store matrices by columns, because sums run over the columns.
        keys: number of key vectors per token (neighbouring matrices share one) and values per vector; (0, 0) for none.
        rates: learning and forgetting rates per token and matrix; 0 if GPU kernels run token by token, and so store no
            rows of an unfinished chunk.
    """

    inputs: tuple[int, int]
    memory: tuple[int, ...] = ()
    transposed: bool = False
    keys: tuple[int, int] = (0, 0)
    rates: int = 0

    @property
    def values(self) -> int:
        """Number of values of the state."""
        return prod(self.inputs) + (prod(self.memory) if self.memory else 0)


@dataclass(frozen=True, slots=True)
class StateSlots:
    """Slots of the states of a step's sequences, for models with states.

    Attributes:
        reads: [S, pages] slots of each sequence's state before the step's tokens; -1 if there is none.
        writes: [S, pages] slots for the state after them.
    """

    reads: Int32
    writes: Int32


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A ragged batch of S sequences with T query tokens in total, over a paged KV pool.

    Attributes:
        token_ids: [T] ids of the tokens to run, sequence after sequence. ``Backend.launch`` explains ids below 0.
        positions: [T] position of each token in its sequence.
        query_starts: [S + 1] sequence s owns rows query_starts[s] .. query_starts[s + 1].
        context_lens: [S] tokens visible to the last query row of s, itself included: that row's position + 1.
        block_tables: [S, B] slots of each sequence's blocks in order, padded with 0 after its last block. The step
            writes the KV of position p of sequence s into row p % block_size of slot block_tables[s, p // block_size].
        sample_rows: [R + Q + P] indices of the rows with outputs. The first R, ascending and possibly repeated, are
            sampled. The next Q are only scored (SamplingRows.scored) or report some logits, and the last P report
            hidden states (Sampled.pooled). Empty for pure prefill.
        rope_rows: [T] each token's row of the rotary tables; None if that is its position.
        adapters: [S] each sequence's slot among the backend's adapters, -1 for none; None if no sequence has one.
        states: slots of the sequences' states; None in a model without them.
        pooled: P, the number of rows that report hidden states.
        pooled_ids: for each pooling row the ids whose logits are returned, or () for a hidden state. Logits are taken
            in order from the rows before the last P, hidden states from the last P rows.
        second_starts: [S] index of the second text's first token in a sequence that is a pair of texts, 0 for a single
            text; None if all are single. Read by encoders.
    """

    token_ids: Int32
    positions: Int32
    query_starts: Int32
    context_lens: Int32
    block_tables: Int32
    sample_rows: Int32
    rope_rows: Int32 | None = None
    adapters: Int32 | None = None
    states: StateSlots | None = None
    pooled: int = 0
    pooled_ids: tuple[tuple[int, ...], ...] = ()
    second_starts: Int32 | None = None

    @property
    def table_rows(self) -> Int32:
        """[T], each token's row of the rotary tables."""
        return self.positions if self.rope_rows is None else self.rope_rows

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_seqs(self) -> int:
        return len(self.context_lens)


def _no_ids() -> Int64:
    return NO_IDS


@dataclass(frozen=True, slots=True, kw_only=True)
class RowEdit:
    """Edits of single logits of one row. Ids are int32 or int64 arrays, views where possible.

    Attributes:
        row: index of the row.
        bias: added to the logits of ``biased``, each id at most once.
        repetition: divisor of positive, and factor of negative, logits of ``seen``, the tokens of prompt and answer; 1
            for none.
        presence, frequency: subtracted from the logits of ``answered``, the tokens of the answer: once per distinct
            token, and once per occurrence; 0 for none.
        banned: ids that may not be chosen.
    """

    row: int
    biased: Int64 = field(default_factory=_no_ids)
    bias: Float32 = field(default_factory=lambda: NO_IDS.astype(np.float32))
    seen: Ids = field(default_factory=_no_ids)
    repetition: float = 1.0
    answered: Ids = field(default_factory=_no_ids)
    presence: float = 0.0
    frequency: float = 0.0
    banned: Int64 = field(default_factory=_no_ids)


class RowMasks(Protocol):
    """Masks of the allowed tokens of rows with grammars, computed while the step runs."""

    @property
    def rows(self) -> Int64:
        """[M] ascending indices of the rows with a mask."""

    def take(self) -> tuple[UInt32, Bool]:
        """Wait for the masks, at most MASK_WAIT_MS. Called once, just before the rows are sampled.

        Returns bits, uint32 [M, ceil(vocabulary / 32)], where token t is allowed if bit t % 32 of word t // 32 is set,
        and which of the masks are ready, bool [M]. A row whose mask is late gets the token MASK_LATE.
        """


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Q rows that sample no token, and only report the log probability of a known one.

    Attributes:
        token_ids: [Q] int64.
        alternatives: [Q] int64, number of the most likely tokens to report besides the known one.
    """

    token_ids: Int64
    alternatives: Int64


# Parameters, seeds and arrays of the last step, since consecutive decode steps mostly have the same.
_last_parameters: tuple[tuple[SamplingParams, ...], tuple[int, ...], tuple[dict[str, Any], UInt64] | None] = (
    (),
    (),
    None,
)


def _parameters_of(params: tuple[SamplingParams, ...], seeds: tuple[int, ...]) -> tuple[dict[str, Any], UInt64]:
    """Return the read-only arrays of rows with these parameters, by option, and their seeds."""
    global _last_parameters
    last_params, last_seeds, last_arrays = _last_parameters
    # Compare by identity: comparing field by field would take longer than building the arrays.
    if last_arrays and seeds == last_seeds and len(params) == len(last_params) and all(map(is_, params, last_params)):
        return last_arrays
    values = {
        name: np.array([neutral if (given := getattr(one, name)) is None else given for one in params], dtype)
        for name, neutral, dtype in _ROW_OPTIONS
    }
    # top_k -1 means no limit, like 0.
    values["top_k"] = np.maximum(values["top_k"], 0)
    arrays = values, np.array([seed & 2**64 - 1 for seed in seeds], np.uint64)
    for array in (*values.values(), arrays[1]):
        array.flags.writeable = False
    _last_parameters = params, seeds, arrays
    return arrays


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The sampling parameters of R rows of logits; ``rows["top_p"]`` is the array of an option.

    Attributes:
        options: [R] float32 or int64, the values of each option of ``SamplingParams`` that is ``of_rows``, by name.
        seeds: [R] uint64.
        positions: [R] int64, the position of the chosen token in its sequence.
        logprobs: [R] int64, number of alternatives to report besides the chosen token's log probability; -1: no report.
        edits: edits of logits, at most one entry per row.
        scored: the rows of logits after these R, which are only scored; None for none.
        masks: masks of the rows with a grammar; None if no row has one. Masks are applied first: all other options, and
            reported log probabilities, see a vocabulary of the allowed tokens. Banned ids that would leave no token of
            a mask are not banned.
        plain: whether all rows are greedy, without edits and reports; they may be masked. Derived from the other
            fields.
    """

    options: Mapping[str, Any]
    seeds: UInt64
    positions: Int64
    logprobs: Int64
    edits: tuple[RowEdit, ...] = ()
    scored: ScoredRows | None = None
    masks: RowMasks | None = None
    plain: bool = field(init=False)

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int], **more: Any
    ) -> SamplingRows:
        """Build the arrays for rows with these parameters. ``more``: the other fields; without ``logprobs`` nothing is
        reported."""
        options, own_seeds = _parameters_of(tuple(params), tuple(seeds))
        more.setdefault("logprobs", np.full(len(params), -1, np.int64))
        return cls(options=options, seeds=own_seeds, positions=np.array(positions, np.int64), **more)

    def __post_init__(self) -> None:
        greedy = bool(self["temperature"].max(initial=0.0) < MIN_TEMPERATURE)
        plain = greedy and not self.edits and bool(self.logprobs.max(initial=-1) < 0)
        object.__setattr__(self, "plain", plain)

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, option: str) -> npt.NDArray[Any]:
        array: npt.NDArray[Any] = self.options[option]
        return array


@dataclass(frozen=True, slots=True)
class Sampled:
    """The results of a step. Tokens are those of each ScheduledChunk of the plan, in order: its ``samples`` tokens,
    then one token for each of its ``parallel_seeds``.

    A row without a finite largest logit has the token NO_TOKEN; a row whose mask is late has MASK_LATE. ``logprobs`` is
    empty if no row of the step reports any, else it has one entry per token. ``scored`` has one entry per row that is
    only scored, whose log probability is NaN if the logits are not finite.

    ``borrowed_s``: time saved by cores borrowed from other workers. ``states``: the hidden states requested by
    ``HostBackend.set_aux_hidden_state_layers``, of every row of the step, else None. ``pooled`` has a row of float32
    for each of StepBatch.pooled_ids: the output of the model's last norm for a token, [hidden], or the requested
    logits.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob | None, ...] = ()
    scored: tuple[TokenLogprob, ...] = ()
    borrowed_s: float = 0.0
    states: States | None = field(default=None, compare=False)
    pooled: tuple[Float32, ...] = field(default=(), compare=False)
