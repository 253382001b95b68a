"""A checked request as the cluster runs it, and the chain of its block hashes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

from pillion.gateway.planning.cluster_snapshot import SplitPolicy
from pillion.kvstore.hashing import HASH_BYTES
from pillion.rules.priority import NO_FLOW, Flow
from pillion.types import GenerateRequest, PoolingParams, Resume, SamplingParams
from pillion.wire.public import origin_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """The gateway's flags and limits that affect requests.

    Attributes:
        max_running_requests: limit per model at its workers; 0 for the workers' slots.
        node_id: the only KV node whose workers may be used, if an operator forces a plan; "" for any.
    """

    policy: SplitPolicy
    chunk_tokens: int
    max_attempts: int
    max_inflight_requests: int
    max_inflight_tokens: int
    prefix_caching: bool
    max_running_requests: int = 0
    node_id: str = ""


class RequestGrammar(NamedTuple):
    """The grammar that a request's answers must match.

    Attributes:
        text: the grammar as sent to workers; "" for free text.
        fields: the client's fields that the grammar was made from.
        left_out: (field, JSON pointer) of schema keywords that are not enforced.
        made_s: duration of its compilation in seconds.
    """

    text: str = ""
    fields: tuple[str, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    made_s: float = 0.0


NO_GRAMMAR = RequestGrammar()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedRequest:
    """A checked request that is ready to run.

    Attributes:
        asked: the request as the client sent it.
        answer_id: prefix of the ids of tool calls.
        sampling: parameters with all defaults resolved; ``max_tokens`` is over all attempts, and ``stop_token_ids``
            include the model's.
        recommended: values of ``sampling``, by name, that are the model's because the client set none.
        cache_salt: the tenant's and the client's salt; random if prefix caching is off.
        arrived, deadline: monotonic seconds.
        spread: a number that differs between requests, by which the planner breaks ties.
        grammar: constrains every answer from its first token.
        adapter, adapter_rank: digest of the adapter and its max rank; "" and 0 for the model alone.
        background: True for a batch's request, for which no client waits.
        pooling: how the text becomes a vector; None for a request that generates.
        kept_tokens: prompt positions after which other prompts are expected to diverge, where states are kept.
        flow: the tenant's flow at the workers.
    """

    asked: GenerateRequest
    request_id: str
    answer_id: str
    model: str
    fingerprint: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str
    options: GatewayOptions
    arrived: float
    deadline: float | None
    spread: int
    priority: int = 0
    recommended: tuple[tuple[str, float], ...] = ()
    grammar: RequestGrammar = NO_GRAMMAR
    original_tokens: int = 0
    adapter: str = ""
    adapter_rank: int = 0
    background: bool = False
    pooling: PoolingParams | None = None
    kept_tokens: tuple[int, ...] = ()
    flow: Flow = NO_FLOW

    @property
    def answers(self) -> int:
        return self.sampling.n or 1

    @property
    def max_tokens(self) -> int:
        assert self.sampling.max_tokens is not None
        return self.sampling.max_tokens

    @property
    def cut(self) -> bool:
        """True if ``max_tokens`` is below what the client requested."""
        asked = self.asked.sampling.max_tokens
        return asked is not None and self.max_tokens < asked

    @property
    def resume(self) -> Resume | None:
        """Answers that another gateway has begun; None for a new request."""
        return self.asked.resume

    @property
    def reads_prompt_rows(self) -> bool:
        """True if prompt tokens are scored or pooled: these must be computed even if their KV is cached."""
        pooled = self.pooling is not None and self.pooling.rows is not None
        return pooled or self.sampling.prompt_logprobs is not None

    @property
    def text_tokens(self) -> int:
        """Max tokens of prompt and answer."""
        return len(self.prompt) + self.max_tokens

    @property
    def short_text(self) -> bool:
        """True if the model's rotary frequencies for short texts apply (PreparedModel.original_tokens)."""
        return self.text_tokens <= self.original_tokens

    @property
    def resumed_tokens(self) -> int:
        """Total tokens of all answers that other gateways have emitted."""
        return sum(len(answer.token_ids) for answer in self.resume.answers) if self.resume is not None else 0

    def digest(self) -> bytes:
        """Return the 32-byte digest of weights, prompt and recommended sampling values: a gateway that computes the
        same digest can resume the stream."""
        return origin_digest(self.fingerprint, self.adapter, self.recommended, self.prompt)

    @property
    def system_fingerprint(self) -> str:
        """Fingerprint of weights and adapter, for OpenAI's ``system_fingerprint``."""
        return f"fp_{self.fingerprint[:10]}" + (f"_{self.adapter[:10]}" if self.adapter else "")

    def left_s(self) -> float | None:
        """Return the seconds until the deadline, at least 0.001; None without a deadline."""
        return None if self.deadline is None else max(0.001, self.deadline - time.monotonic())

    def wait_s(self, limit_s: float) -> float:
        """Return the max wait in seconds: the time until the deadline, at most ``limit_s``."""
        left_s = self.left_s()
        return limit_s if left_s is None else min(left_s, limit_s)


@dataclass(frozen=True, slots=True)
class BlockHashChain:
    """Hashes of a prompt's whole blocks, 32 bytes each. ``root`` is the parent hash of the first block."""

    root: bytes = b""
    hashes: bytes = b""

    def first(self, blocks: int) -> bytes:
        """Return the hashes of the first ``blocks`` blocks."""
        return self.hashes[: blocks * HASH_BYTES]

    def before(self, blocks: int) -> bytes:
        """Return the hash of the last of the first ``blocks`` blocks, which is the next block's parent hash."""
        return self.hashes[(blocks - 1) * HASH_BYTES : blocks * HASH_BYTES] if blocks else self.root


@dataclass(frozen=True, slots=True)
class PlacedPrefix:
    """Location of a prompt's KV: the KV node, and the hashes of the whole blocks of ``block_size`` tokens."""

    node_id: str
    hashes: bytes
    block_size: int
