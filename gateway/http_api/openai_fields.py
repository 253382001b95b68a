"""The fields of OpenAI's requests, with those that vLLM adds. Any other field is refused by its name.

A body is read in two steps, so that what is too long is refused before it is parsed whole: its strings are counted
first, and the lists and maps stay raw until each is counted. Fields that ask for what Pillion does not do are raw too:
only the value that changes nothing is let through, and clients do send those.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Raw

from pillion.gateway.http_api.http_errors import ApiError, refused
from pillion.gateway.http_api.json_objects import AnyJson, JsonObject, JsonObjects, JsonSchema, JsonShape
from pillion.gateway.request.message_bounds import (
    MAX_BRACKETS,
    MAX_STRINGS,
    holds_too_many_brackets,
    holds_too_many_strings,
)

T = TypeVar("T")

# Larger numbers have no use; their digits alone could be megabytes.
Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
# OpenAI's words, and those of templates that know more.
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
MAX_LABEL_CHARS = 512
# Characters of each end of the parser's message; between them it repeats what the client sent.
_MAX_ERROR_CHARS = 1000
# Longest value of a field that changes nothing.
_MAX_HARMLESS_BYTES = 64
_PATH = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_NAMED = re.compile(r"field `([^`]*)`")
_VALUE = re.compile(r"^Invalid (?:enum )?value '(.*)'$", re.DOTALL)


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a stream.

    Attributes:
        include_usage: send one more event, with the usage, at the end.
        continuous_usage_stats: send the usage so far with every event, as vLLM does.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Raw = Raw()


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, tag="text", tag_field="type"):
    """Free text."""


class JsonObjectFormat(msgspec.Struct, forbid_unknown_fields=True, tag="json_object", tag_field="type"):
    """Any JSON object."""


class NamedSchema(msgspec.Struct, forbid_unknown_fields=True):
    """A JSON schema with OpenAI's words around it.

    Attributes:
        name: what the schema is called; without effect.
        schema: the schema; left out, any JSON object will do.
        description: what the schema is for; without effect.
        strict: without effect: every answer fits the whole schema.
    """

    name: str = ""
    schema: JsonSchema = Raw()
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True, tag="json_schema", tag_field="type"):
    """JSON that fits a schema.

    Attributes:
        json_schema: the schema.
    """

    json_schema: NamedSchema


class TagFormat(msgspec.Struct, forbid_unknown_fields=True, tag="structural_tag", tag_field="type"):
    """Free text with parts of a given shape, as vLLM has it: structures and triggers, or a format.

    Attributes:
        structures: begin, schema and end of each part.
        triggers: texts behind which one of the structures has to follow.
        format: the newer notation, which nests.
    """

    structures: JsonObjects = Raw()
    triggers: list[str] | None = None
    format: JsonObject = Raw()


class ShapeBody(msgspec.Struct, forbid_unknown_fields=True):
    """The shape of the answer in vLLM's words; exactly one field is given.

    Attributes:
        json: a JSON schema, or its text.
        regex: a regular expression that the whole answer matches.
        choice: the answer is one of these texts.
        grammar: a grammar in Lark's notation, or in GBNF's.
        json_object: any JSON object will do.
        structural_tag: free text with parts of a given shape, as text.
        whitespace_pattern: not supported; JSON is written as Python's json writes it.
    """

    json: JsonShape = Raw()
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: Raw = Raw()
    disable_additional_properties: Raw = Raw()
    whitespace_pattern: Raw = Raw()


class _CommonBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of both kinds of completion; those of sampling are described in SamplingParams.

    Attributes:
        model: the served model's name; may be left out where one model is served.
        stream: send the answer as server-sent events while it grows.
        stream_options: options of that stream.
        timings: report where the prompt's tokens and the request's time went, beside the usage, as the SDK's Timings
            has it; in a stream with its last event. Only with one prompt.
        priority: smaller is more urgent, from -100 to 100; default 0. A tenant needs a permission to be below 0.
        prompt_logprobs: report log probabilities of the prompt's tokens and of this many alternatives, as vLLM does;
            not with stream.
        cache_salt: only requests with the same salt share cached prefixes.
        response_format: the shape of the answer, in OpenAI's words.
        structured_outputs: the shape of the answer, in vLLM's words.
        user: a label of at most 512 characters, without effect.
        metadata: labels, at most 16 of 64 and 512 characters, without effect: nothing is stored.
    """

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
    prompt_logprobs: Int | None = None
    timings: bool | None = None
    priority: Int | None = None
    cache_salt: str | None = None
    response_format: Raw = Raw()
    structured_outputs: Raw = Raw()
    user: str | None = None
    metadata: Raw = Raw()


class CompletionBody(_CommonBody, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/completions.

    Attributes:
        prompt: a text, token ids, or a list of either; each prompt gets answers of its own.
        max_tokens: most tokens to generate; default 16. 0: none, for log probabilities of the prompt.
        echo: begin each answer with its prompt.
        logprobs: report log probabilities of the answer's tokens and of this many alternatives; with echo also of the
            prompt's.
    """

    prompt: Raw
    echo: bool | None = None
    logprobs: Int | None = None


class ChatBody(_CommonBody, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/chat/completions.

    Attributes:
        messages: the conversation, oldest message first.
        max_completion_tokens: most tokens to generate; default: what the context has left.
        max_tokens: the older name of max_completion_tokens.
        logprobs: whether to report log probabilities of the answer's tokens.
        top_logprobs: report so many alternatives with each of them.
        chat_template_kwargs: further variables of the model's chat template, such as enable_thinking; at most 16 KiB.
        reasoning_effort: a variable of the template that some models know.
        safety_identifier: a label of at most 512 characters, without effect.
        tools: functions that the model may call, at most 128.
        tool_choice: "auto" (the default), "none", "required", or the one function that has to be called.
        parallel_tool_calls: whether one answer may call several; default true.
    """

    messages: Raw
    tools: Raw = Raw()
    tool_choice: Raw = Raw()
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Raw = Raw()
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    reasoning_effort: ReasoningEffort | None = None
    safety_identifier: str | None = None


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message's content.

    Attributes:
        type: only "text" is supported.
        text: the text.
    """

    type: str
    text: str = ""
    audio_url: Raw = Raw()
    file: Raw = Raw()
    image_url: Raw = Raw()
    input_audio: Raw = Raw()
    refusal: Raw = Raw()
    video_url: Raw = Raw()


class FunctionBody(msgspec.Struct, forbid_unknown_fields=True):
    """A function that the model may call.

    Attributes:
        name: at most 128 letters, digits and _ . : -
        description: what the model reads of it.
        parameters: the JSON schema of its arguments; without it, any object.
        strict: whether its arguments always fit that schema; without it they do where the schema can be followed.
    """

    name: str
    description: str | None = None
    parameters: JsonObject = Raw()
    strict: bool | None = None


class ToolBody(msgspec.Struct, forbid_unknown_fields=True):
    """A tool.

    Attributes:
        type: only "function" is supported.
        function: the function.
    """

    type: Literal["function"]
    function: FunctionBody


class NamedFunction(msgspec.Struct, forbid_unknown_fields=True):
    """The name of a function.

    Attributes:
        name: that of one of the tools.
    """

    name: str


class ChoiceBody(msgspec.Struct, forbid_unknown_fields=True):
    """The one tool that has to be called.

    Attributes:
        type: only "function" is supported.
        function: its name.
    """

    type: Literal["function"]
    function: NamedFunction


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    """A function as it was called.

    Attributes:
        name: the function's name.
        arguments: a JSON object, as text.
    """

    name: str
    arguments: str = ""


class CallBody(msgspec.Struct, forbid_unknown_fields=True):
    """A call that a message of the assistant made.

    Attributes:
        id: what the message with its result names.
        function: name and arguments, a JSON object as text.
        type: only "function" is supported.
        index: the call's place, as streams have it; without effect.
    """

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None


class MessageBody(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a conversation; an assistant's may be sent back as it was received.

    Attributes:
        role: "system", "developer", "user", "assistant" or "tool"; the model's own template may know more.
        content: a text, or parts that are joined by line ends.
        tool_calls: calls that a message of the assistant made.
        tool_call_id: the call that a message of role "tool" brings the result of.
        name: who speaks.
        reasoning_content: what the assistant thought; most templates leave it out.
        reasoning: another name of reasoning_content.
        provider_specific_fields: what litellm adds to the messages that it got; without effect.
    """

    role: str
    content: str | list[ContentPart] | None = None
    annotations: Raw = Raw()
    audio: Raw = Raw()
    function_call: Raw = Raw()
    provider_specific_fields: AnyJson = Raw()
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: Raw = Raw()
    tool_call_id: str | None = None
    tool_calls: list[CallBody] | None = None


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /tokenize, as vLLM has it: a prompt, or messages.

    Attributes:
        model: the served model's name; may be left out where one model is served.
        prompt: a text.
        messages: a conversation.
        tools: functions that the model may call, at most 128.
        chat_template_kwargs: further variables of the model's chat template, such as enable_thinking; at most 16 KiB.
        return_token_strs: give the text of each token too.
        add_special_tokens: whether the tokenizer's own beginning of a text is added to a prompt; default: true.
    """

    model: str = ""
    prompt: str | None = None
    messages: Raw = Raw()
    tools: Raw = Raw()
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Raw = Raw()
    return_token_strs: bool | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /detokenize, as vLLM has it.

    Attributes:
        model: the served model's name; may be left out where one model is served.
        tokens: the ids.
    """

    model: str = ""
    tokens: Raw


# Fields that ask for what Pillion does not do, by body; see HARMLESS.
_UNSUPPORTED_IN_BOTH = """
    allowed_token_ids bad_words early_stopping guided_choice guided_grammar guided_json guided_regex
    include_stop_str_in_output kv_transfer_params length_penalty
    return_token_ids return_tokens_as_token_ids service_tier skip_special_tokens spaces_between_special_tokens
    store truncate_prompt_tokens use_beam_search
"""
_UNSUPPORTED = {
    CompletionBody: f"{_UNSUPPORTED_IN_BOTH} add_special_tokens suffix",
    ChatBody: f"""{_UNSUPPORTED_IN_BOTH}
    audio chat_template documents echo function_call functions mm_processor_kwargs modalities
    prediction prompt_cache_key prompt_cache_retention verbosity web_search_options
    """,
    TokenizeBody: "chat_template",
}
# Besides null, the values that an unsupported field may have: they ask for what happens anyhow.
HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),
    "allowed_callers": (["direct"],),
    "annotations": ([],),
    "background": (False,),
    "bad_words": ([],),
    "context_management": ([],),
    "defer_loading": (False,),
    "disable_any_whitespace": (True, False),
    "disable_additional_properties": (False,),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "include_obfuscation": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "mcp_servers": ([],),
    "modalities": (["text"],),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
}
# Older names of what is supported, with the newer ones.
INSTEAD: Mapping[str, str] = {
    f"guided_{name}": f"vLLM has taken this name away; send structured_outputs.{name}"
    for name in ("json", "regex", "choice", "grammar")
}
# Read in the second step, as these; every other raw field is not supported.
READ_LATER: Mapping[str, Any] = {
    "prompt": str | list[str | Int | list[Int]],
    "messages": list[MessageBody],
    "tools": list[ToolBody],
    "tool_choice": Literal["auto", "none", "required"] | ChoiceBody,
    "stop": str | list[str],
    "stop_token_ids": list[Int],
    "logit_bias": dict[Int, float],
    "metadata": dict[str, str],
    "response_format": TextFormat | JsonObjectFormat | JsonSchemaFormat | TagFormat,
    "structured_outputs": ShapeBody,
    "chat_template_kwargs": dict[str, Raw],
    "tokens": list[Int],
}


def _with_unsupported(kind: Any, names: str) -> type[msgspec.Struct]:
    """The body with its unsupported fields, which are read raw."""
    fields = [(name, Raw, Raw()) for name in names.split()]
    return msgspec.defstruct(kind.__name__, fields, bases=(kind,), kw_only=True, forbid_unknown_fields=True)


# What a body is parsed as.
READ_AS: Mapping[Any, type[Any]] = {kind: _with_unsupported(kind, names) for kind, names in _UNSUPPORTED.items()}


def parse(body: bytes, kind: type[T]) -> T:
    """Reads a body as ``kind``, its lists and maps still raw. Raises ApiError, naming the field."""
    too_many = ""
    if holds_too_many_strings(body):
        too_many = f"{MAX_STRINGS} texts, names of fields included"
    elif holds_too_many_brackets(body):
        too_many = f"{MAX_BRACKETS} brackets and braces"
    if too_many:
        # Only a list can hold so many, and the one that may be long is the prompt's.
        names = {field.name for field in msgspec.structs.fields(kind)}  # type: ignore[arg-type]
        field = next(name for name in ("messages", "input", "prompt", "tokens", "lora_name") if name in names)
        raise refused(field, f"the body holds more than {too_many}")
    try:
        parsed: T = msgspec.json.decode(body, type=READ_AS.get(kind, kind))
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
    kind: Any = type(parsed)
    for name in unsupported_fields(kind):
        raw = getattr(parsed, name)
        if given(raw) and not _changes_nothing(name, raw):
            harmless = b" or ".join(map(msgspec.json.encode, HARMLESS.get(name, ()))).decode()
            reason = INSTEAD.get(name, "this is not supported here") + (f", only {harmless} is" if harmless else "")
            raise refused(prefix + name, reason, "unsupported_parameter")


def _changes_nothing(name: str, raw: Raw) -> bool:
    if len(bytes(raw)) > _MAX_HARMLESS_BYTES:
        return False
    try:
        parsed = msgspec.json.decode(raw)
    except (ValueError, RecursionError):
        return False
    return any(type(parsed) is type(value) and parsed == value for value in HARMLESS.get(name, ()))


@cache
def unsupported_fields(kind: type[Any]) -> tuple[str, ...]:
    """The names of the raw fields of a struct that are not read later."""
    return tuple(f.name for f in msgspec.structs.fields(kind) if f.type is Raw and f.name not in READ_LATER)


def _unreadable(error: Exception, field: str) -> ApiError:
    """The error for a body that cannot be read: msgspec's message names what it expected, and where."""
    if isinstance(error, UnicodeDecodeError):
        return ApiError(400, "the body is not valid UTF-8", param=field or None, code="invalid_json")
    if isinstance(error, RecursionError):
        return ApiError(400, "the body is nested too deeply", param=field or None, code="invalid_json")
    if not isinstance(error, msgspec.ValidationError):
        return ApiError(400, f"the body is not valid JSON: {error}", param=field or None, code="invalid_json")
    text = str(error)
    if len(text) > 2 * _MAX_ERROR_CHARS:
        # The name of a field may have megabytes.
        text = text[:_MAX_ERROR_CHARS] + text[-_MAX_ERROR_CHARS:]
    found = _PATH.match(text)
    what, path = (found["what"], found["path"] or "") if found else (text, "")
    named = _NAMED.search(what)
    if named:
        path = f"{path}.{named[1]}" if path else named[1]
    joint = "" if not path or not field or path.startswith("[") else "."
    param = field + joint + path
    if "unknown field" in what:
        return refused(param, "this field is not known here", "unknown_parameter")
    if "missing required" in what:
        return refused(param, "this field is required", "missing_required_parameter")
    if param.endswith("type") and (unknown := _VALUE.search(what)):
        return refused(param, f"{unknown[1]!r} is not supported here", "unsupported_value")
    return refused(param, what, "invalid_type") if param else ApiError(400, what, code="invalid_type")
