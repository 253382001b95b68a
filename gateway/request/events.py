"""Events and actions of :mod:`pillion.gateway.request.request_machine`; sans-IO (I9).

An event's name is a noun and what happened to it (TicketGranted), an action's begins with a verb (OpenTicket). Actions
have no tokens: their performer reads those of the attempt from the machine. All are msgspec structs, which take a third
of a named tuple's time to create, since some are created per token.
"""

from __future__ import annotations

from msgspec import Struct

from pillion.errors import PillionError
from pillion.gateway.planning.planner import FetchPlan, RequestPlan
from pillion.types import FinishReason, TokenLogprob
from pillion.v1.decode_pb2 import DecodeTimings
from pillion.v1.prefill_pb2 import ChunkAck

# Max wait for KV memory at a prefill worker's node. Short, because the request has pinned memory at the decode worker's
# node: two requests that wait for each other's memory must both continue without a prefill worker.
MAX_REMOTE_ADMISSION_WAIT_S = 2.0


class TicketHold(Struct, frozen=True):
    """A ticket that this gateway holds at a node. ``epoch`` is that of its session at the node."""

    node_id: str
    epoch: int
    ticket_id: int


class Event(Struct, frozen=True):
    """Base of what can happen to a request."""


class AttemptEvent(Event, frozen=True):
    """Base of events of one attempt to serve an answer."""

    attempt: int


class AttemptLoss(AttemptEvent, frozen=True):
    """Base of events of a failed call.

    Attributes:
        retryable: True if another component or a new ticket may avoid the error.
        patience_s: if above 0, the component is expected to return: the retry does not count as an attempt until the
            request has waited this long in total.
        killed: id of the worker that died in a step with this request, which may be the cause; "" for none.
    """

    error: PillionError
    retryable: bool
    patience_s: float = 0.0
    killed: str = ""


class PlanMade(AttemptEvent, frozen=True):
    """The planner made a plan."""

    plan: RequestPlan


class PlanFailed(AttemptLoss, frozen=True):
    """No plan is possible, e.g. because no worker is live.

    ``retryable`` is True if the needed components were live when planning began. A new request has waited for them
    already; a later attempt waits for up to ``patience_s`` after this event.
    """


class TicketGranted(AttemptEvent, frozen=True):
    """The KV node pinned the prompt's first ``pinned_blocks`` blocks and reserved the rest (I3)."""

    hold: TicketHold
    pinned_blocks: int


class TicketLost(AttemptLoss, frozen=True):
    """The KV node refused a ticket, or was lost before it answered."""


class BlocksFetched(AttemptEvent, frozen=True):
    """A fetch ended: the first ``blocks`` blocks of the prompt are pinned."""

    blocks: int


class ChunkAcked(AttemptEvent, frozen=True):
    """A chunk was committed under the request's ticket at the decode worker's node."""

    ack: ChunkAck


class PrefillEnded(AttemptEvent, frozen=True):
    """The prefill call succeeded. The ticket has all blocks before ``end_tokens``, which is less than the split if not
    all blocks could be fetched to the decode worker's node."""

    end_tokens: int


class PrefillLost(AttemptLoss, frozen=True):
    """The prefill call failed."""


class TicketAdopted(AttemptEvent, frozen=True):
    """The decode worker adopted the ticket, which has pinned ``pinned_blocks`` leading blocks (I3)."""

    pinned_blocks: int = 0


class TokensSampled(AttemptEvent, frozen=True):
    """The decode worker sampled ``token_ids``. ``timings`` come with the first tokens and with verified draft tokens;
    ``logprobs`` has one entry per token if the client requested them."""

    token_ids: tuple[int, ...]
    timings: DecodeTimings | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


class PromptScored(AttemptEvent, frozen=True):
    """The decode worker scored the prompt's next tokens."""

    logprobs: tuple[TokenLogprob, ...]


class DecodeFinished(AttemptEvent, frozen=True):
    """The answer's stream ended normally. ``vector`` is the text's, if requested."""

    reason: FinishReason
    timings: DecodeTimings | None
    vector: bytes = b""


class DecodeLost(AttemptLoss, frozen=True):
    """The answer's stream failed, or its decode worker was lost."""


class StillQueued(AttemptEvent, frozen=True):
    """A heartbeat: the prefill range or the stream waits at this position in a worker's queue; 0 if its prompt is being
    computed."""

    position: int


class AttemptSilent(AttemptEvent, frozen=True):
    """The attempt had no event for the max time allowed."""


class StopStringFound(Event, frozen=True):
    """The text reached a stop string; the answer is its first ``kept_tokens`` tokens."""

    kept_tokens: int


class LeaderSubmitted(Event, frozen=True):
    """The leader (the request's first answer) was submitted, which started the follower's stream, in this attempt and
    plan."""

    attempt: int
    plan: RequestPlan


class LeaderRetried(Event, frozen=True):
    """The leader's stream was lost; the leader is at this attempt now."""

    attempt: int


class LeaderStarted(Event, frozen=True):
    """The leader has its first token: from now on the follower is retried by itself."""


class RequestCancelled(Event, frozen=True):
    """The client cancelled the request or disconnected."""


class DeadlinePassed(Event, frozen=True):
    """The client's deadline passed."""


class Action(Struct, frozen=True):
    """Base of what a request's machine asks its runner to do."""


class AttemptAction(Action, frozen=True):
    """Base of actions on one attempt to serve an answer."""

    attempt: int


class TicketAction(AttemptAction, frozen=True):
    """Base of calls that use a ticket."""

    plan: RequestPlan
    hold: TicketHold


class LookUp(AttemptAction, frozen=True):
    """Hash the attempt's tokens, ask the index and make a plan, after a delay of ``after_ms``. Answered by PlanMade or
    PlanFailed. ``avoid`` and ``unscored_from`` are those of ClusterSnapshot."""

    avoid: frozenset[str]
    after_ms: int
    unscored_from: int | None = None


class OpenTicket(AttemptAction, frozen=True):
    """Pin and reserve the prompt's blocks at the plan's node. Answered by TicketGranted or TicketLost. With ``resume``
    the request precedes new prompts in the node's queue for memory, since it has waited in it before."""

    plan: RequestPlan
    resume: bool = False


class Fetch(TicketAction, frozen=True):
    """Have the ticket's node fetch blocks. Always answered by BlocksFetched (I1)."""

    wanted: FetchPlan


class RunPrefill(TicketAction, frozen=True):
    """Send the prefill range, cached..split, to the prefill worker. Answered by ChunkAcked per chunk, then
    PrefillEnded; or by PrefillLost."""


class SubmitDecode(AttemptAction, frozen=True):
    """Send the prompt tail to the decode worker. Answered by TicketAdopted, TokensSampled, then DecodeFinished; or by
    DecodeLost.

    Attributes:
        hold: the gateway's ticket; None if the worker opens one.
        awaited_blocks: leading blocks for which the worker waits at the node, since a concurrent RunPrefill commits
            them.
        parallel_samples: indexes of the answers whose streams start with this submit.
        scored_tokens: number of tokens, after the prompt's first, whose log probabilities this attempt need not
            compute.
    """

    plan: RequestPlan
    hold: TicketHold | None
    awaited_blocks: int = 0
    parallel_samples: tuple[int, ...] = ()
    scored_tokens: int = 0


class StopWork(AttemptAction, frozen=True):
    """Cancel the attempt's look-up, ticket call, fetch or prefill range, after ``after_ms``: a grace period for the
    last acknowledgement of a prefill range whose blocks are all committed. A ticket that is granted nevertheless must
    be reported."""

    after_ms: int = 0


class CancelDecode(AttemptAction, frozen=True):
    """Cancel the stream at the decode worker."""


class ReleaseTicket(Action, frozen=True):
    """Release a ticket."""

    hold: TicketHold


class Emit(Action, frozen=True):
    """Send the answer's next tokens to the client. ``logprobs`` has one entry per token, or is empty."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class EmitScores(Action, frozen=True):
    """Send the log probabilities of the prompt's next tokens to the client."""

    logprobs: tuple[TokenLogprob, ...]


class Finish(Action, frozen=True):
    """Complete the answer; terminal. ``vector`` is the text's, if requested."""

    reason: FinishReason
    vector: bytes = b""


class Fail(Action, frozen=True):
    """Fail the request; terminal."""

    error: PillionError
