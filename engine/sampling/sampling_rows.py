"""Holds the sampling parameters of a step's rows, as arrays, and the chosen tokens. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Holds the parameters with which R rows of logits are sampled.

    Attributes:
        temperature: [R] float32; 0 is greedy.
        top_k: [R] int64; 0 keeps all.
        top_p: [R] float32 in (0, 1]; 1 keeps all.
        min_p: [R] float32 in [0, 1]; 0 keeps all.
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

    temperature: Float32
    top_k: Int64
    top_p: Float32
    min_p: Float32
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
        values: dict[str, Any] = {
            name: np.array([neutral if (given := getattr(one, name)) is None else given for one in params], dtype)
            for name, neutral, dtype in _OF_ROWS
        }
        # A top_k of -1 keeps all tokens, as 0 does.
        values["top_k"] = np.maximum(values["top_k"], 0)
        values["seeds"] = np.array([seed & _SEED_MASK for seed in seeds], np.uint64)
        values["positions"] = np.array(positions, np.int64)
        return cls(**{"logprobs": np.full(len(params), -1, np.int64), **values, **more})

    def __post_init__(self) -> None:
        greedy = max(self.temperature.tolist(), default=0.0) < MIN_TEMPERATURE
        plain = greedy and not self.edits and max(self.logprobs.tolist(), default=-1) < 0
        object.__setattr__(self, "plain", plain)

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def cut(self) -> Bool:
        """Says which rows draw from a part of their tokens, [R]."""
        found: Bool = (self.top_k > 0) | (self.top_p < 1.0) | (self.min_p > 0.0)
        return found


@dataclass(frozen=True, slots=True)
class Sampled:
    """Holds the tokens that a step chose. For each SequencePiece of the plan, in order, these are its ``samples``
    tokens, followed by one token for each of its ``sibling_seeds``.

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
