"""How much the gateway takes on at once (I7, I9)."""

from __future__ import annotations

from pillion.errors import Overloaded

# What a refused client is told to wait; streams end every few hundred milliseconds on a gateway this full.
RETRY_AFTER_MS = 1000


class Admission:
    """Counts requests and prompt tokens under way. Every ``admit`` is followed by one ``leave`` of the same tokens."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self.requests = 0
        self.tokens = 0

    def admit_request(self) -> None:
        """One more request. Raises Overloaded."""
        if self.requests >= self._max_requests:
            raise Overloaded(f"max_inflight_requests ({self._max_requests}) requests are under way", RETRY_AFTER_MS)
        self.requests += 1

    def admit_tokens(self, tokens: int) -> None:
        """The prompt of an admitted request. One prompt is always let in, however long. Raises Overloaded."""
        if self.tokens and self.tokens + tokens > self._max_tokens:
            raise Overloaded(f"max_inflight_tokens ({self._max_tokens}) prompt tokens are under way", RETRY_AFTER_MS)
        self.tokens += tokens

    def leave(self, tokens: int) -> None:
        """A request has ended, in whatever way."""
        self.requests -= 1
        self.tokens -= tokens
