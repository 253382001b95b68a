"""Reads and writes bundles: the record of one request, from which its answer can be explained and replayed.

    DIR/ID.json       {"format": 1, "id": ..., "request": ..., "answers": ..., "story": ..., "mac": ...}
    DIR/record.key    the deployment's key, unless --record-key-file names another file

``mac`` is the HMAC-SHA256, by the deployment's key, of the canonical JSON of all other fields: sorted names, no spaces.
It proves that a gateway of the deployment wrote the file and that nobody changed it. ``content`` says how a bundle
keeps texts and token ids: as they are (``full``), as HMACs by the same key, which show equality (``hash``), or not at
all (``none``).
"""

from __future__ import annotations

import hmac
from pathlib import Path
from typing import Any, Literal

import msgspec

from pillion.errors import ConfigError
from pillion.types import ChatMessage, ChatOptions, SamplingParams, Timings, ToolOptions, Usage

FORMAT = 1
# Limit on bundles written and read. A prompt of a million tokens takes about 7 MB of JSON.
MAX_BUNDLE_BYTES = 64 * 2**20
KEY_FILE = "record.key"
MIN_KEY_BYTES, MAX_KEY_BYTES = 16, 4096
# Upper bounds of the buckets of times between tokens, in milliseconds; a further bucket counts longer times.
GAP_BOUNDS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)

Reason = Literal["failed", "slow", "asked", "share"]
Content = Literal["none", "hash", "full"]


class BundleModel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The model that computed the answers. ``asked``: the name that the client used. ``adapter``: digest of the
    adapter's content, "" without an adapter."""

    name: str
    fingerprint: str
    asked: str = ""
    adapter: str = ""


class BundleWorker(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker of the request, from its registry record at the time."""

    component_id: str
    role: str
    node_id: str = ""
    version: str = ""
    kernels: str = ""
    tensor_parallel_size: int = 1


class BundleRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The request with every default resolved: enough to send it again.

    Attributes:
        operation: "chat", "text_completion" or "embeddings".
        label: the request's id in the client's response and in the gateway's log.
        prompt_tokens: number of tokens of the prompt.
        token_ids: the prompt; () if it is not kept.
        messages, chat, tools: the conversation, if the request had one and it is kept.
        sampling: the resolved sampling parameters: with the seed used, and with the model's own ids among
            ``stop_token_ids``. Texts and lists of tokens are omitted unless content is kept.
        bad_words: token sequences that no answer contains.
        grammar: the grammar of the answers, as a worker receives it; "" for none.
        resumed_tokens: number of tokens of all answers that another gateway sent before the stream moved here.
        hmacs: HMACs of the fields that are not kept, by name.
    """

    operation: str
    label: str
    prompt_tokens: int
    sampling: SamplingParams
    token_ids: tuple[int, ...] = ()
    messages: tuple[ChatMessage, ...] = ()
    chat: ChatOptions = ChatOptions()
    tools: ToolOptions = ToolOptions()
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: str = ""
    priority: int = 0
    resumed_tokens: int = 0
    hmacs: dict[str, str] = {}


class TokenTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Times of an answer's tokens, in milliseconds since the request's arrival.

    ``gaps`` is a histogram over GAP_BOUNDS_MS of the times between two messages with tokens; the longest one preceded
    the token at index ``longest_gap_at``.
    """

    first_ms: float
    last_ms: float
    longest_gap_ms: float = 0.0
    longest_gap_at: int = 0
    gaps: tuple[int, ...] = ()


class BundleAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One answer.

    Attributes:
        tokens: number of tokens so far.
        token_ids, hmac: the tokens, or their HMAC, as the bundle keeps content.
        finish_reason: "" for an unfinished answer.
        logprobs: log probability of each token if the client requested them; None for tokens that another gateway sent
            before the stream moved.
        times: None for an answer without tokens.
    """

    tokens: int
    token_ids: tuple[int, ...] = ()
    hmac: str = ""
    finish_reason: str = ""
    logprobs: tuple[float | None, ...] = ()
    times: TokenTimes | None = None


class WeighedRoute(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A route that the planner considered. ``price_ms``, by which it chose: the predicted time to the first token, plus
    the delay of other requests. ``fetched``: the source of blocks to fetch, "of_nodes", "of_bucket", or "" for
    none."""

    decode: str
    prefill: str = ""
    price_ms: float = 0.0
    cached_tokens: int = 0
    fetch_ms: float = 0.0
    fetched: str = ""
    chosen: bool = False


class StoryEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event of a request, ``at_ms`` milliseconds after its arrival.

    Attributes:
        what: one of the names listed in `gateway/recorder/story.py`.
        attempt, answer: which attempt, from 1, of which answer, from 0.
        worker: the component where it happened, or that continues.
        tokens: the prompt position up to which KV exists, or a number of tokens.
        words: a description for people, e.g. the reason.
        figures: further numbers by name.
        weighed: the routes among which a plan chose.
    """

    at_ms: float
    what: str
    attempt: int = 0
    answer: int = 0
    worker: str = ""
    tokens: int = 0
    words: str = ""
    figures: dict[str, float] = {}
    weighed: tuple[WeighedRoute, ...] = ()


class Bundle(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The record of one request.

    Attributes:
        id: the server's own id of the request, 24 hexadecimal digits; clients cannot choose it.
        reason: why the request was recorded.
        tenant: the request's tenant; "" without API keys.
        content: how texts and token ids are kept.
        slow_ms: wait for a token above which the gateway considers a request slow; 0 for none.
        flags: the gateway's settings that a replay needs, by name.
        workers: the components that worked on the request.
        error: why the request failed, as "Kind: message"; "" if it did not.
        usage, timings: the cost of the request; None if it was never scheduled.
        mac: the HMAC of all other fields.
    """

    format: int = FORMAT
    id: str
    created_unix_ms: int
    reason: Reason
    tenant: str
    content: Content
    version: str
    model: BundleModel
    request: BundleRequest
    answers: tuple[BundleAnswer, ...]
    story: tuple[StoryEvent, ...]
    slow_ms: int = 0
    flags: dict[str, str] = {}
    workers: tuple[BundleWorker, ...] = ()
    error: str = ""
    usage: Usage | None = None
    timings: Timings | None = None
    mac: str = ""


def hidden(key: bytes, name: str, value: Any) -> str:
    """Return the HMAC that a bundle keeps in place of the value of field ``name``."""
    return hmac.digest(key, name.encode() + b"\0" + _canonical(value), "sha256").hex()


def encode(bundle: Bundle, key: bytes) -> bytes:
    """Return the JSON of a bundle's file, with its HMAC. Raises ConfigError if it is too large."""
    fields = {"format": bundle.format, **msgspec.to_builtins(bundle, str_keys=True)}
    fields.pop("mac", None)
    raw = msgspec.json.encode({**fields, "mac": _mac(key, fields)})
    if len(raw) > MAX_BUNDLE_BYTES:
        raise ConfigError(f"the bundle {bundle.id} has {len(raw)} bytes; at most {MAX_BUNDLE_BYTES} are kept")
    return raw


def decode(raw: bytes, name: str, key: bytes | None) -> tuple[Bundle, bool]:
    """Return the bundle encoded in ``raw``, and whether its HMAC was verified, which needs a key.

    Raises ConfigError if it is too large, is not a bundle, or has a wrong HMAC; ``name`` names it in messages.
    """
    try:
        fields = msgspec.json.decode(raw) if len(raw) <= MAX_BUNDLE_BYTES else {}
        format_found = fields.get("format") if isinstance(fields, dict) else None
        if format_found != FORMAT:
            size = f"larger than {MAX_BUNDLE_BYTES} bytes" if len(raw) > MAX_BUNDLE_BYTES else str(format_found)[:20]
            raise ConfigError(f"{name} is not a bundle of format {FORMAT}, but {size}")
        mac = fields.pop("mac", "")
        if key is not None and not hmac.compare_digest(_mac(key, fields).encode(), str(mac).encode()):
            raise ConfigError(f"{name} is rejected: its HMAC is wrong, so it was changed or written with another key")
        return msgspec.convert({**fields, "mac": str(mac)}, Bundle, str_keys=True), key is not None
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise ConfigError(f"{name} is not a bundle: {str(error)[:200]}") from None


def read_file(path: Path) -> bytes:
    """Read a bundle's file, up to MAX_BUNDLE_BYTES + 1 bytes, so that larger ones are detected. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_BUNDLE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def read(path: Path, key: bytes | None) -> tuple[Bundle, bool]:
    """Read a bundle from its file, like :func:`decode`. Raises ConfigError."""
    return decode(read_file(path), str(path), key)


def read_key(path: Path) -> bytes:
    """Read a key, without surrounding white space. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            key = file.read(MAX_KEY_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(f"--record-key-file {path}: {error.strerror}") from None
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        raise ConfigError(f"--record-key-file {path}: a key has {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes")
    return key


def _mac(key: bytes, fields: dict[str, Any]) -> str:
    return hmac.digest(key, b"bundle\0" + _canonical(fields), "sha256").hex()


def _canonical(value: Any) -> bytes:
    return msgspec.json.encode(value, order="sorted")
