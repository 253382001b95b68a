"""When and how a client resumes a broken stream. Sans-IO: the client makes the calls and reads the clock.

    first call --messages--> breaks --delay--> next call, after the last tokens --messages--> ... --> end
                                |  ^                            |
                                |  +---- refused, or broken ----+   for at most ``resume_timeout_s``, and at most
                                |                                   MAX_RESUME_ATTEMPTS times in a row at a gateway
                                +--> no connection, or the gateway is stopping: each address is called
                                     RETRY_ATTEMPTS times, with pauses between the rounds, and without a
                                     connection as long as ``connect_timeout_s`` allows

A request whose stream has delivered nothing is sent again unchanged.

Only the loss of a gateway, or of the connection to it, is handled here. A gateway's own error is final, unless it
refuses to resume a stream: a gateway that takes over streams may be overloaded for a moment.
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

# Max consecutive calls that reach a gateway and bring no new token. Calls that reach no gateway do not count, because
# they cost it nothing.
MAX_RESUME_ATTEMPTS = 20
RESUME_TIMEOUT_S = 30.0
# Default wait for a gateway to listen at one of the addresses; a killed gateway restarts within it.
CONNECT_TIMEOUT_S = 10.0
# The first attempt to resume is immediate; the next ones follow pauses that double, with jitter, so that the streams of
# a lost gateway do not return at the same time.
FIRST_RESUME_DELAY_MS = 50
MAX_RESUME_DELAY_MS = 2000


class StreamProgress:
    """Progress of a stream, from which the next request for it is made. Times are monotonic, in seconds.

    Args:
        timeout_s: time for the whole stream; None for no limit.
        resume_timeout_s: time for a broken stream to resume; 0 never resumes.
        connect_timeout_s: time to wait for a connection, from the first failure on; 0 for just RETRY_ATTEMPTS rounds.
        addresses: number of gateways to call.
        schema: parser of whole answers; None for no parsing.
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
        self._first_failure_s: float | None = None
        self._addresses = addresses
        self._origin: StreamOrigin | None = None
        self._token_ids: defaultdict[int, list[int]] = defaultdict(list)
        self._reasons: dict[int, FinishReason] = {}
        self._prompt_logprobs = 0
        self._request_id = request.request_id
        self._expects_origin = True
        self._was_connected = self._was_accepted = False
        # Time of the break since which no new token has come; None while the stream makes progress.
        self._broken_since_s: float | None = None
        self._attempts = 0
        self._reached_attempts = 0
        self._resumes = 0
        # True after the last delta; errors of the call no longer matter.
        self.over = False

    def request(self) -> GenerateRequest:
        """Return the request for the next call: the original one, or one for the rest of the stream."""
        if self._origin is None:
            return self._request
        count = self._request.sampling.n or 1
        answers = (AnswerSoFar(tuple(self._token_ids[n]), self._reasons.get(n)) for n in range(count))
        return replace(
            self._request,
            request_id=self._request_id,
            resume=Resume(self._origin, tuple(answers), self._prompt_logprobs),
        )

    def timeout_s(self, now_s: float) -> float | None:
        """Return the next call's timeout; None for none. Raises DeadlineExceeded if the stream's time is used up."""
        if self._deadline_s is None:
            return None
        left_s = self._deadline_s - now_s
        if left_s <= 0 and self._attempts:
            raise DeadlineExceeded("the time for the stream passed while it was resumed")
        return left_s

    def accept(self, message: GenerateResponse) -> Delta:
        """Return the delta of the next message. Raises Unavailable if it does not continue the stream."""
        delta = delta_from_pb(message)
        if self._expects_origin:
            self._on_first_message(message)
        if delta.token_ids or delta.finish_reason is not None or delta.prompt_logprobs:
            self._attempts, self._broken_since_s = 0, None
            self._prompt_logprobs += len(delta.prompt_logprobs)
            self._token_ids[delta.index] += delta.token_ids
        if delta.finish_reason is not None:
            self._reasons[delta.index] = delta.finish_reason
        self.over = delta.usage is not None
        if self._parsed is not None:
            delta = self._parsed.note(delta)
        if delta.timings is not None and self._resumes:
            return replace(delta, timings=replace(delta.timings, replays=delta.timings.replays + self._resumes))
        return delta

    def delay_s(self, error: PillionError, by_gateway: bool, connected: bool, now_s: float) -> float:
        """Return how long to wait before the next call.

        Args:
            error: the last call's error.
            by_gateway: True if ``error`` came from a gateway, False if from the connection.
            connected: True if the call had a connection.

        Raises:
            PillionError: to give up, ``error`` or one that describes the attempts.
        """
        broken = is_loss(error, by_gateway)
        self._was_connected = self._was_connected or (connected and not by_gateway)
        if not self._was_connected:
            return self._delay_before_connection_s(error, broken, connected, now_s)
        if self._broken_since_s is None:
            # The first failure since the last progress: count attempts and time from here.
            self._broken_since_s, self._attempts, self._reached_attempts = now_s, 0, 0
            if not broken or (self._was_accepted and self._origin is None) or self._resume_timeout_s <= 0:
                raise error
        elif not (broken or isinstance(error, Overloaded | Unavailable)):
            raise error
        else:
            self._reached_attempts += connected
        waited_s = now_s - self._broken_since_s
        if self._reached_attempts >= MAX_RESUME_ATTEMPTS or waited_s >= self._resume_timeout_s:
            text = f"the stream broke and was not resumed in {self._attempts} attempts within {waited_s:.1f} s"
            raise type(error)(f"{text}; the last one: {error.message}")
        doubled_ms = FIRST_RESUME_DELAY_MS * 2 ** min(self._attempts - 1, MAX_RESUME_ATTEMPTS) if self._attempts else 0
        asked_ms = error.retry_after_ms if isinstance(error, Overloaded | Unavailable) else 0
        delay_ms = min(max(doubled_ms, asked_ms), MAX_RESUME_DELAY_MS) * random.uniform(0.5, 1)  # noqa: S311
        self._attempts += 1
        self._expects_origin = True
        delay_s = delay_ms / 1000
        return delay_s if self._deadline_s is None else max(0.0, min(delay_s, self._deadline_s - now_s))

    def _delay_before_connection_s(self, error: PillionError, broken: bool, connected: bool, now_s: float) -> float:
        """Return :meth:`delay_s` while no gateway has ever been connected. ``broken``: another gateway may accept the
        call."""
        if self._first_failure_s is None:
            self._first_failure_s = now_s
        self._attempts += 1
        rounds, rest = divmod(self._attempts, self._addresses)
        waits = not connected and now_s < self._first_failure_s + self._connect_timeout_s
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

    def _on_first_message(self, message: GenerateResponse) -> None:
        """Handle a call's first message: a gateway has accepted the call."""
        self._expects_origin = False
        self._was_connected = self._was_accepted = True
        if self._origin is not None:
            if not message.HasField("origin"):
                raise Unavailable("the stream broke, and the gateway that was asked to resume it is too old for that")
            self._resumes += 1
        elif message.HasField("origin"):
            self._origin = origin_from_pb(message.origin)
        self._request_id = message.request_id or self._request_id


def should_retry(error: PillionError, by_gateway: bool, sent: int, addresses: int) -> bool:
    """Return whether to retry a unary call that was sent ``sent`` times: once per address, and once more if a stopping
    gateway closed the connection, since others may share its address."""
    ended = not isinstance(error, Unavailable)
    return is_loss(error, by_gateway) and sent < addresses + ended


def is_loss(error: PillionError, by_gateway: bool) -> bool:
    """Return whether an error means that another gateway may accept the call: the gateway or the connection is lost, or
    the gateway is stopping and tells when to retry."""
    if isinstance(error, Unavailable):
        return not by_gateway or error.retry_after_ms > 0
    # Errors of a gateway that shuts down during a stream, and of a proxy that resets it.
    return not by_gateway and (isinstance(error, Cancelled) or "RST_STREAM" in error.message)
