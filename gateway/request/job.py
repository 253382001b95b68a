"""A checked request as the cluster runs it, and the chain of its block hashes."""

from __future__ import annotations

import hashlib
import time
from array import array
from dataclasses import dataclass

from pillion.gateway.planning.cluster_snapshot import SplitPolicy
from pillion.gateway.request.validation import ResolvedSampling
from pillion.kvstore.hashing import HASH_BYTES
from pillion.types import Resume


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """The flags that decide about requests. ``max_running_requests`` 0: as many as the workers have slots for."""

    policy: SplitPolicy
    chunk_tokens: int
    max_attempts: int
    max_inflight_requests: int
    max_inflight_tokens: int
    prefix_caching: bool
    max_running_requests: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A checked request, ready to run. ``deadline`` and ``arrived`` are monotonic seconds.

    ``answers`` are given to the client, with log probabilities if ``show_logprobs``. Without prefix caching,
    ``cache_salt`` is one that no other request has. ``resume`` says what another gateway has given already. ``grammar``
    is what every answer follows from its first token on: a text of llguidance's, or "", and ``grammar_fields`` are the
    client's fields that it was made of. ``adapter`` is the digest of
    the adapter that answers are computed with; "" for the model alone. ``adapter_rank`` is its largest rank. Nobody
    waits for one in the ``background``, a batch's."""

    request_id: str
    model: str
    fingerprint: str
    prompt: tuple[int, ...]
    resolved: ResolvedSampling
    cache_salt: str
    options: GatewayOptions
    arrived: float
    deadline: float | None
    spread: int
    priority: int = 0
    answers: int = 1
    show_logprobs: bool = False
    resume: Resume | None = None
    grammar: str = ""
    grammar_fields: tuple[str, ...] = ()
    original_tokens: int = 0
    adapter: str = ""
    adapter_rank: int = 0
    background: bool = False

    @property
    def text_tokens(self) -> int:
        """Most tokens of prompt and answer together."""
        return len(self.prompt) + self.resolved.max_tokens

    @property
    def short_text(self) -> bool:
        """Whether the request has rotary frequencies that longer ones do not have (PreparedModel.original_tokens)."""
        return self.text_tokens <= self.original_tokens

    @property
    def resumed_tokens(self) -> int:
        """Tokens of all answers that other gateways have given."""
        return sum(len(answer.token_ids) for answer in self.resume.answers) if self.resume is not None else 0

    def digest(self) -> bytes:
        """Names weights, prompt and the model's own sampling values: where they are the same, any gateway goes on with
        the stream. 32 bytes."""
        own = repr(self.resolved.recommended) if self.resolved.recommended else ""
        named = f"{self.fingerprint}{self.adapter}{own}".encode()
        return hashlib.sha256(named + array("I", self.prompt).tobytes()).digest()

    @property
    def system_fingerprint(self) -> str:
        """Names weights and adapter in OpenAI's form."""
        return f"fp_{self.fingerprint[:10]}" + (f"_{self.adapter[:10]}" if self.adapter else "")

    def left_s(self) -> float | None:
        """Time left, in seconds; None without a deadline."""
        return None if self.deadline is None else max(0.001, self.deadline - time.monotonic())

    def wait_s(self, most_s: float) -> float:
        """Time that a wait may take, in seconds: what is left, and never more than ``most_s``."""
        left_s = self.left_s()
        return most_s if left_s is None else min(left_s, most_s)


@dataclass(frozen=True, slots=True)
class BlockHashChain:
    """Hashes of an attempt's whole blocks, 32 bytes each; ``root`` is the parent of the first."""

    root: bytes = b""
    hashes: bytes = b""

    def first(self, blocks: int) -> bytes:
        """The hashes of the first ``blocks`` blocks."""
        return self.hashes[: blocks * HASH_BYTES]

    def before(self, blocks: int) -> bytes:
        """The parent of the block behind the first ``blocks``."""
        return self.hashes[(blocks - 1) * HASH_BYTES : blocks * HASH_BYTES] if blocks else self.root


@dataclass(frozen=True, slots=True)
class PlacedPrefix:
    """Where a prompt's KV is: the KV node, and the hashes of its whole blocks of ``block_size`` tokens."""

    node_id: str
    hashes: bytes
    block_size: int
