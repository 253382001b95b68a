"""Holds a checked request as the cluster runs it, and the chain of its block hashes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

from pillion.gateway.planning.cluster_view import SplitPolicy
from pillion.kvstore.hashing import HASH_BYTES
from pillion.rules.priority import NO_FLOW, Flow
from pillion.types import GenerateRequest, PoolingParams, Resume, SamplingParams
from pillion.wire.public import origin_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """Holds the flags that decide about requests. With ``max_running_requests`` 0, as many run as the workers have
    slots for. ``node_id`` is the KV node whose workers alone are used, where an operator forces a plan on a request."""

    policy: SplitPolicy
    chunk_tokens: int
    max_attempts: int
    max_inflight_requests: int
    max_inflight_tokens: int
    prefix_caching: bool
    max_running_requests: int = 0
    node_id: str = ""


class RequestGrammar(NamedTuple):
    """Holds the grammar that the answers to a request follow, as a worker gets it ("" where they are any text), the
    client's fields from which it was made, the fields and the places in their schemas, as JSON pointers, to which
    answers are not held, and the seconds that this took."""

    text: str = ""
    fields: tuple[str, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    made_s: float = 0.0


NO_GRAMMAR = RequestGrammar()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedRequest:
    """Describes a checked request that is ready to run, and what the client asked for. ``deadline`` and ``arrived`` are
    monotonic seconds.

    ``sampling`` has every default decided, its ``max_tokens`` count over all attempts, and the model's own stop ids are
    among its ``stop_token_ids``; ``recommended`` are those of its values, by name, that are the model's own because the
    client gave none. Without prefix caching, no other request has its ``cache_salt``. Every answer follows ``grammar``
    from its first token on. ``adapter`` is the digest of the adapter that answers are computed
    with; "" for the model alone. ``adapter_rank`` is its largest rank. After ``kept_tokens`` of the prompt the client
    expects other prompts to part from it. Nobody waits for a request in the ``background``, which is a batch's. A
    ``pooled`` request generates nothing and ends with a vector of its text. Ids of calls are made of ``answer_id``. No
    answer has the tokens of one of its ``bad_words`` in their order. Workers know its tenant by its ``flow``.
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
        """Gives the number of answers that the client gets."""
        return self.sampling.n or 1

    @property
    def max_tokens(self) -> int:
        """Gives the largest number of tokens that each answer may have."""
        assert self.sampling.max_tokens is not None
        return self.sampling.max_tokens

    @property
    def cut(self) -> bool:
        """Says whether ``max_tokens`` are fewer than the client asked for."""
        asked = self.asked.sampling.max_tokens
        return asked is not None and self.max_tokens < asked

    @property
    def resume(self) -> Resume | None:
        """Says what another gateway has given already; None where the request begins here."""
        return self.asked.resume

    @property
    def reads_prompt_rows(self) -> bool:
        """True if rows of prompt tokens are scored or pooled: cached prefixes lack them, so none is used."""
        pooled = self.pooling is not None and self.pooling.rows is not None
        return pooled or self.sampling.prompt_logprobs is not None

    @property
    def text_tokens(self) -> int:
        """Gives the largest number of tokens that prompt and answer may have together."""
        return len(self.prompt) + self.max_tokens

    @property
    def short_text(self) -> bool:
        """Says whether the request is so short that it has other rotary frequencies than longer ones
        (PreparedModel.original_tokens)."""
        return self.text_tokens <= self.original_tokens

    @property
    def resumed_tokens(self) -> int:
        """Gives the number of tokens of all answers that other gateways have given."""
        return sum(len(answer.token_ids) for answer in self.resume.answers) if self.resume is not None else 0

    def digest(self) -> bytes:
        """Returns a digest of weights, prompt and the model's own sampling values: where two gateways find the same
        one, either can go on with the stream. It has 32 bytes."""
        return origin_digest(self.fingerprint, self.adapter, self.recommended, self.prompt)

    @property
    def system_fingerprint(self) -> str:
        """Gives the fingerprint of weights and adapter in OpenAI's form."""
        return f"fp_{self.fingerprint[:10]}" + (f"_{self.adapter[:10]}" if self.adapter else "")

    def left_s(self) -> float | None:
        """Returns the time left until the request's deadline, in seconds, or None where it has no deadline."""
        return None if self.deadline is None else max(0.001, self.deadline - time.monotonic())

    def wait_s(self, most_s: float) -> float:
        """Returns the time that a wait may take, in seconds: what the deadline leaves, and never more than
        ``most_s``."""
        left_s = self.left_s()
        return most_s if left_s is None else min(left_s, most_s)


@dataclass(frozen=True, slots=True)
class BlockHashChain:
    """Holds the hashes of a prompt's whole blocks, 32 bytes each; ``root`` is the parent of the first."""

    root: bytes = b""
    hashes: bytes = b""

    def first(self, blocks: int) -> bytes:
        """Returns the hashes of the first ``blocks`` blocks."""
        return self.hashes[: blocks * HASH_BYTES]

    def before(self, blocks: int) -> bytes:
        """Returns the parent of the block after the first ``blocks``."""
        return self.hashes[(blocks - 1) * HASH_BYTES : blocks * HASH_BYTES] if blocks else self.root


@dataclass(frozen=True, slots=True)
class PlacedPrefix:
    """Says where a prompt's KV is: the KV node, and the hashes of its whole blocks of ``block_size`` tokens."""

    node_id: str
    hashes: bytes
    block_size: int
