"""Defines the events and actions of :mod:`pillion.gateway.request.request_machine`.

An event's name is a noun and what happened to it (TicketGranted), an action's begins with a verb (OpenTicket). Both are
plain values: sans-IO (I9). No action holds tokens: whoever performs it asks the machine for those of its attempt. They
are msgspec structs, which Python creates in a third of a named tuple's time: some are made for every token.
"""

from __future__ import annotations

from msgspec import Struct

from pillion.errors import PillionError
from pillion.gateway.planning.planner import FetchPlan, RequestPlan
from pillion.types import FinishReason, TokenLogprob
from pillion.v1.decode_pb2 import DecodeTimings
from pillion.v1.prefill_pb2 import ChunkAck

# A request waits at most this long for KV memory at a prefill worker's node. The time is short, because the request
# holds memory at the decode worker's node meanwhile: two requests may wait for each other's nodes, and then both go on
# without a prefill worker.
MAX_REMOTE_ADMISSION_WAIT_S = 2.0


class TicketHold(Struct, frozen=True):
    """Represents the gateway's hold on a ticket: at which node it is, and under which session's epoch."""

    node_id: str
    epoch: int
    ticket_id: int


# The following classes are events.


class Event(Struct, frozen=True):
    """Tells something that happened to a request."""


class AttemptEvent(Event, frozen=True):
    """Tells something that happened to one attempt of a request."""

    attempt: int


class AttemptLoss(AttemptEvent, frozen=True):
    """Says that a call of an attempt failed.

    With ``retryable`` another component or a new ticket may avoid the error. ``patience_s`` is above 0 where the
    component that failed is merely away and is being brought back; waiting for it is no attempt, and the request waits
    for this long in all. ``killed`` is the worker that died in a step with this request, and maybe because of it; ""
    where none did.
    """

    error: PillionError
    retryable: bool
    patience_s: float = 0.0
    killed: str = ""


class PlanMade(AttemptEvent, frozen=True):
    """The planner has made a plan."""

    plan: RequestPlan


class PlanFailed(AttemptLoss, frozen=True):
    """No plan could be made, for instance because no worker lives. ``retryable`` says that what the request needs lived
    when planning began. A new request has waited before this event comes; one that had begun still waits for
    ``patience_s``."""


class TicketGranted(AttemptEvent, frozen=True):
    """The KV node has pinned the prompt's first ``pinned_blocks`` blocks and reserved the rest (I3)."""

    hold: TicketHold
    pinned_blocks: int


class TicketLost(AttemptLoss, frozen=True):
    """The KV node refused a ticket, or went away before it answered."""


class BlocksFetched(AttemptEvent, frozen=True):
    """The fetch of blocks is over: the first ``blocks`` blocks of the prompt are pinned now."""

    blocks: int


class ChunkAcked(AttemptEvent, frozen=True):
    """A chunk is committed under the request's ticket, at the decode worker's node."""

    ack: ChunkAck


class PrefillEnded(AttemptEvent, frozen=True):
    """The prefill call ended well. Everything before ``end_tokens`` is under the ticket. That is less than the split
    where not all blocks could be fetched to the decode worker's node."""

    end_tokens: int


class PrefillLost(AttemptLoss, frozen=True):
    """The call that runs the prefill range failed."""


class TicketAdopted(AttemptEvent, frozen=True):
    """The decode worker holds the ticket itself now, with ``pinned_blocks`` (I3)."""

    pinned_blocks: int = 0


class TokensSampled(AttemptEvent, frozen=True):
    """The decode worker sampled ``token_ids``, in order. ``timings`` come with the first tokens, and where draft tokens
    were judged; ``logprobs`` has one entry for each token where the client asked for them."""

    token_ids: tuple[int, ...]
    timings: DecodeTimings | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


class PromptScored(AttemptEvent, frozen=True):
    """The decode worker knows how likely the prompt's next tokens were."""

    logprobs: tuple[TokenLogprob, ...]


class DecodeFinished(AttemptEvent, frozen=True):
    """The answer's stream ended by itself, where one was asked for with the ``vector`` of the text."""

    reason: FinishReason
    timings: DecodeTimings | None
    vector: bytes = b""


class DecodeLost(AttemptLoss, frozen=True):
    """The answer's stream failed, or its decode worker went away."""


class StillQueued(AttemptEvent, frozen=True):
    """A worker says that the prefill range or the stream waits, at this place in its line; 0 means that its prompt is
    being computed. The event changes nothing, but the attempt is not silent."""

    position: int


class AttemptSilent(AttemptEvent, frozen=True):
    """No event of the attempt has come for the longest time that is allowed."""


class StopStringFound(Event, frozen=True):
    """The text has reached a stop string; the answer is its first ``kept_tokens`` tokens."""

    kept_tokens: int


class LeaderSubmitted(Event, frozen=True):
    """The submit of the leader, the request's first answer, begins the follower's stream too, in this attempt and
    plan."""

    attempt: int
    plan: RequestPlan


class LeaderRetried(Event, frozen=True):
    """The submit of the leader, the request's first answer, was lost, and the leader is at this attempt now."""

    attempt: int


class LeaderStarted(Event, frozen=True):
    """The leader, the request's first answer, has a token: from now on the follower is handled by itself."""


class RequestCancelled(Event, frozen=True):
    """The client of the request went away."""


class DeadlinePassed(Event, frozen=True):
    """The deadline that the client gave is over."""


# The following classes are actions.


class Action(Struct, frozen=True):
    """Asks for something that is to be done for a request."""


class AttemptAction(Action, frozen=True):
    """Asks for something that is to be done for one attempt."""

    attempt: int


class TicketAction(AttemptAction, frozen=True):
    """Asks for a call that works under a ticket."""

    plan: RequestPlan
    hold: TicketHold


class LookUp(AttemptAction, frozen=True):
    """Asks to hash the attempt's tokens, ask the index and make a plan, ``after_ms`` from now. PlanMade or PlanFailed
    answers it. ``unscored_from`` is that of ClusterSnapshot."""

    avoid: frozenset[str]
    after_ms: int
    unscored_from: int | None = None


class OpenTicket(AttemptAction, frozen=True):
    """Asks to pin and reserve the prompt's blocks at the plan's node. TicketGranted or TicketLost answers it. With
    ``resume`` the request stands before new prompts in the node's line for memory, for it has had its turn there
    before."""

    plan: RequestPlan
    resume: bool = False


class Fetch(TicketAction, frozen=True):
    """Asks to let the ticket's node fetch the blocks that it lacks. BlocksFetched answers it, whatever happens (I1)."""

    wanted: FetchPlan


class RunPrefill(TicketAction, frozen=True):
    """Asks to send the prefill range, cached..split, to the prefill worker. ChunkAcked answers each chunk, then
    PrefillEnded; or PrefillLost."""


class SubmitDecode(AttemptAction, frozen=True):
    """Asks to send the prompt tail to the decode worker. TicketAdopted, TokensSampled, then DecodeFinished answer it;
    or DecodeLost.

    Attributes:
        hold: the gateway's ticket; None: the worker opens one.
        awaited_blocks: blocks that a RunPrefill sent at the same time commits; the worker waits for them at the node.
        parallel samples: indexes of the answers whose streams begin with this submit.
        scored_tokens: tokens after the prompt's first one whose log probability is not wanted from this attempt.
    """

    plan: RequestPlan
    hold: TicketHold | None
    awaited_blocks: int = 0
    parallel_samples: tuple[int, ...] = ()
    scored_tokens: int = 0


class StopWork(AttemptAction, frozen=True):
    """Asks to stop the attempt's look-up, ticket call, fetch or prefill range. A ticket that is granted nevertheless
    must still be reported.

    ``after_ms``: how long a prefill range whose blocks are all committed may take for its last acknowledgement.
    """

    after_ms: int = 0


class CancelDecode(AttemptAction, frozen=True):
    """Asks to tell the decode worker that nobody wants the stream."""


class ReleaseTicket(Action, frozen=True):
    """Asks to release the ticket of an attempt."""

    hold: TicketHold


class Emit(Action, frozen=True):
    """Asks to give the client the answer's next tokens, with one log probability each or with none."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class EmitScores(Action, frozen=True):
    """Asks to give the client the log probabilities of the prompt's next tokens."""

    logprobs: tuple[TokenLogprob, ...]


class Finish(Action, frozen=True):
    """Says that the answer is complete; no action follows. ``vector`` is that of the text, where it is wanted."""

    reason: FinishReason
    vector: bytes = b""


class Fail(Action, frozen=True):
    """Asks to end the request with an error; no action follows."""

    error: PillionError
