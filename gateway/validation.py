"""What a request must be before anything works for it. Every wrong field is named, all at once."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from pillion.errors import FieldViolation, InvalidRequest
from pillion.types import GenerateRequest, SamplingParams

MAX_PROMPT_CHARS = 4 * 2**20
MAX_MESSAGES = 4096
# A million tokens as ids, or the longest text in most scripts. The transport itself refuses 16 MiB and more, with
# RESOURCE_EXHAUSTED: such a message is never read at all.
MAX_REQUEST_BYTES = 8 * 2**20
# Above these a list is refused unread; the model's and the fields' own bounds are judged later.
MAX_PROMPT_IDS = 2**20
MAX_ITEMS = MAX_MESSAGES
MAX_ROLE_CHARS = 32
MAX_TEMPERATURE = 100.0
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_CACHE_SALT_CHARS = 256
MAX_REQUEST_ID_CHARS = 128
# A list of a million wrong ids is one mistake, not a million violations.
MAX_VIOLATIONS = 32

_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
# A request id goes into headers, trailers and logs.
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]+")
_INT64 = range(-(2**63), 2**63)


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What of a model bounds a request."""

    name: str
    max_model_len_tokens: int
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """Sampling with every default decided, as a decode worker needs it; ``max_tokens`` counts over all attempts."""

    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    max_tokens: int


def check_model(name: str, known: Collection[str]) -> str:
    """The served model that ``name`` means; "" means the only one. Raises InvalidRequest, listing the known ones."""
    if name in known:
        return name
    if not name and len(known) == 1:
        return next(iter(known))
    listed = ", ".join(sorted(known))
    if not name:
        raise InvalidRequest.of(FieldViolation("model", f"several models are served, name one of: {listed}"))
    raise InvalidRequest.of(FieldViolation("model", f"{name[:100]!r} is not served here; known: {listed}"))


def check_size(size_bytes: int) -> None:
    """Raises InvalidRequest for a message that no prompt needs."""
    if size_bytes > MAX_REQUEST_BYTES:
        said = f"the message has {size_bytes} bytes; at most {MAX_REQUEST_BYTES}"
        raise InvalidRequest.of(FieldViolation("(message)", said))


def check_counts(counts: Mapping[str, int]) -> None:
    """Before anything is made of a message: no field holds absurdly many items. They are counted at no cost, but
    millions of Python objects would stop every stream for seconds. ``counts`` by field. Raises InvalidRequest."""
    bounds = {"token_ids": MAX_PROMPT_IDS}
    found = [
        FieldViolation(field, f"{count} items; at most {most}")
        for field, count in counts.items()
        if count > (most := bounds.get(field, MAX_ITEMS))
    ]
    if found:
        raise InvalidRequest.of(*found)


def check_request(request: GenerateRequest, limits: ModelLimits) -> None:
    """All that can be said before tokenizing. Raises InvalidRequest with every violation (at most MAX_VIOLATIONS)."""
    found: list[FieldViolation] = []
    for violation in _violations(request, limits):
        found.append(violation)
        if len(found) == MAX_VIOLATIONS:
            break
    if found:
        raise InvalidRequest.of(*found)


def check_length(prompt_tokens: int, field: str, limits: ModelLimits) -> None:
    """A prompt must leave room for one token. Raises InvalidRequest."""
    most = limits.max_model_len_tokens - 1
    if prompt_tokens > most:
        raise InvalidRequest.of(FieldViolation(field, f"{prompt_tokens} tokens; the model takes at most {most}"))
    if prompt_tokens == 0:
        raise InvalidRequest.of(FieldViolation(field, "it holds no tokens"))


def prompt_field(request: GenerateRequest) -> str:
    """The field that holds the prompt of a checked request."""
    return "messages" if request.messages else "token_ids" if request.token_ids else "text"


def resolve(
    sampling: SamplingParams, prompt_tokens: int, eos_token_ids: tuple[int, ...], limits: ModelLimits, drawn_seed: int
) -> Resolved:
    """Every default decided (I6). ``drawn_seed`` is used where the client gave none."""
    room = limits.max_model_len_tokens - prompt_tokens
    top_k = sampling.top_k or 0
    wanted = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
    ends = sampling.stop_token_ids if sampling.ignore_eos else (*sampling.stop_token_ids, *eos_token_ids)
    return Resolved(
        sampling=SamplingParams(
            temperature=1.0 if sampling.temperature is None else sampling.temperature,
            top_p=1.0 if sampling.top_p is None else sampling.top_p,
            top_k=max(0, top_k),
            seed=drawn_seed if sampling.seed is None else sampling.seed,
            max_tokens=wanted,
            ignore_eos=sampling.ignore_eos,
        ),
        stop_token_ids=tuple(dict.fromkeys(ends)),
        max_tokens=wanted,
    )


def _violations(request: GenerateRequest, limits: ModelLimits) -> Iterator[FieldViolation]:
    yield from _prompt(request, limits)
    yield from _sampling(request.sampling, limits)
    if len(request.cache_salt) > MAX_CACHE_SALT_CHARS:
        yield FieldViolation("cache_salt", f"longer than {MAX_CACHE_SALT_CHARS} characters")
    if not _is_text(request.cache_salt):
        yield FieldViolation("cache_salt", "not valid Unicode")
    if len(request.request_id) > MAX_REQUEST_ID_CHARS:
        yield FieldViolation("request_id", f"longer than {MAX_REQUEST_ID_CHARS} characters")
    elif request.request_id and not _REQUEST_ID.fullmatch(request.request_id):
        yield FieldViolation("request_id", "only letters, digits and . _ : / + = - are allowed")


def _prompt(request: GenerateRequest, limits: ModelLimits) -> Iterator[FieldViolation]:
    given = [name for name in ("text", "token_ids", "messages") if getattr(request, name)]
    if not given:
        yield FieldViolation("text", "the prompt is empty; give one of text, token_ids and messages")
    for name in given if len(given) > 1 else ():
        yield FieldViolation(
            name, f"exactly one of text, token_ids and messages may be given, not {' and '.join(given)}"
        )
    if len(request.text) > MAX_PROMPT_CHARS:
        yield FieldViolation("text", f"longer than {MAX_PROMPT_CHARS} characters")
    elif not _is_text(request.text):
        yield FieldViolation("text", "not valid Unicode")
    if len(request.token_ids) >= limits.max_model_len_tokens:
        most = limits.max_model_len_tokens - 1
        yield FieldViolation("token_ids", f"{len(request.token_ids)} tokens; the model takes at most {most}")
    else:
        yield from _ids("token_ids", request.token_ids, limits)
    yield from _messages(request)


def _messages(request: GenerateRequest) -> Iterator[FieldViolation]:
    if len(request.messages) > MAX_MESSAGES:
        yield FieldViolation("messages", f"more than {MAX_MESSAGES} messages")
        return
    if sum(len(message.content) for message in request.messages) > MAX_PROMPT_CHARS:
        yield FieldViolation("messages", f"longer than {MAX_PROMPT_CHARS} characters together")
        return
    for n, message in enumerate(request.messages):
        if len(message.role) > MAX_ROLE_CHARS or not _ROLE.fullmatch(message.role):
            said = f"a word of at most {MAX_ROLE_CHARS} letters and digits, such as system, user or assistant"
            yield FieldViolation(f"messages[{n}].role", said)
        if not _is_text(message.content):
            yield FieldViolation(f"messages[{n}].content", "not valid Unicode")


def _sampling(sampling: SamplingParams, limits: ModelLimits) -> Iterator[FieldViolation]:
    temperature, top_p, top_k = sampling.temperature, sampling.top_p, sampling.top_k
    # Written so that NaN, which compares false with everything, is refused.
    if temperature is not None and not (math.isfinite(temperature) and 0 <= temperature <= MAX_TEMPERATURE):
        yield FieldViolation("sampling.temperature", f"{temperature} is not in [0, {MAX_TEMPERATURE:g}]")
    if top_p is not None and not (math.isfinite(top_p) and 0 < top_p <= 1):
        yield FieldViolation("sampling.top_p", f"{top_p} is not in (0, 1]")
    if top_k is not None and top_k < -1:
        yield FieldViolation("sampling.top_k", f"{top_k} is below -1; 0 and -1 mean all tokens")
    if sampling.seed is not None and sampling.seed not in _INT64:
        yield FieldViolation("sampling.seed", "does not fit 64 bits")
    if sampling.max_tokens is not None and not 1 <= sampling.max_tokens <= limits.max_model_len_tokens:
        yield FieldViolation(
            "sampling.max_tokens", f"{sampling.max_tokens} is not in [1, {limits.max_model_len_tokens}]"
        )
    yield from _stops(sampling, limits)


def _stops(sampling: SamplingParams, limits: ModelLimits) -> Iterator[FieldViolation]:
    if len(sampling.stop) > MAX_STOPS:
        yield FieldViolation("sampling.stop", f"{len(sampling.stop)} stop strings; at most {MAX_STOPS}")
    for n, stop in enumerate(sampling.stop[:MAX_STOPS]):
        if not stop:
            yield FieldViolation(f"sampling.stop[{n}]", "empty")
        elif len(stop) > MAX_STOP_CHARS:
            yield FieldViolation(f"sampling.stop[{n}]", f"longer than {MAX_STOP_CHARS} characters")
        elif not _is_text(stop):
            yield FieldViolation(f"sampling.stop[{n}]", "not valid Unicode")
    if len(sampling.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        said = f"{len(sampling.stop_token_ids)} ids; at most {MAX_STOP_TOKEN_IDS}"
        yield FieldViolation("sampling.stop_token_ids", said)
    else:
        yield from _ids("sampling.stop_token_ids", sampling.stop_token_ids, limits)


def _ids(field: str, token_ids: tuple[int, ...], limits: ModelLimits) -> Iterator[FieldViolation]:
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= limits.vocab_size):
        for n, token_id in enumerate(token_ids):
            if not 0 <= token_id < limits.vocab_size:
                yield FieldViolation(f"{field}[{n}]", f"{token_id} is not in [0, {limits.vocab_size})")


def _is_text(text: str) -> bool:
    """Whether it can be written as UTF-8: lone surrogates, which JSON can bring, cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
