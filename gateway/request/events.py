"""The events and actions of :mod:`pillion.gateway.request.request_machine`.

An event's name is a noun and what happened to it (TicketGranted), an action's begins with a verb (OpenTicket). Both are
plain values: sans-IO (I9).
TokensSampled and Emit are made for every token and are named tuples, which Python creates faster than dataclasses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pillion.errors import PillionError
from pillion.gateway.planning.planner import FetchPlan, RequestPlan
from pillion.types import FinishReason, TokenLogprob
from pillion.v1.decode_pb2 import DecodeTimings
from pillion.v1.prefill_pb2 import ChunkAck


@dataclass(frozen=True, slots=True)
class TicketHold:
    """The gateway's hold on a ticket: at which node, under which session's epoch."""

    node_id: str
    epoch: int
    ticket_id: int


# ---- events ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlanMade:
    """The planner has made a plan."""

    attempt: int
    plan: RequestPlan


@dataclass(frozen=True, slots=True)
class PlanFailed:
    """No plan could be made, for instance because no worker lives."""

    attempt: int
    error: PillionError


@dataclass(frozen=True, slots=True)
class TicketGranted:
    """The node has pinned ``pinned_blocks`` and reserved the rest (I3)."""

    attempt: int
    hold: TicketHold
    pinned_blocks: int


@dataclass(frozen=True, slots=True)
class TicketLost:
    """The node refused, or went away before it answered."""

    attempt: int
    error: PillionError
    retryable: bool


@dataclass(frozen=True, slots=True)
class BlocksFetched:
    """The fetch is over: the first ``blocks`` blocks of the prompt are pinned now."""

    attempt: int
    blocks: int


@dataclass(frozen=True, slots=True)
class ChunkAcked:
    """A chunk is committed under the ticket, at the decode worker's node."""

    attempt: int
    ack: ChunkAck


@dataclass(frozen=True, slots=True)
class SpanEnded:
    """The prefill call ended well. Everything before ``end_tokens`` is under the ticket. That is less than the split
    where not all blocks could be fetched to the decode worker's node."""

    attempt: int
    end_tokens: int


@dataclass(frozen=True, slots=True)
class SpanLost:
    """The prefill call failed."""

    attempt: int
    error: PillionError
    retryable: bool


@dataclass(frozen=True, slots=True)
class TicketAdopted:
    """The decode worker holds the ticket itself now."""

    attempt: int


class TokensSampled(NamedTuple):
    """The decode worker sampled ``token_ids``, in order. ``timings`` come with the first tokens; ``logprobs`` has one
    entry for each token where the client asked for them."""

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
class AttemptSilent:
    """No event of the attempt has come for the longest time that is allowed."""

    attempt: int


@dataclass(frozen=True, slots=True)
class StopStringFound:
    """The text has reached a stop string; the answer is its first ``kept_tokens`` tokens."""

    kept_tokens: int


@dataclass(frozen=True, slots=True)
class LeaderSubmitted:
    """The leader's submit, of this attempt and plan, begins the follower's stream too."""

    attempt: int
    plan: RequestPlan


@dataclass(frozen=True, slots=True)
class LeaderRetried:
    """The leader's submit came to nothing, and the leader is at this attempt now."""

    attempt: int


@dataclass(frozen=True, slots=True)
class LeaderStarted:
    """The leader has a token: from now on the follower is handled by itself."""


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The client went away."""


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The client's time is over."""


Event = (
    PlanMade
    | PlanFailed
    | TicketGranted
    | TicketLost
    | BlocksFetched
    | ChunkAcked
    | SpanEnded
    | SpanLost
    | TicketAdopted
    | TokensSampled
    | DecodeFinished
    | DecodeLost
    | AttemptSilent
    | StopStringFound
    | LeaderSubmitted
    | LeaderRetried
    | LeaderStarted
    | RequestCancelled
    | DeadlinePassed
)


# ---- actions ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LookUp:
    """After ``after_ms``: hash ``token_ids``, ask the index, plan. Answer: PlanMade or PlanFailed."""

    attempt: int
    token_ids: tuple[int, ...]
    avoid: frozenset[str]
    after_ms: int


@dataclass(frozen=True, slots=True)
class OpenTicket:
    """Pin and reserve at the plan's node. Answer: TicketGranted or TicketLost."""

    attempt: int
    plan: RequestPlan


@dataclass(frozen=True, slots=True)
class Fetch:
    """Let the ticket's node fetch the blocks that it lacks. Answer: BlocksFetched, whatever happens (I1)."""

    attempt: int
    plan: RequestPlan
    hold: TicketHold
    wanted: FetchPlan


@dataclass(frozen=True, slots=True)
class RunSpan:
    """Send cached..split to the prefill worker. Answer: ChunkAcked each, then SpanEnded; or SpanLost."""

    attempt: int
    plan: RequestPlan
    hold: TicketHold
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SubmitDecode:
    """Send the prompt tail to the decode worker. Answer: TicketAdopted, TokensSampled, then DecodeFinished;
    or DecodeLost.

    Attributes:
        awaited_blocks: blocks that a RunSpan sent at the same time commits; the worker waits for them at the node.
        forks: indexes of the answers whose streams begin with this submit.
    """

    attempt: int
    plan: RequestPlan
    hold: TicketHold
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
    """Release a ticket."""

    hold: TicketHold


class Emit(NamedTuple):
    """Give the client the answer's next tokens, with one log probability each or with none."""

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
