"""What happens to a request and what is to be done for it: the two vocabularies of
:mod:`pillion.gateway.request.request_machine`.

Tokens and Emit, which are made for every token, are plain tuples with names: those are made much faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pillion.errors import PillionError
from pillion.gateway.planning.planner import Bringing, Plan
from pillion.types import FinishReason, TokenLogprob
from pillion.wire.decode import DecodeTimings
from pillion.wire.prefill import ChunkAck


@dataclass(frozen=True, slots=True)
class Hold:
    """The gateway's hold on a ticket: at which node, under which session's epoch."""

    node_id: str
    epoch: int
    ticket_id: int


# ---- events ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Planned:
    """The planner has decided."""

    attempt: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class PlanFailed:
    """Nothing could be planned, for instance because no worker lives."""

    attempt: int
    error: PillionError


@dataclass(frozen=True, slots=True)
class TicketGranted:
    """The node has pinned ``pinned_blocks`` and reserved the rest (I3)."""

    attempt: int
    hold: Hold
    pinned_blocks: int


@dataclass(frozen=True, slots=True)
class TicketLost:
    """The node refused, or went away before it answered."""

    attempt: int
    error: PillionError
    retryable: bool


@dataclass(frozen=True, slots=True)
class Fetched:
    """The node has done what it could: ``blocks`` blocks of the prompt are pinned now."""

    attempt: int
    blocks: int


@dataclass(frozen=True, slots=True)
class ChunkAcked:
    """A chunk is committed under the ticket, at the decode worker's node."""

    attempt: int
    ack: ChunkAck


@dataclass(frozen=True, slots=True)
class SpanEnded:
    """The prefill call ended well. Everything before ``end_tokens`` is under the ticket; before the split, it is
    because not all could be brought to the decode worker's node."""

    attempt: int
    end_tokens: int


@dataclass(frozen=True, slots=True)
class SpanLost:
    """The prefill call failed."""

    attempt: int
    error: PillionError
    retryable: bool


@dataclass(frozen=True, slots=True)
class Adopted:
    """The decode worker holds the ticket itself now."""

    attempt: int


class Tokens(NamedTuple):
    """The decode worker sampled these, in order. ``timings`` come with the first ones, ``logprobs`` are one for each
    token where they were asked for."""

    attempt: int
    token_ids: tuple[int, ...]
    timings: DecodeTimings | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class DecodeFinished:
    """The stream ended by itself."""

    attempt: int
    reason: FinishReason
    timings: DecodeTimings | None


@dataclass(frozen=True, slots=True)
class DecodeLost:
    """The stream failed, or its worker went away."""

    attempt: int
    error: PillionError
    retryable: bool


@dataclass(frozen=True, slots=True)
class WentSilent:
    """Nothing was heard of the attempt for the longest time that is allowed."""

    attempt: int


@dataclass(frozen=True, slots=True)
class StopHit:
    """The text has reached a stop string; the answer is its first ``kept_tokens`` tokens."""

    kept_tokens: int


@dataclass(frozen=True, slots=True)
class Joined:
    """To an answer that follows: the first answer's submit, of this attempt and plan, begins its stream too."""

    attempt: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class Unjoined:
    """To an answer that follows: that submit came to nothing, and the first answer is at this attempt now."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Parted:
    """To an answer that follows: the first answer has a token, so from here on it stands for itself."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client went away."""


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The client's time is over."""


Event = (
    Planned
    | PlanFailed
    | TicketGranted
    | TicketLost
    | Fetched
    | ChunkAcked
    | SpanEnded
    | SpanLost
    | Adopted
    | Tokens
    | DecodeFinished
    | DecodeLost
    | WentSilent
    | StopHit
    | Joined
    | Unjoined
    | Parted
    | Cancelled
    | DeadlinePassed
)


# ---- actions ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LookUp:
    """After ``after_ms``: hash ``token_ids``, ask the index, plan. Answer: Planned or PlanFailed."""

    attempt: int
    token_ids: tuple[int, ...]
    avoid: frozenset[str]
    after_ms: int


@dataclass(frozen=True, slots=True)
class OpenTicket:
    """Pin and reserve at the plan's node. Answer: TicketGranted or TicketLost."""

    attempt: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class Fetch:
    """Let the ticket's node bring what it lacks. Answer: Fetched, whatever happens (I1)."""

    attempt: int
    plan: Plan
    hold: Hold
    wanted: Bringing


@dataclass(frozen=True, slots=True)
class RunSpan:
    """Send cached..split to the prefill worker. Answer: ChunkAcked each, then SpanEnded; or SpanLost."""

    attempt: int
    plan: Plan
    hold: Hold
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SubmitDecode:
    """Send the prompt tail to the decode worker. Answer: Adopted, Tokens, then DecodeFinished; or DecodeLost.

    ``awaited_blocks``: so many a RunSpan of the same moment commits; the worker waits for them at the node.

    ``forks`` are the indexes of the answers that begin with it; they hear of their own streams.
    """

    attempt: int
    plan: Plan
    hold: Hold
    token_ids: tuple[int, ...]
    awaited_blocks: int = 0
    forks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StopWork:
    """Stop the attempt's look-up, ticket call, fetch or span. A ticket granted nevertheless must still be reported."""

    attempt: int


@dataclass(frozen=True, slots=True)
class CancelDecode:
    """Tell the decode worker that nobody wants the stream."""

    attempt: int


@dataclass(frozen=True, slots=True)
class ReleaseTicket:
    """Let go of a ticket."""

    hold: Hold


class Emit(NamedTuple):
    """These tokens are the answer's next ones, with a log probability each or none."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """The answer is complete. Terminal."""

    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Fail:
    """The request ends with an error. Terminal."""

    error: PillionError


Action = (
    LookUp
    | OpenTicket
    | Fetch
    | RunSpan
    | SubmitDecode
    | StopWork
    | CancelDecode
    | ReleaseTicket
    | Emit
    | Finish
    | Fail
)
