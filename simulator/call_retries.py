"""When gRPC sends a call again by itself, as a channel's service config says (gRFC A6). Sans-IO.

a call ends with a retryable status, and nothing of its answer has come
    --the server's pushback forbids it, or attempts or the channel's tokens are short--> the error is the caller's
    --otherwise, after the server's pause or a growing one of its own--> the next attempt
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

# The share of a pause by which it is longer or shorter at random.
JITTER = 0.2


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How calls of one method are sent again."""

    attempts: int
    first_pause_s: float
    most_pause_s: float
    factor: float
    codes: frozenset[str]


class RetryRules:
    """A channel's policies by method, and its tokens. ``options`` are those of the channel; without a service config
    nothing is sent again."""

    def __init__(self, options: Sequence[tuple[str, object]], random: Random) -> None:
        config = json.loads(str(dict(options).get("grpc.service_config", "{}")))
        self._random = random
        self._policies = {
            f"/{name['service']}/{name['method']}": _policy_of(method["retryPolicy"])
            for method in config.get("methodConfig", ())
            for name in method["name"]
        }
        throttling = config.get("retryThrottling", {"maxTokens": 1, "tokenRatio": 0.0})
        self._most_tokens, self._ratio = throttling["maxTokens"], throttling["tokenRatio"]
        self._tokens = float(self._most_tokens)

    def of(self, method: str) -> RetryPolicy | None:
        """The policy of a method, by its path."""
        return self._policies.get(method)

    def succeeded(self) -> None:
        """A call has ended well."""
        self._tokens = min(self._most_tokens, self._tokens + self._ratio)

    def pause_s(self, policy: RetryPolicy, attempts: int, code: str, pushback: str = "") -> float | None:
        """How long to wait before the next attempt; None where there is to be none. ``attempts`` were made. The last
        one ended with this status before anything of an answer had come; ``pushback`` is the server's word on when to
        come again, the value of grpc-retry-pushback-ms."""
        if code not in policy.codes:
            return None
        self._tokens = max(0.0, self._tokens - 1)
        if attempts >= policy.attempts or self._tokens <= self._most_tokens / 2 or pushback.startswith("-"):
            return None
        if pushback:
            return int(pushback) / 1000
        pause_s = min(policy.first_pause_s * policy.factor ** (attempts - 1), policy.most_pause_s)
        return pause_s * self._random.uniform(1 - JITTER, 1 + JITTER)


def _policy_of(config: dict[str, object]) -> RetryPolicy:
    codes: object = config["retryableStatusCodes"]
    assert isinstance(codes, list)
    return RetryPolicy(
        attempts=int(str(config["maxAttempts"])),
        first_pause_s=float(str(config["initialBackoff"]).removesuffix("s")),
        most_pause_s=float(str(config["maxBackoff"]).removesuffix("s")),
        factor=float(str(config["backoffMultiplier"])),
        codes=frozenset(map(str, codes)),
    )
