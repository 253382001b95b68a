"""Describes one step as arrays: the tokens to run and where their KV is, the parameters with which rows are sampled,
and the chosen tokens. Kernels and backends read these; the scheduler's plan is made into them. Imports no torch."""

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
# States hold the inputs of some layers side by side, for each row [T]: float32, or uint16 that holds bfloat16.
States = npt.NDArray[Any]

# Below this temperature, logits / temperature overflow float32, and sampling is greedy: the softmax's limit.
# The number is exactly a float32, as temperatures are, so that comparisons in float32 and float64 agree.
MIN_TEMPERATURE = float(np.float32(1e-5))
# A row whose largest logit is NaN or infinite has this token, because nothing can be drawn from it.
NO_TOKEN = -1
# This stands for the token of a row whose mask was not there in time; a later step computes the row's position again.
MASK_LATE = -2
NO_IDS: Int64 = np.empty(0, np.int64)
_SEED_MASK = 2**64 - 1
# These are the parameters of which each row has a value: the name, the value where none is set, and the type.
_OF_ROWS = [
    (name, one.neutral or 0.0, np.int64 if one.whole else np.float32)
    for name, one in SAMPLING_OPTIONS.items()
    if one.of_rows
]


@dataclass(frozen=True, slots=True)
class LayerState:
    """Describes the state of one layer.

    Attributes:
        inputs: how many inputs of its convolution it keeps, those of the last tokens, and how many channels each has.
        memory: how many matrices it has, and their rows and columns; () for none.
        turned: whether kernels have a matrix by columns, because its columns are what its sums run over.
        keys: how many vectors each token has that write into the matrices, which neighbouring ones share, and their
            values; (0, 0) for none.
        rates: how many numbers each token has for a matrix that say how much it learns and forgets; 0 where GPU kernels
            go on token by token, and keep nothing of a chunk.
    """

    inputs: tuple[int, int]
    memory: tuple[int, ...] = ()
    turned: bool = False
    keys: tuple[int, int] = (0, 0)
    rates: int = 0

    @property
    def values(self) -> int:
        """Gives how many numbers the state has."""
        return prod(self.inputs) + (prod(self.memory) if self.memory else 0)


@dataclass(frozen=True, slots=True)
class StateSlots:
    """Says where the states of a step's sequences are, for models whose layers carry one.

    Attributes:
        reads: [S, pages] the slots that hold each sequence's state before the step's tokens; -1 where there are none.
        writes: [S, pages] the slots into which the step writes the state after them.
    """

    reads: Int32
    writes: Int32


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Is a ragged batch of S sequences with T query tokens in all, over a paged KV pool.

    Attributes:
        token_ids: [T] ids of the tokens to run, sequence after sequence. ``Backend.launch`` explains ids below 0.
        positions: [T] position of each token in its sequence.
        query_starts: [S + 1] sequence s owns rows query_starts[s] .. query_starts[s + 1].
        context_lens: [S] tokens that the last query row of s sees, itself included: that row's position + 1.
        block_tables: [S, B] slots of each sequence's blocks in order, padded with 0 after its last block. The step
            writes the KV of position p of sequence s into row p % block_size of slot block_tables[s, p // block_size].
        sample_rows: [R + Q + P] numbers of the rows that are computed to the end. The first R are sampled, and rise; a
            row may occur several times among them. The next Q are only scored (SamplingRows.scored), or some of their
            logits are wanted, and of the last P the hidden states are (Sampled.pooled). Empty for pure prefill.
        rope_rows: [T] each token's row of the rotary tables; None where that is its position.
        adapters: [S] the slot among the backend's adapters of each sequence's adapter, -1 for none; None where no
            sequence has one.
        states: where the sequences' states are; None in a model without them.
        pooled: P, how many rows give their hidden states.
        pooled_ids: what texts want, row by row in their order: the tokens whose logits are wanted of the next row
            before the last P, or () for the hidden state of the next one of these.
        seconds: [S] where a sequence that is a pair of texts has the second one's first token, and 0 for a single text;
            None where all are single. Encoders read it.
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
    seconds: Int32 | None = None

    @property
    def table_rows(self) -> Int32:
        """Returns [T], each token's row of the rotary tables."""
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
    """Describes changes of single logits of one row. Ids are int32 or int64 arrays, views where possible.

    Attributes:
        row: number of the row.
        bias: added to the logits of ``biased``, each id at most once.
        repetition: divisor of positive and factor of other logits of ``seen``, tokens of prompt and answer; 1: none.
        presence, frequency: subtracted from the logits of ``answered``, the tokens of the answer: once for each token,
            and once for each occurrence; 0: none.
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
    """Says which tokens the rows of grammars may choose; the masks are computed while the step runs."""

    @property
    def rows(self) -> Int64:
        """Gives the [M] rising numbers of the rows that have a mask."""

    def take(self) -> tuple[UInt32, Bool]:
        """Waits for the masks, MASK_WAIT_MS at most. It is called once, just before the rows are sampled.

        Returns bits, uint32 [M, ceil(vocabulary / 32)], where token t may be chosen if bit t % 32 of word t // 32 is
        set, and which of the masks are there, bool [M]. A row whose mask is late has the token MASK_LATE.
        """


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Describes rows [Q] that choose no token, and only report how likely a known token was.

    Attributes:
        token_ids: [Q] int64.
        alternatives: [Q] int64, number of the most likely tokens to report beside it.
    """

    token_ids: Int64
    alternatives: Int64


# Parameters and seeds of the last step's rows, with their arrays: those of a decode step are mostly the same.
_last_parameters: tuple[tuple[SamplingParams, ...], tuple[int, ...], tuple[dict[str, Any], UInt64] | None] = (
    (),
    (),
    None,
)


def _parameters_of(params: tuple[SamplingParams, ...], seeds: tuple[int, ...]) -> tuple[dict[str, Any], UInt64]:
    """Return the read-only arrays of rows with these parameters, by option, and their seeds."""
    global _last_parameters
    last_params, last_seeds, last = _last_parameters
    # Comparing parameters field by field would take longer than making the arrays.
    if last and seeds == last_seeds and len(params) == len(last_params) and all(map(is_, params, last_params)):
        return last
    values = {
        name: np.array([neutral if (given := getattr(one, name)) is None else given for one in params], dtype)
        for name, neutral, dtype in _OF_ROWS
    }
    # A top_k of -1 keeps all tokens, as 0 does.
    values["top_k"] = np.maximum(values["top_k"], 0)
    found = values, np.array([seed & _SEED_MASK for seed in seeds], np.uint64)
    for array in (*values.values(), found[1]):
        array.flags.writeable = False
    _last_parameters = params, seeds, found
    return found


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The parameters with which R rows of logits are sampled; ``rows["top_p"]`` is the array of an option.

    Attributes:
        options: [R] float32 or int64, the values of each option of ``SamplingParams`` that is ``of_rows``, by name.
        seeds: [R] uint64.
        positions: [R] int64, the position that the chosen token will have in its sequence.
        logprobs: [R] int64, number of alternatives to report beside the chosen token's log probability; -1: no report.
        edits: at most one for each row; rows without changes have none.
        scored: the rows of logits after these R, which are only scored.
        masks: of the rows that follow a grammar; None where no row does. A mask comes before everything else: all the
            others, reported log probabilities too, see a vocabulary of the allowed tokens. Banned ids that would leave
            no token of a mask are not banned.
        plain: whether every row just takes its largest logit, masked or not, without edits and reports. It is derived
            from the other fields.
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
        """Makes the arrays for rows with these parameters. ``more`` has the fields that no parameter gives; without
        ``logprobs`` nothing is reported."""
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
    """Holds the tokens that a step chose. For each ScheduledChunk of the plan, in order, these are its ``samples``
    tokens, followed by one token for each of its ``parallel_seeds``.

    A row without a finite largest logit has the token NO_TOKEN; a row whose mask is late has MASK_LATE. ``logprobs`` is
    empty if no row of the step reports any, else it has one entry for each token. ``scored`` has one for each row that
    is only scored; its log probability is NaN where the logits are no numbers.

    ``borrowed_s`` is how much longer the step would have taken without the cores that other workers lent. ``states``
    are those that ``HostBackend.keep_states`` asked for, of every row of the step; None where nobody did. ``pooled``
    has a row of float32 for each of StepBatch.pooled_ids: what the model's last norm made of a token, [hidden], or the
    logits that are wanted.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob | None, ...] = ()
    scored: tuple[TokenLogprob, ...] = ()
    borrowed_s: float = 0.0
    states: States | None = field(default=None, compare=False)
    pooled: tuple[Float32, ...] = field(default=(), compare=False)
