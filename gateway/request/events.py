"""The events and actions of :mod:`pillion.gateway.request.request_machine`.

An event's name is a noun and what happened to it (TicketGranted), an action's begins with a verb (OpenTicket). Both are
plain values: sans-IO (I9). They are msgspec structs, which Python creates in a third of a named tuple's time: some are
made for every token.
"""

from __future__ import annotations

from msgspec import Struct

from pillion.errors import PillionError
from pillion.gateway.planning.planner import FetchPlan, RequestPlan
from pillion.types import FinishReason, TokenLogprob
from pillion.v1.decode_pb2 import DecodeTimings
from pillion.v1.prefill_pb2 import ChunkAck


class TicketHold(Struct, frozen=True):
    """The gateway's hold on a ticket: at which node, under which session's epoch."""

    node_id: str
    epoch: int
    ticket_id: int


# ---- events ----------------------------------------------------------------------------------------------------


class Event(Struct, frozen=True):
    """Something that happened to a request."""


class AttemptEvent(Event, frozen=True):
    """Something that happened to one attempt of a request."""

    attempt: int


class AttemptLoss(AttemptEvent, frozen=True):
    """A call of an attempt failed.

    ``retryable``: another component or a new ticket may avoid the error. ``patience_s``: above 0 where what failed is
    merely away and is being brought back; waiting for it is no attempt, and the request waits for so long in all.
    ``killed``: the worker that died in a step with this request, and maybe because of it; empty where that is not so.
    """

    error: PillionError
    retryable: bool
    patience_s: float = 0.0
    killed: str = ""


class PlanMade(AttemptEvent, frozen=True):
    """The planner has made a plan."""

    plan: RequestPlan


class PlanFailed(AttemptLoss, frozen=True):
    """No plan could be made, for instance because no worker lives. ``retryable``: what it needs lived when planning
    began. A new request has waited before it is told so; one that was under way waits for ``patience_s``."""


class TicketGranted(AttemptEvent, frozen=True):
    """The node has pinned ``pinned_blocks`` and reserved the rest (I3)."""

    hold: TicketHold
    pinned_blocks: int


class TicketLost(AttemptLoss, frozen=True):
    """The node refused, or went away before it answered."""


class BlocksFetched(AttemptEvent, frozen=True):
    """The fetch is over: the first ``blocks`` blocks of the prompt are pinned now."""

    blocks: int


class ChunkAcked(AttemptEvent, frozen=True):
    """A chunk is committed under the ticket, at the decode worker's node."""

    ack: ChunkAck


class SpanEnded(AttemptEvent, frozen=True):
    """The prefill call ended well. Everything before ``end_tokens`` is under the ticket. That is less than the split
    where not all blocks could be fetched to the decode worker's node."""

    end_tokens: int


class SpanLost(AttemptLoss, frozen=True):
    """The prefill call failed."""


class TicketAdopted(AttemptEvent, frozen=True):
    """The decode worker holds the ticket itself now."""


class TokensSampled(AttemptEvent, frozen=True):
    """The decode worker sampled ``token_ids``, in order. ``timings`` come with the first tokens, and where guesses were
    judged; ``logprobs`` has one entry for each token where the client asked for them."""

    token_ids: tuple[int, ...]
    timings: DecodeTimings | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


class PromptScored(AttemptEvent, frozen=True):
    """The decode worker knows how likely the prompt's next tokens were."""

    logprobs: tuple[TokenLogprob, ...]


class DecodeFinished(AttemptEvent, frozen=True):
    """The stream ended by itself."""

    reason: FinishReason
    timings: DecodeTimings | None


class DecodeLost(AttemptLoss, frozen=True):
    """The stream failed, or its worker went away."""


class StillQueued(AttemptEvent, frozen=True):
    """A worker says that the span or the stream waits, at this place in its line; 0: its prompt is being computed. It
    changes nothing, but the attempt is not silent."""

    position: int


class AttemptSilent(AttemptEvent, frozen=True):
    """No event of the attempt has come for the longest time that is allowed."""


class StopStringFound(Event, frozen=True):
    """The text has reached a stop string; the answer is its first ``kept_tokens`` tokens."""

    kept_tokens: int


class LeaderSubmitted(Event, frozen=True):
    """The leader's submit, of this attempt and plan, begins the follower's stream too."""

    attempt: int
    plan: RequestPlan


class LeaderRetried(Event, frozen=True):
    """The leader's submit came to nothing, and the leader is at this attempt now."""

    attempt: int


class LeaderStarted(Event, frozen=True):
    """The leader has a token: from now on the follower is handled by itself."""


class RequestCancelled(Event, frozen=True):
    """The client went away."""


class DeadlinePassed(Event, frozen=True):
    """The client's time is over."""


# ---- actions ---------------------------------------------------------------------------------------------------


class Action(Struct, frozen=True):
    """Something that is to be done for a request."""


class AttemptAction(Action, frozen=True):
    """Something that is to be done for one attempt."""

    attempt: int


class TicketAction(AttemptAction, frozen=True):
    """A call that works under a ticket."""

    plan: RequestPlan
    hold: TicketHold


class LookUp(AttemptAction, frozen=True):
    """After ``after_ms``: hash ``token_ids``, ask the index, plan. Answer: PlanMade or PlanFailed.

    ``unscored_from``: see ClusterSnapshot.
    """

    token_ids: tuple[int, ...]
    avoid: frozenset[str]
    after_ms: int
    unscored_from: int | None = None


class OpenTicket(AttemptAction, frozen=True):
    """Pin and reserve at the plan's node. Answer: TicketGranted or TicketLost."""

    plan: RequestPlan


class Fetch(TicketAction, frozen=True):
    """Let the ticket's node fetch the blocks that it lacks. Answer: BlocksFetched, whatever happens (I1)."""

    wanted: FetchPlan


class RunSpan(TicketAction, frozen=True):
    """Send cached..split to the prefill worker. Answer: ChunkAcked each, then SpanEnded; or SpanLost."""

    token_ids: tuple[int, ...]


class SubmitDecode(TicketAction, frozen=True):
    """Send the prompt tail to the decode worker. Answer: TicketAdopted, TokensSampled, then DecodeFinished;
    or DecodeLost.

    Attributes:
        awaited_blocks: blocks that a RunSpan sent at the same time commits; the worker waits for them at the node.
        forks: indexes of the answers whose streams begin with this submit.
        scored_tokens: tokens behind the prompt's first one whose log probability is not wanted from this attempt.
    """

    token_ids: tuple[int, ...]
    awaited_blocks: int = 0
    forks: tuple[int, ...] = ()
    scored_tokens: int = 0


class StopWork(AttemptAction, frozen=True):
    """Stop the attempt's look-up, ticket call, fetch or span. A ticket granted nevertheless must still be reported.

    ``after_ms``: how long a span whose blocks are all committed may take for its last acknowledgement.
    """

    after_ms: int = 0


class CancelDecode(AttemptAction, frozen=True):
    """Tell the decode worker that nobody wants the stream."""


class ReleaseTicket(Action, frozen=True):
    """Release a ticket."""

    hold: TicketHold


class Emit(Action, frozen=True):
    """Give the client the answer's next tokens, with one log probability each or with none."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class EmitScores(Action, frozen=True):
    """Give the client the log probabilities of the prompt's next tokens."""

    logprobs: tuple[TokenLogprob, ...]


class Finish(Action, frozen=True):
    """The answer is complete. Terminal."""

    reason: FinishReason


class Fail(Action, frozen=True):
    """The request ends with an error. Terminal."""

    error: PillionError
