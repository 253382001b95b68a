"""Decides when and how a client asks for the rest of a stream that broke. Sans-IO: the client makes the calls and reads
the clock.

    first call --messages--> breaks --delay--> next call, after the last tokens --messages--> ... --> end
                                |  ^                            |
                                |  +---- refused, or broken ----+   for at most ``resume_timeout_s``, and at most
                                |                                   MAX_RESUME_ATTEMPTS times in a row at a gateway
                                +--> no connection, or the gateway is stopping: each address is called
                                     RETRY_ATTEMPTS times, with pauses between the rounds, and without a
                                     connection as long as ``connect_timeout_s`` allows

A request whose stream had brought nothing is sent again as it was.

Only the loss of a gateway or of the connection to it is mended here. What a gateway itself says about a request is
final, unless it says so to an attempt to resume: a gateway that takes over the streams of another one may be full for a
moment.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

from pillion.client.answer_schema import AnswerSchema, ParsedAnswers
from pillion.client.connection import RETRY_ATTEMPTS, RETRY_FIRST_BACKOFF_S, RETRY_MAX_BACKOFF_S
from pillion.errors import Cancelled, DeadlineExceeded, Overloaded, PillionError, Unavailable
from pillion.types import AnswerSoFar, Delta, FinishReason, GenerateRequest, Resume, StreamOrigin
from pillion.v1.gateway_pb2 import GenerateResponse
from pillion.wire.public import delta_from_pb, origin_from_pb

# A client gives up after this many calls in a row that reached a gateway and brought no new token. It does not count
# calls that reach no gateway, because they cost nobody anything.
MAX_RESUME_ATTEMPTS = 20
# A broken stream may take this long to go on, if the client does not say otherwise.
RESUME_TIMEOUT_S = 30.0
# A request may wait this long until a gateway listens at one of its addresses, if the client does not say otherwise: a
# gateway that was killed is back within that time.
CONNECT_TIMEOUT_S = 10.0
# The first attempt to resume is made at once, the others after pauses that double. Each pause is shortened at random,
# so that the streams of a lost gateway do not all come at the same time.
FIRST_RESUME_DELAY_MS = 50
MAX_RESUME_DELAY_MS = 2000


class StreamProgress:
    """Records what a stream has brought so far, and makes the next request for it. Times are monotonic, in seconds.

    Args:
        timeout_s: time for the whole stream; None for no limit.
        resume_timeout_s: how long a broken stream may take to go on; 0 never resumes.
        connect_timeout_s: how long the request may wait for a connection, from the first failure on; 0 waits no longer
            than RETRY_ATTEMPTS rounds take.
        addresses: gateways that may be called.
        schema: makes values of whole answers, if they are wanted.
    """

    def __init__(
        self,
        request: GenerateRequest,
        timeout_s: float | None,
        resume_timeout_s: float,
        connect_timeout_s: float,
        addresses: int,
        now_s: float,
        schema: AnswerSchema | None = None,
    ) -> None:
        self._parsed = None if schema is None else ParsedAnswers(schema.parse)
        self._request = request
        self._deadline_s = None if timeout_s is None else now_s + timeout_s
        self._resume_timeout_s = resume_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._failed_s: float | None = None
        self._addresses = addresses
        self._origin: StreamOrigin | None = None
        # The stream's token ids are kept by the index of the answer.
        self._token_ids: defaultdict[int, list[int]] = defaultdict(list)
        self._reasons: dict[int, FinishReason] = {}
        # This counts the log probabilities of the prompt that have come.
        self._scored = 0
        self._request_id = request.request_id
        # This says whether the next message is the first one of its call.
        self._opening = True
        # These say whether a gateway was connected, and whether a message came.
        self._reached = self._received = False
        # Nothing new has come since this time; None while calls bring something.
        self._broke_s: float | None = None
        self._attempts = 0
        # This counts the attempts that reached a gateway.
        self._arrivals = 0
        self._resumes = 0
        # This says whether the last message has come; after it, an error of the call does not matter.
        self.over = False

    def request(self) -> GenerateRequest:
        """Return the request for the next call: the original one, or one for the rest of the stream."""
        if self._origin is None:
            return self._request
        count = self._request.sampling.n or 1
        answers = (AnswerSoFar(tuple(self._token_ids[n]), self._reasons.get(n)) for n in range(count))
        return replace(
            self._request, request_id=self._request_id, resume=Resume(self._origin, tuple(answers), self._scored)
        )

    def timeout_s(self, now_s: float) -> float | None:
        """Return the time that the next call may take; None for no limit. Raises DeadlineExceeded if none is left."""
        if self._deadline_s is None:
            return None
        left_s = self._deadline_s - now_s
        if left_s <= 0 and self._attempts:
            raise DeadlineExceeded("the time for the stream passed while it was resumed")
        return left_s

    def note(self, message: GenerateResponse) -> Delta:
        """Return the delta of the next message. Raises Unavailable for a message that does not continue the stream."""
        delta = delta_from_pb(message)
        if self._opening:
            self._opens(message)
        if delta.token_ids or delta.finish_reason is not None or delta.prompt_logprobs:
            self._attempts, self._broke_s = 0, None
            self._scored += len(delta.prompt_logprobs)
            self._token_ids[delta.index] += delta.token_ids
        if delta.finish_reason is not None:
            self._reasons[delta.index] = delta.finish_reason
        self.over = delta.usage is not None
        if self._parsed is not None:
            delta = self._parsed.note(delta)
        if delta.timings is not None and self._resumes:
            return replace(delta, timings=replace(delta.timings, replays=delta.timings.replays + self._resumes))
        return delta

    def delay_s(self, error: PillionError, spoken: bool, connected: bool, now_s: float) -> float:
        """Return how long to wait before the next call.

        Args:
            error: why the last call ended.
            spoken: whether ``error`` came from a gateway and not from the connection.
            connected: whether the call had a connection.

        Raises:
            PillionError: there is to be no further call; it is ``error``, or an error that says what has been tried.
        """
        broken = is_loss(error, spoken)
        self._reached = self._reached or (connected and not spoken)
        if not self._reached:
            return self._delay_before_connection_s(error, broken, connected, now_s)
        if self._broke_s is None:
            # The stream had begun, or was waiting. The attempts to go on with it, and their time, are counted from
            # here.
            self._broke_s, self._attempts, self._arrivals = now_s, 0, 0
            if not broken or (self._received and self._origin is None) or self._resume_timeout_s <= 0:
                raise error
        elif not (broken or isinstance(error, Overloaded | Unavailable)):
            raise error
        else:
            self._arrivals += connected
        waited_s = now_s - self._broke_s
        if self._arrivals >= MAX_RESUME_ATTEMPTS or (self._attempts and waited_s >= self._resume_timeout_s):
            text = f"the stream broke and was not resumed in {self._attempts} attempts within {waited_s:.1f} s"
            raise type(error)(f"{text}; the last one: {error.message}")
        doubled_ms = FIRST_RESUME_DELAY_MS * 2 ** min(self._attempts - 1, MAX_RESUME_ATTEMPTS) if self._attempts else 0
        asked_ms = error.retry_after_ms if isinstance(error, Overloaded | Unavailable) else 0
        delay_ms = min(max(doubled_ms, asked_ms), MAX_RESUME_DELAY_MS) * random.uniform(0.5, 1)  # noqa: S311
        self._attempts += 1
        self._opening = True
        left_s = delay_ms / 1000 if self._deadline_s is None else max(0.0, self._deadline_s - now_s)
        return min(delay_ms / 1000, left_s)

    def _delay_before_connection_s(self, error: PillionError, broken: bool, connected: bool, now_s: float) -> float:
        """Return :meth:`delay_s` while no gateway was connected; ``broken`` says whether another gateway may take the
        call."""
        if self._failed_s is None:
            self._failed_s = now_s
        self._attempts += 1
        rounds, rest = divmod(self._attempts, self._addresses)
        waits = not connected and now_s < self._failed_s + self._connect_timeout_s
        if not broken or (rounds >= RETRY_ATTEMPTS and not waits):
            raise error
        if rest:
            return 0.0
        doubled_s = min(RETRY_FIRST_BACKOFF_S * 2 ** min(rounds - 1, RETRY_ATTEMPTS), RETRY_MAX_BACKOFF_S)
        asked_s = error.retry_after_ms / 1000 if isinstance(error, Unavailable) else 0.0
        delay_s: float = min(max(doubled_s, asked_s), MAX_RESUME_DELAY_MS / 1000) * random.uniform(0.5, 1)  # noqa: S311
        if self._deadline_s is not None and now_s + delay_s >= self._deadline_s:
            raise error
        return delay_s

    def _opens(self, message: GenerateResponse) -> None:
        """Take the first message of a call, which shows that a gateway has accepted it."""
        self._opening = False
        self._reached = self._received = True
        if self._origin is not None:
            if not message.HasField("origin"):
                raise Unavailable("the stream broke, and the gateway that was asked to resume it is too old for that")
            self._resumes += 1
        elif message.HasField("origin"):
            self._origin = origin_from_pb(message.origin)
        self._request_id = message.request_id or self._request_id


def goes_on(error: PillionError, spoken: bool, sent: int, addresses: int) -> bool:
    """Return whether a call that is no stream is sent again, after ``sent`` calls. The call is sent once to each
    address, and once more where a gateway that stops has ended the connection, because others may be behind the same
    address."""
    ended = not isinstance(error, Unavailable)
    return is_loss(error, spoken) and sent < addresses + ended


def is_loss(error: PillionError, spoken: bool) -> bool:
    """Return whether an error means that a gateway is lost, or is stopping and says when to come again: then another
    one may take the call."""
    if isinstance(error, Unavailable):
        return not spoken or error.retry_after_ms > 0
    # A gateway that is shut down in the middle of a stream, and a proxy that resets a stream, end it with these errors.
    return not spoken and (isinstance(error, Cancelled) or "RST_STREAM" in error.message)
