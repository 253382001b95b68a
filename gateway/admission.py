"""How much the gateway takes on at once (I7, I9)."""

from __future__ import annotations

from pillion.errors import FieldViolation, InvalidRequest, Overloaded, QuotaViolation

# What a refused client is told to wait; streams end every few hundred milliseconds on a gateway this full.
RETRY_AFTER_MS = 1000


class Admission:
    """Counts requests and prompt tokens under way. Every ``admit`` is followed by one ``leave`` of the same tokens."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self.requests = 0
        self.tokens = 0

    def admit_request(self, answers: int = 1, field: str = "sampling.n") -> None:
        """One more request; each of its answers counts as one. Raises Overloaded, and InvalidRequest, naming the
        ``field`` that said how many, where they could never be let in."""
        if answers > 1 and answers > self._max_requests:
            said = f"{answers} answers; the gateway takes {self._max_requests} requests at once, each answer counts"
            raise InvalidRequest.of(FieldViolation(field, said))
        if self.requests + answers > self._max_requests:
            raise _full("max_inflight_requests", self._max_requests, "requests")
        self.requests += answers

    def admit_tokens(self, tokens: int) -> None:
        """The prompt of an admitted request. One prompt is always let in, however long. Raises Overloaded."""
        if self.tokens and self.tokens + tokens > self._max_tokens:
            raise _full("max_inflight_tokens", self._max_tokens, "prompt tokens")
        self.tokens += tokens

    def leave(self, tokens: int, answers: int = 1) -> None:
        """A request has ended, in whatever way."""
        self.requests -= answers
        self.tokens -= tokens


def _full(name: str, most: int, what: str) -> Overloaded:
    said = f"{name} ({most}) {what} are under way"
    return Overloaded(said, RETRY_AFTER_MS, (QuotaViolation(name, said),))


def check_pool(
    prompt_tokens: int, field: str, max_tokens: int | None, model_tokens: int, pool_tokens: int | None
) -> int:
    """What no KV pool can hold is refused, not queued: it could only ever be preempted and begun again.

    Args:
        prompt_tokens: tokens of the prompt, which leaves the model's length room for one more.
        field: the request's field that holds the prompt.
        max_tokens: as the client said, None where it left that to us.
        model_tokens: longest prompt and answer of the model.
        pool_tokens: longest prompt and answer that some node can hold; None where that is not known.

    Returns:
        The longest prompt and answer, in tokens, that model and pool allow.

    Raises:
        InvalidRequest: the prompt leaves no room for one token, or an explicit ``max_tokens`` does not fit behind it.
    """
    if pool_tokens is None or pool_tokens >= model_tokens:
        return model_tokens
    if prompt_tokens >= pool_tokens:
        said = f"{prompt_tokens} tokens; the KV pool holds {pool_tokens}, and one of the answer must fit as well"
        raise InvalidRequest.of(FieldViolation(field, said))
    if max_tokens is not None and prompt_tokens + min(max_tokens, model_tokens - prompt_tokens) > pool_tokens:
        said = f"{max_tokens} behind a prompt of {prompt_tokens} tokens; the KV pool holds {pool_tokens} for both"
        raise InvalidRequest.of(FieldViolation("sampling.max_tokens", said))
    return pool_tokens
