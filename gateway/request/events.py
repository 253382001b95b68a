"""Events and actions of :mod:`pillion.gateway.request.request_machine`; sans-IO (I9).

An event is named by a noun and what happened to it (TicketGranted), an action by a verb (OpenTicket). No action carries
tokens: whoever performs it reads those of its attempt from the machine. All are msgspec structs, which cost a third of
a named tuple to create: some are made per token.
"""

from __future__ import annotations

from msgspec import Struct

from pillion.errors import PillionError
from pillion.gateway.planning.planner import FetchPlan, RequestPlan
from pillion.types import FinishReason, TokenLogprob
from pillion.v1.decode_pb2 import DecodeTimings
from pillion.v1.prefill_pb2 import ChunkAck

# Max wait for KV memory at a prefill worker's node. Short, because the request holds memory at the decode worker's node
# meanwhile: two requests may wait for each other's nodes, and then both continue without a prefill worker.
MAX_REMOTE_ADMISSION_WAIT_S = 2.0


class TicketHold(Struct, frozen=True):
    """A ticket at a node, under the epoch of the gateway's session there."""

    node_id: str
    epoch: int
    ticket_id: int


class Event(Struct, frozen=True):
    """Something that happened to a request."""


class AttemptEvent(Event, frozen=True):
    """Something that happened to one attempt of a request."""

    attempt: int


class AttemptLoss(AttemptEvent, frozen=True):
    """A failed call of an attempt.

    Attributes:
        retryable: whether another component or a new ticket may avoid the error.
        patience_s: if above 0, the component is away and coming back; the wait for it, at most this long in all, is no
            attempt.
        killed: the worker that died in a step with this request, maybe because of it; "" if none did.
    """

    error: PillionError
    retryable: bool
    patience_s: float = 0.0
    killed: str = ""


class PlanMade(AttemptEvent, frozen=True):
    """The planner made a plan."""

    plan: RequestPlan


class PlanFailed(AttemptLoss, frozen=True):
    """No plan is possible, e.g. because no worker lives.

    ``retryable`` means that what the request needs lived when planning began. A new request has waited before this
    event; one that had begun still waits for ``patience_s``.
    """


class TicketGranted(AttemptEvent, frozen=True):
    """The KV node pinned the prompt's first ``pinned_blocks`` blocks and reserved the rest (I3)."""

    hold: TicketHold
    pinned_blocks: int


class TicketLost(AttemptLoss, frozen=True):
    """The KV node refused a ticket, or went away before it answered."""


class BlocksFetched(AttemptEvent, frozen=True):
    """A fetch ended: the first ``blocks`` blocks of the prompt are pinned."""

    blocks: int


class ChunkAcked(AttemptEvent, frozen=True):
    """A chunk was committed under the request's ticket at the decode worker's node."""

    ack: ChunkAck


class PrefillEnded(AttemptEvent, frozen=True):
    """The prefill call ended well, with all before ``end_tokens`` under the ticket: less than the split if not all
    blocks could be fetched to the decode worker's node."""

    end_tokens: int


class PrefillLost(AttemptLoss, frozen=True):
    """The call of the prefill range failed."""


class TicketAdopted(AttemptEvent, frozen=True):
    """The decode worker adopted the ticket, with ``pinned_blocks`` (I3)."""

    pinned_blocks: int = 0


class TokensSampled(AttemptEvent, frozen=True):
    """The decode worker sampled ``token_ids``. ``timings`` come with the first tokens and with judged draft tokens;
    ``logprobs`` has one entry per token if the client asked for them."""

    token_ids: tuple[int, ...]
    timings: DecodeTimings | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


class PromptScored(AttemptEvent, frozen=True):
    """The decode worker scored the prompt's next tokens."""

    logprobs: tuple[TokenLogprob, ...]


class DecodeFinished(AttemptEvent, frozen=True):
    """The answer's stream ended by itself, with the ``vector`` of the text if one was requested."""

    reason: FinishReason
    timings: DecodeTimings | None
    vector: bytes = b""


class DecodeLost(AttemptLoss, frozen=True):
    """The answer's stream failed, or its decode worker went away."""


class StillQueued(AttemptEvent, frozen=True):
    """The prefill range or the stream waits at this place in a worker's queue; 0: its prompt is being computed. A sign
    of life that changes nothing else."""

    position: int


class AttemptSilent(AttemptEvent, frozen=True):
    """No event of the attempt has come for the max time allowed."""


class StopStringFound(Event, frozen=True):
    """The text reached a stop string; the answer is its first ``kept_tokens`` tokens."""

    kept_tokens: int


class LeaderSubmitted(Event, frozen=True):
    """The submit of the leader (the request's first answer) started the follower's stream, in this attempt and plan."""

    attempt: int
    plan: RequestPlan


class LeaderRetried(Event, frozen=True):
    """The leader's submit was lost, and the leader is at this attempt now."""

    attempt: int


class LeaderStarted(Event, frozen=True):
    """The leader has a token: the follower is independent from now on."""


class RequestCancelled(Event, frozen=True):
    """The client went away."""


class DeadlinePassed(Event, frozen=True):
    """The client's deadline passed."""


class Action(Struct, frozen=True):
    """Something to do for a request."""


class AttemptAction(Action, frozen=True):
    """Something to do for one attempt."""

    attempt: int


class TicketAction(AttemptAction, frozen=True):
    """A call under a ticket."""

    plan: RequestPlan
    hold: TicketHold


class LookUp(AttemptAction, frozen=True):
    """Hash the attempt's tokens, ask the index and make a plan, ``after_ms`` from now. Answered by PlanMade or
    PlanFailed. ``unscored_from`` is that of ClusterSnapshot."""

    avoid: frozenset[str]
    after_ms: int
    unscored_from: int | None = None


class OpenTicket(AttemptAction, frozen=True):
    """Pin and reserve the prompt's blocks at the plan's node. Answered by TicketGranted or TicketLost. With ``resume``
    the request goes before new prompts in the node's queue for memory, since it has had its turn there."""

    plan: RequestPlan
    resume: bool = False


class Fetch(TicketAction, frozen=True):
    """Have the ticket's node fetch blocks that it lacks. Always answered by BlocksFetched (I1)."""

    wanted: FetchPlan


class RunPrefill(TicketAction, frozen=True):
    """Send the prefill range, cached..split, to the prefill worker. Answered by ChunkAcked per chunk, then
    PrefillEnded; or by PrefillLost."""


class SubmitDecode(AttemptAction, frozen=True):
    """Send the prompt tail to the decode worker. Answered by TicketAdopted, TokensSampled, then DecodeFinished; or by
    DecodeLost.

    Attributes:
        hold: the gateway's ticket; None: the worker opens one.
        awaited_blocks: blocks that a concurrent RunPrefill commits, for which the worker waits at the node.
        parallel_samples: indexes of the answers whose streams start with this submit.
        scored_tokens: number of tokens, after the prompt's first, that need no log probabilities from this attempt.
    """

    plan: RequestPlan
    hold: TicketHold | None
    awaited_blocks: int = 0
    parallel_samples: tuple[int, ...] = ()
    scored_tokens: int = 0


class StopWork(AttemptAction, frozen=True):
    """Stop the attempt's look-up, ticket call, fetch or prefill range. A ticket that is granted nevertheless must still
    be reported.

    ``after_ms``: grace period for the last acknowledgement of a prefill range whose blocks are all committed.
    """

    after_ms: int = 0


class CancelDecode(AttemptAction, frozen=True):
    """Cancel the stream at the decode worker."""


class ReleaseTicket(Action, frozen=True):
    """Release the ticket of an attempt."""

    hold: TicketHold


class Emit(Action, frozen=True):
    """Send the answer's next tokens to the client, with one log probability each or with none."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class EmitScores(Action, frozen=True):
    """Send the log probabilities of the prompt's next tokens to the client."""

    logprobs: tuple[TokenLogprob, ...]


class Finish(Action, frozen=True):
    """The answer is complete; terminal. ``vector`` is that of the text, if requested."""

    reason: FinishReason
    vector: bytes = b""


class Fail(Action, frozen=True):
    """End the request with an error; terminal."""

    error: PillionError
