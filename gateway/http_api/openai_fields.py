"""The fields of OpenAI's requests, with those that vLLM adds. Any other field is refused by its name.

A body is read in two steps, so that what is too long is refused before it is parsed whole: the lists and maps stay raw
at first, and are counted. Fields that ask for what Pillion does not do are raw too: only the value that changes nothing
is let through, and clients do send those.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Raw

from pillion.gateway.http_api.http_errors import ApiError, refused

T = TypeVar("T")

# Larger numbers have no use; their digits alone could be megabytes.
Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
MAX_LABEL_CHARS = 512
# Longest value of a field that changes nothing.
_MAX_HARMLESS_BYTES = 64
_PATH = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_NAMED = re.compile(r"field `([^`]*)`")


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a stream; ``continuous_usage_stats`` is vLLM's: usage so far, with every event."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Raw = Raw()


class _CommonBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of both kinds of completion."""

    model: str = ""
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    seed: Int | None = None
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    n: Int | None = None
    best_of: Int | None = None
    stop: Raw = Raw()
    stop_token_ids: Raw = Raw()
    ignore_eos: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Raw = Raw()
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Int | None = None
    cache_salt: str | None = None
    user: str | None = None
    # Not supported; see HARMLESS.
    allowed_token_ids: Raw = Raw()
    bad_words: Raw = Raw()
    early_stopping: Raw = Raw()
    guided_choice: Raw = Raw()
    guided_grammar: Raw = Raw()
    guided_json: Raw = Raw()
    guided_regex: Raw = Raw()
    include_stop_str_in_output: Raw = Raw()
    kv_transfer_params: Raw = Raw()
    length_penalty: Raw = Raw()
    metadata: Raw = Raw()
    prompt_logprobs: Raw = Raw()
    response_format: Raw = Raw()
    return_token_ids: Raw = Raw()
    return_tokens_as_token_ids: Raw = Raw()
    service_tier: Raw = Raw()
    skip_special_tokens: Raw = Raw()
    spaces_between_special_tokens: Raw = Raw()
    store: Raw = Raw()
    structured_outputs: Raw = Raw()
    truncate_prompt_tokens: Raw = Raw()
    use_beam_search: Raw = Raw()


class CompletionBody(_CommonBody, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/completions."""

    prompt: Raw
    echo: bool | None = None
    logprobs: Int | None = None
    # Not supported; see HARMLESS.
    add_special_tokens: Raw = Raw()
    suffix: Raw = Raw()


class ChatBody(_CommonBody, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Raw
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    safety_identifier: str | None = None
    # Not supported; see HARMLESS.
    add_generation_prompt: Raw = Raw()
    audio: Raw = Raw()
    chat_template: Raw = Raw()
    chat_template_kwargs: Raw = Raw()
    continue_final_message: Raw = Raw()
    documents: Raw = Raw()
    echo: Raw = Raw()
    function_call: Raw = Raw()
    functions: Raw = Raw()
    mm_processor_kwargs: Raw = Raw()
    modalities: Raw = Raw()
    parallel_tool_calls: Raw = Raw()
    prediction: Raw = Raw()
    prompt_cache_key: Raw = Raw()
    prompt_cache_retention: Raw = Raw()
    reasoning_effort: Raw = Raw()
    tool_choice: Raw = Raw()
    tools: Raw = Raw()
    verbosity: Raw = Raw()
    web_search_options: Raw = Raw()


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message's content; only text is supported."""

    type: str
    text: str = ""
    audio_url: Raw = Raw()
    file: Raw = Raw()
    image_url: Raw = Raw()
    input_audio: Raw = Raw()
    refusal: Raw = Raw()
    video_url: Raw = Raw()


class MessageBody(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a conversation; an assistant's may be sent back as it was received."""

    role: str
    content: str | list[ContentPart] | None = None
    annotations: Raw = Raw()
    audio: Raw = Raw()
    function_call: Raw = Raw()
    name: Raw = Raw()
    reasoning: Raw = Raw()
    reasoning_content: Raw = Raw()
    refusal: Raw = Raw()
    tool_call_id: Raw = Raw()
    tool_calls: Raw = Raw()


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /tokenize, as vLLM has it."""

    model: str = ""
    prompt: str | None = None
    messages: Raw = Raw()
    return_token_strs: bool | None = None
    add_generation_prompt: Raw = Raw()
    add_special_tokens: bool | None = None
    chat_template: Raw = Raw()
    chat_template_kwargs: Raw = Raw()
    continue_final_message: Raw = Raw()
    tools: Raw = Raw()


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /detokenize, as vLLM has it."""

    model: str = ""
    tokens: Raw


# Besides null, the values that a field may have that is not supported: they
# ask for what happens anyhow.
HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "annotations": ([],),
    "bad_words": ([],),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "include_obfuscation": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "tool_calls": ([],),
    "tool_choice": ("none",),
    "tools": ([],),
    "use_beam_search": (False,),
}
# Read in the second step; every other raw field is not supported.
READ_LATER = frozenset({"prompt", "messages", "stop", "stop_token_ids", "logit_bias", "tokens"})


def parse(body: bytes, kind: type[T]) -> T:
    """Reads a body as ``kind``, its lists and maps still raw. Raises ApiError, naming the field."""
    try:
        parsed = msgspec.json.decode(body, type=kind)
    except (ValueError, RecursionError) as error:
        raise _unreadable(error, "") from None
    refuse_unsupported(parsed, "")
    return parsed


def parse_field(raw: Raw, kind: Any, field: str) -> Any:
    """Reads a raw field as ``kind``. Raises ApiError."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (ValueError, RecursionError) as error:
        raise _unreadable(error, field) from None


def given(raw: Raw) -> bool:
    """Whether a raw field was sent, and not as null."""
    text = bytes(raw).strip()
    return bool(text) and text != b"null"


def refuse_unsupported(parsed: Any, prefix: str) -> None:
    """Raises ApiError for a field that asks for what is not supported. ``prefix`` is the path of ``parsed``, with its
    dot."""
    for name in _raw_fields(type(parsed)):
        raw = getattr(parsed, name)
        if given(raw) and not _changes_nothing(name, raw):
            raise refused(prefix + name, "this is not supported here", "unsupported_parameter")


def _changes_nothing(name: str, raw: Raw) -> bool:
    if len(bytes(raw)) > _MAX_HARMLESS_BYTES:
        return False
    try:
        parsed = msgspec.json.decode(raw)
    except (ValueError, RecursionError):
        return False
    return any(type(parsed) is type(value) and parsed == value for value in HARMLESS.get(name, ()))


def _raw_fields(kind: type[Any]) -> tuple[str, ...]:
    if kind not in _RAW_FIELDS:
        fields = msgspec.structs.fields(kind)
        _RAW_FIELDS[kind] = tuple(f.name for f in fields if f.type is Raw and f.name not in READ_LATER)
    return _RAW_FIELDS[kind]


_RAW_FIELDS: dict[type[Any], tuple[str, ...]] = {}


def _unreadable(error: Exception, field: str) -> ApiError:
    """The error for a body that cannot be read: msgspec's message names what it expected, and where."""
    if isinstance(error, UnicodeDecodeError):
        return ApiError(400, "the body is not valid UTF-8", param=field or None, code="invalid_json")
    if isinstance(error, RecursionError):
        return ApiError(400, "the body is nested too deeply", param=field or None, code="invalid_json")
    if not isinstance(error, msgspec.ValidationError):
        return ApiError(400, f"the body is not valid JSON: {error}", param=field or None, code="invalid_json")
    found = _PATH.match(str(error))
    what, path = (found["what"], found["path"] or "") if found else (str(error), "")
    named = _NAMED.search(what)
    if named:
        path = f"{path}.{named[1]}" if path else named[1]
    joint = "" if not path or not field or path.startswith("[") else "."
    param = field + joint + path
    if "unknown field" in what:
        return refused(param, "this field is not known here", "unknown_parameter")
    if "missing required" in what:
        return refused(param, "this field is required", "missing_required_parameter")
    return refused(param, what, "invalid_type") if param else ApiError(400, what, code="invalid_type")
