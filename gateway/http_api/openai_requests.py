"""Conversion of the bodies of OpenAI's calls to requests of the gateway.

Earlier turns of a conversation are not validated: parts without text are dropped and named, because a client resends
them with every turn. A part of a user's message without text is refused if it is an image or the like, or in the last
user message.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from msgspec import Raw

from pillion.config import MAX_TEMPLATE_KWARGS_BYTES
from pillion.gateway.http_api.body_reading import REQUIRED, given, note_ignored, parse, parse_field
from pillion.gateway.http_api.content_parts import read_calls, read_content
from pillion.gateway.http_api.http_errors import from_pillion, refused
from pillion.gateway.http_api.model_calls import ParsedCall
from pillion.gateway.http_api.openai_fields import (
    MAX_LABEL_CHARS,
    READ_LATER,
    ChatBody,
    CompletionBody,
    Int,
    MessageBody,
    ThinkingSwitch,
    TokenizeBody,
)
from pillion.gateway.http_api.structure_fields import StructureBody
from pillion.gateway.http_api.structure_reading import STRUCTURE_FIELDS, RequestedStructure, read_structure
from pillion.gateway.http_api.tool_reading import ParsedTools
from pillion.gateway.request.validation import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_MESSAGES,
    MAX_PROMPT_IDS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS_CHARS,
    MAX_TOOLS_BYTES,
    too_long,
)
from pillion.gateway.tokens.tokenizer import check_wanted
from pillion.types import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_LOGIT_BIASES,
    SAMPLING_OPTIONS,
    ChatMessage,
    ChatOptions,
    GenerateRequest,
    SamplingParams,
    StructuredOutputs,
    ToolCall,
    ToolOptions,
)

# Default of OpenAI and vLLM for completions; a chat's answer may fill the context.
DEFAULT_COMPLETION_TOKENS = 16
MAX_PROMPTS = 2048
MAX_CALL_ANSWERS = 16_384
# OpenAI's limits of metadata.
MAX_METADATA_PAIRS = 16
MAX_METADATA_NAME_CHARS = 64
_MAX_CHOICE_BYTES = 1024
_KWARGS_BOUND = MAX_TEMPLATE_KWARGS_BYTES, f"at most {MAX_TEMPLATE_KWARGS_BYTES} bytes of JSON"
_METADATA_BOUND = (
    f"at most {MAX_METADATA_PAIRS} pairs of a name of {MAX_METADATA_NAME_CHARS} characters "
    f"and a text of {MAX_LABEL_CHARS}"
)
# Field -> max bytes of its JSON, and the error above. JSON needs at most six bytes per character, and a number has at
# most twenty digits.
_BOUNDS: Mapping[str, tuple[int, str]] = {
    "tools": (2 * MAX_TOOLS_BYTES, f"more than {MAX_TOOLS_BYTES} bytes"),
    "tool_choice": (_MAX_CHOICE_BYTES, f"more than {_MAX_CHOICE_BYTES} bytes"),
    "stop": (16 * MAX_STOPS_CHARS, f"at most {MAX_STOPS_CHARS} characters together"),
    "stop_token_ids": (32 * MAX_STOP_TOKEN_IDS, f"at most {MAX_STOP_TOKEN_IDS} ids"),
    "bad_words": (
        16 * MAX_BAD_WORDS * MAX_BAD_WORD_CHARS,
        f"at most {MAX_BAD_WORDS} texts of {MAX_BAD_WORD_CHARS} characters",
    ),
    "allowed_token_ids": (32 * MAX_ALLOWED_TOKEN_IDS, f"at most {MAX_ALLOWED_TOKEN_IDS} ids"),
    "logit_bias": (64 * MAX_LOGIT_BIASES, f"at most {MAX_LOGIT_BIASES} tokens"),
    "chat_template_kwargs": _KWARGS_BOUND,
    "chat_template_args": _KWARGS_BOUND,
    "metadata": (16 * MAX_METADATA_PAIRS * (MAX_METADATA_NAME_CHARS + MAX_LABEL_CHARS), _METADATA_BOUND),
}
_LIST = re.compile(rb"\[\s*(.?)", re.DOTALL)

# The gateway's names of fields -> the client's, where different.
COMPLETION_NAMES: Mapping[str, str] = {"text": "prompt", "token_ids": "prompt"}
CHAT_NAMES: Mapping[str, str] = {
    "sampling.logprobs": "top_logprobs",
    "tools.tools": "tools",
    "tools.choice": "tool_choice",
}
CHAT_NAMES_NEW: Mapping[str, str] = {**CHAT_NAMES, "sampling.max_tokens": "max_completion_tokens"}

# "developer" is OpenAI's newer name of "system", which no open model's template has; "function" is the older name of
# "tool".
_ROLES = {"developer": "system", "function": "tool"}

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIRequest(ParsedCall):
    """A parsed call of /v1/completions or /v1/chat/completions.

    Attributes:
        echoed: text of the conversation's last message, with which each answer starts; "" without echo.
        custom: names of the custom tools.
    """

    body: CompletionBody | ChatBody
    echoed: str = ""
    custom: frozenset[str] = frozenset()

    @property
    def answers(self) -> int:
        """Number of answers per prompt."""
        return self.requests[0].sampling.n or 1

    @property
    def include_usage(self) -> bool:
        """True if a stream has usage at its end."""
        options, usage = self.body.stream_options, self.body.usage
        return bool(options is not None and options.include_usage) or bool(usage is not None and usage.include)

    @property
    def continuous_usage(self) -> bool:
        """True if a stream has usage in each event."""
        options = self.body.stream_options
        return options is not None and bool(options.continuous_usage_stats) and self.include_usage

    @property
    def logprobs(self) -> bool:
        """True if log probabilities are returned; a completion may request them without alternatives (0)."""
        return self.body.logprobs is not None and self.body.logprobs is not False


def completion_request(raw: bytes, request_id: str, max_ids: int = MAX_PROMPT_IDS) -> OpenAIRequest:
    """Parse the body of POST /v1/completions; a prompt of more than ``max_ids`` ids is refused before it is parsed.
    Raises ApiError."""
    body = parse(raw, CompletionBody)
    if body.truncate_prompt_tokens is not None:
        max_ids = MAX_PROMPT_IDS
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else token_limit(body.max_tokens)
    if body.min_tokens is not None and body.max_tokens is None:
        max_tokens = max(DEFAULT_COMPLETION_TOKENS, body.min_tokens)
    structured, structure_names = structure_of(body)
    sampling = _sampling(body, max_tokens, body.logprobs, structured)
    if body.echo and body.logprobs is not None:
        sampling = replace(sampling, prompt_logprobs=max(body.logprobs, body.prompt_logprobs or 0))
    prompts = read_prompts(body.prompt, max_ids)
    if len(prompts) * max(body.n or 1, body.best_of or 1) > MAX_CALL_ANSWERS:
        raise refused("n", f"more than {MAX_CALL_ANSWERS} answers to {len(prompts)} prompts")
    named = (("text" if isinstance(prompt, str) else "token_ids", prompt) for prompt in prompts.values())
    requests = tuple(request_of(body, request_id, sampling, **{name: prompt}) for name, prompt in named)
    logprob_names = {} if body.prompt_logprobs is not None else {"sampling.prompt_logprobs": "logprobs"}
    names = tuple({"text": field, "token_ids": field, **logprob_names, **structure_names} for field in prompts)
    _check_options(body, len(requests))
    return OpenAIRequest(requests=requests, names=names, stream=bool(body.stream), body=body)


def chat_request(raw: bytes, request_id: str) -> OpenAIRequest:
    """Parse the body of POST /v1/chat/completions. Raises ApiError."""
    body = parse(raw, ChatBody)
    if body.top_logprobs and not body.logprobs:
        raise refused("top_logprobs", "needs logprobs: true")
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise refused("max_completion_tokens", "contradicts max_tokens, its older name")
    has_new_name = body.max_completion_tokens is not None
    max_tokens = token_limit(body.max_completion_tokens if has_new_name else body.max_tokens)
    structured, structure_names = structure_of(body)
    sampling = _sampling(body, max_tokens, (body.top_logprobs or 0) if body.logprobs else None, structured)
    messages, options = read_messages(body.messages), chat_options(body, body.reasoning_effort)
    tools, tool_names, custom = ToolOptions(parallel_tool_calls=body.parallel_tool_calls), dict[str, str](), set[str]()
    if body.tools or body.tool_choice:
        read = read_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
        tools, tool_names, custom = read.options, read.names, read.custom
    request = request_of(body, request_id, sampling, messages=messages, chat=options, tools=tools)
    names = {**(CHAT_NAMES_NEW if has_new_name else CHAT_NAMES), **tool_names, **structure_names}
    _check_options(body, 1)
    echoed = _echoed(messages[-1], options) if body.echo else ""
    return OpenAIRequest(
        requests=(request,),
        names=(names,),
        stream=bool(body.stream),
        body=body,
        echoed=echoed,
        custom=frozenset(custom),
    )


def structure_of(body: StructureBody) -> RequestedStructure:
    """Return the structure that the body requests for the answer, and its fields' names. Raises ApiError."""
    return read_structure(body) if any(getattr(body, name) for name in STRUCTURE_FIELDS) else (None, {})


def token_limit(max_tokens: int | None) -> int | None:
    """Return the max tokens of an answer; -1 means no limit (None), as in other servers."""
    return None if max_tokens == -1 else max_tokens


def _echoed(last: ChatMessage, options: ChatOptions) -> str:
    """Return the text of the last message if the answer continues it or has its role, else ""."""
    return last.content if last.role == "assistant" or not options.begins_message else ""


def tokenize_request(raw: bytes) -> tuple[TokenizeBody, GenerateRequest]:
    """Parse the body of POST /tokenize. Raises ApiError."""
    body = parse(raw, TokenizeBody)
    if (body.prompt is None) is not given(body.messages):
        raise refused("prompt", "exactly one of prompt and messages is required")
    options = chat_options(body)
    if body.prompt is not None:
        return body, GenerateRequest(model=body.model, text=str(_require_nonempty(body.prompt, "prompt")), chat=options)
    messages, tools = read_messages(body.messages), read_tools(body.tools, Raw())
    return body, GenerateRequest(model=body.model, messages=messages, chat=options, tools=tools.options)


def read_prompts(raw: Raw, max_ids: int, name: str = "prompt", max_prompts: int = MAX_PROMPTS) -> dict[str, Prompt]:
    """Parse the field ``name`` of up to ``max_prompts`` prompts (a text, texts, ids, or lists of ids).

    Returns the prompts by the client's names, e.g. ``prompt[2]``. Raises ApiError; too many items are refused before
    they are parsed.
    """
    text = bytes(raw)
    list_start = _LIST.match(text)
    if list_start is None:
        return {name: _require_nonempty(str(parse_field(raw, str, name)), name)}
    # The first item's type is that of all items, so a list of mixed types is refused before it is parsed.
    first = list_start[1]
    if first == b'"':
        items = parse_field(raw, list[str], name)
    elif text.count(b",") >= MAX_PROMPT_IDS:
        raise refused(name, f"more than {MAX_PROMPT_IDS} items")
    elif first == b"[":
        if text.count(b"[") > max_prompts + 1:
            raise refused(name, f"more than {max_prompts} {name}s")
        lists = parse_field(raw, list[Raw], name)
        items = [read_ids(one, f"{name}[{n}]", max_ids) for n, one in enumerate(lists)]
    else:
        return {name: _require_nonempty(read_ids(raw, name, max_ids), name)}
    if len(items) > max_prompts:
        raise refused(name, f"{len(items)} {name}s; at most {max_prompts}")
    return {(field := f"{name}[{n}]"): _require_nonempty(item, field) for n, item in enumerate(items)}


def read_ids(raw: Raw, field: str, max_ids: int) -> tuple[int, ...]:
    """Parse a list of token ids. Raises ApiError; too many are refused before they are parsed."""
    check_wanted()
    if bytes(raw).count(b",") >= max_ids:
        raise from_pillion(too_long(bytes(raw).count(b",") + 1, field, max_ids), {})
    return tuple(parse_field(raw, list[Int], field))


def _require_nonempty(prompt: Prompt, field: str) -> Prompt:
    if not prompt:
        raise refused(field, "it is empty")
    return prompt


def read_messages(raw: Raw) -> tuple[ChatMessage, ...]:
    """Parse a conversation. The number of strings in the body, checked before, bounds its size. Raises ApiError."""
    messages: list[MessageBody] = parse_field(raw, list[MessageBody], "messages")
    if not messages:
        raise refused("messages", "at least one message is needed")
    if len(messages) > MAX_MESSAGES:
        raise refused("messages", f"more than {MAX_MESSAGES} messages")
    return tuple(_chat_messages(messages))


def _chat_messages(messages: Sequence[MessageBody]) -> Iterator[ChatMessage]:
    """Yield the messages of a conversation in the gateway's form. Raises ApiError."""
    last_user = max((n for n, one in enumerate(messages) if one.role == "user"), default=-1)
    unanswered: dict[str, str] = {}
    for n, message in enumerate(messages):
        check_wanted()
        role, content, path = _ROLES.get(message.role, message.role), message.content, f"messages[{n}]"
        if content is None and role not in ("assistant", "tool") and n == len(messages) - 1:
            raise refused(f"{path}.content", REQUIRED, "missing_required_parameter")
        text, thought, calls = "", "", tuple[ToolCall, ...]()
        if isinstance(content, list):
            read = read_content(content, role, f"{path}.content", is_new=n == last_user)
            for result in read.results:
                yield replace(result, name=unanswered.pop(result.tool_call_id, ""))
            if read.is_results:
                continue
            text, thought, calls = read.text, "\n".join(read.thoughts), tuple(read.calls)
        if message.tool_calls or message.function_call:
            calls += tuple(read_calls(message.tool_calls or (), message.function_call, path, f"call{n:03}"))
        unanswered.update((call.id, call.name) for call in calls)
        yield ChatMessage(
            role=role,
            content=text if isinstance(content, list) else content or message.refusal or "",
            tool_calls=calls,
            tool_call_id=_answered_call(message, unanswered) if role == "tool" else message.tool_call_id or "",
            name=message.name or "",
            reasoning=message.reasoning_content or message.reasoning or thought,
        )


def _answered_call(message: MessageBody, unanswered: dict[str, str]) -> str:
    """Return the id of the call that a tool result answers, and remove it from ``unanswered`` (id -> tool's name).

    A result without an id belongs to the first unanswered call of its name, or else to the first one.
    """
    call_id = message.tool_call_id or ""
    if not call_id:
        same_name = [one for one, name in unanswered.items() if message.name in (None, "", name)]
        call_id = next(iter([*same_name, *unanswered]), "")
    unanswered.pop(call_id, None)
    return call_id


def read_tools(raw: Raw, choice: Raw, parallel: bool | None = None) -> ParsedTools:
    """Parse tools and tool choice. Raises ApiError; too many bytes are refused before they are parsed."""
    return ParsedTools(_parse_bounded(raw, "tools") or (), _parse_bounded(choice, "tool_choice"), parallel)


def chat_options(body: ChatBody | TokenizeBody, reasoning_effort: str | None = None) -> ChatOptions:
    """Return the template options of a body; ``reasoning_effort`` becomes a template variable. Raises ApiError."""
    raw, field = body.chat_template_kwargs, "chat_template_kwargs"
    variables: list[tuple[str, Any, str]] = []
    if isinstance(body, ChatBody):
        if given(body.chat_template_args):
            if given(raw):
                raise refused("chat_template_args", "chat_template_kwargs, its other name, is also set; send one")
            raw, field = body.chat_template_args, "chat_template_args"
        thinking = body.thinking
        if isinstance(thinking, ThinkingSwitch):
            thinking = None if thinking.type == "adaptive" else thinking.type == "enabled"
        variables = [("enable_thinking", thinking, "thinking"), ("thinking", thinking, "thinking")]
        variables.append(("enable_thinking", body.enable_thinking, "enable_thinking"))
    variables.append(("reasoning_effort", reasoning_effort, "reasoning_effort"))
    return ChatOptions(
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        chat_template_kwargs=template_kwargs(raw, variables, field),
    )


def template_kwargs(
    raw: Raw, variables: Sequence[tuple[str, Any, str]] = (), field: str = "chat_template_kwargs"
) -> str:
    """Return further variables of the chat template, as JSON text; "" for none.

    Args:
        raw: the client's object of variables.
        variables: further ones: (name, value, client's field that sets it); a value of None sets nothing.
        field: the client's name of ``raw``.

    Raises ApiError if two fields set a variable to different values.
    """
    kwargs = _parse_bounded(raw, field) or {}
    for name, value, setter in variables:
        if value is not None:
            encoded = Raw(msgspec.json.encode(value))
            if bytes(kwargs.setdefault(name, encoded)) != bytes(encoded):
                raise refused(setter, f"another field sets the template's variable {name} to a different value")
    return msgspec.json.encode(kwargs).decode() if kwargs else ""


def read_stops(raw: Raw) -> tuple[str, ...]:
    """Parse stop strings: a string or a list. Raises ApiError."""
    stops = _parse_bounded(raw, "stop")
    return (stops,) if isinstance(stops, str) else tuple(stops or ())


def _sampling(
    body: CompletionBody | ChatBody,
    max_tokens: int | None,
    logprobs: int | None,
    structured: StructuredOutputs | None,
) -> SamplingParams:
    # These fields have the same names in SamplingParams.
    names = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "truncation_side")
    switches = {name: value for name in names if (value := getattr(body, name)) is not None}
    lists: dict[str, Any] = {}
    for name in ("stop_token_ids", "allowed_token_ids", "bad_words"):
        if given(raw := getattr(body, name)):
            lists[name] = tuple(_parse_bounded(raw, name))
    if lists.get("allowed_token_ids") == ():
        raise refused("allowed_token_ids", "it is empty, and an answer needs a token")
    return SamplingParams(
        **sampling_of(body, "completions"),
        **switches,
        **lists,
        max_tokens=max_tokens,
        logprobs=logprobs,
        stop=read_stops(body.stop) if body.stop else (),
        structured_outputs=structured,
        logit_bias=_parse_bounded(body.logit_bias, "logit_bias") or {},
    )


def sampling_of(body: msgspec.Struct, api: str) -> dict[str, Any]:
    """Return a body's sampling values by their names in SamplingParams."""
    return {name: getattr(body, name) for name, option in SAMPLING_OPTIONS.items() if api in option.apis}


def request_of(body: Any, request_id: str, sampling: SamplingParams, **prompt: Any) -> GenerateRequest:
    """Create the gateway's request from the fields that the bodies of all APIs share."""
    return GenerateRequest(
        model=body.model,
        sampling=sampling,
        cache_salt=body.cache_salt or "",
        request_id=request_id,
        priority=body.priority or 0,
        **prompt,
    )


def _check_options(body: CompletionBody | ChatBody, prompts: int) -> None:
    """Raise ApiError for options that an answer to this number of prompts does not support."""
    if body.stream and body.prompt_logprobs is not None:
        raise refused(
            "prompt_logprobs", "not available in a stream; send the request without stream", "unsupported_parameter"
        )
    if body.timings and prompts > 1:
        raise refused("timings", "needs a single prompt")
    if body.stream_options is not None and not body.stream:
        note_ignored("stream_options")


def read_metadata(raw: Raw) -> dict[str, str]:
    """Parse labels of a request, which are returned but have no effect. Raises ApiError."""
    labels: dict[str, str] = _parse_bounded(raw, "metadata") or {}
    oversized = any(len(name) > MAX_METADATA_NAME_CHARS or len(text) > MAX_LABEL_CHARS for name, text in labels.items())
    if oversized or len(labels) > MAX_METADATA_PAIRS:
        raise refused("metadata", _METADATA_BOUND)
    return labels


def _parse_bounded(raw: Raw, field: str) -> Any:
    """Parse a raw field; None if absent. Raises ApiError; JSON above its limit in _BOUNDS is refused unparsed."""
    if not given(raw):
        return None
    max_bytes, reason = _BOUNDS[field]
    if len(bytes(raw)) > max_bytes:
        raise refused(field, reason)
    return parse_field(raw, READ_LATER[field], field)
