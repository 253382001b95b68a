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
from pillion.gateway.http_api.structure_reading import ASKING, RequestedStructure, read_structure
from pillion.gateway.http_api.tool_reading import ToolsRead
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
# Field -> max bytes to parse, and the error above. JSON needs at most six bytes per character, and a number has at most
# twenty digits.
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
# Fields with the same names in SamplingParams; lists are parsed in the second step.
_SWITCHES = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "truncation_side")
_LISTS = ("stop_token_ids", "allowed_token_ids", "bad_words")

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIRequest(ParsedCall):
    """A parsed call of either endpoint.

    Attributes:
        echoed: last message of a conversation that each answer starts with; "" for none.
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


def completion_request(raw: bytes, request_id: str, most_ids: int = MAX_PROMPT_IDS) -> OpenAIRequest:
    """Parse the body of POST /v1/completions; a prompt of more than ``most_ids`` ids is refused before it is parsed.
    Raises ApiError."""
    body = parse(raw, CompletionBody)
    if body.truncate_prompt_tokens is not None:
        most_ids = MAX_PROMPT_IDS
    most = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else limited(body.max_tokens)
    if body.min_tokens is not None and body.max_tokens is None:
        most = max(DEFAULT_COMPLETION_TOKENS, body.min_tokens)
    structured, structure_names = structure_of(body)
    sampling = _sampling(body, most, body.logprobs, structured)
    if body.echo and body.logprobs is not None:
        sampling = replace(sampling, prompt_logprobs=max(body.logprobs, body.prompt_logprobs or 0))
    prompts = read_prompts(body.prompt, most_ids)
    if len(prompts) * max(body.n or 1, body.best_of or 1) > MAX_CALL_ANSWERS:
        raise refused("n", f"more than {MAX_CALL_ANSWERS} answers to {len(prompts)} prompts")
    given_as = (("text" if isinstance(prompt, str) else "token_ids", prompt) for prompt in prompts.values())
    requests = tuple(request_of(body, request_id, sampling, **{name: prompt}) for name, prompt in given_as)
    scores = {} if body.prompt_logprobs is not None else {"sampling.prompt_logprobs": "logprobs"}
    names = tuple({"text": field, "token_ids": field, **scores, **structure_names} for field in prompts)
    _check_options(body, len(requests))
    return OpenAIRequest(requests=requests, names=names, stream=bool(body.stream), body=body)


def chat_request(raw: bytes, request_id: str) -> OpenAIRequest:
    """Parse the body of POST /v1/chat/completions. Raises ApiError."""
    body = parse(raw, ChatBody)
    if body.top_logprobs and not body.logprobs:
        raise refused("top_logprobs", "needs logprobs: true")
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise refused("max_completion_tokens", "contradicts max_tokens, its older name")
    newer = body.max_completion_tokens is not None
    most = limited(body.max_completion_tokens if newer else body.max_tokens)
    structured, structure_names = structure_of(body)
    sampling = _sampling(body, most, (body.top_logprobs or 0) if body.logprobs else None, structured)
    messages, options = read_messages(body.messages), chat_options(body, body.reasoning_effort)
    tools, tool_names, custom = ToolOptions(parallel_tool_calls=body.parallel_tool_calls), dict[str, str](), set[str]()
    if body.tools or body.tool_choice:
        read = read_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
        tools, tool_names, custom = read.options, read.names, read.custom
    request = request_of(body, request_id, sampling, messages=messages, chat=options, tools=tools)
    names = {**(CHAT_NAMES_NEW if newer else CHAT_NAMES), **tool_names, **structure_names}
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
    """Return the structure that the answer must have. Raises ApiError."""
    return read_structure(body) if any(getattr(body, name) for name in ASKING) else (None, {})


def limited(max_tokens: int | None) -> int | None:
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
        return body, GenerateRequest(model=body.model, text=str(_filled(body.prompt, "prompt")), chat=options)
    messages, tools = read_messages(body.messages), read_tools(body.tools, Raw())
    return body, GenerateRequest(model=body.model, messages=messages, chat=options, tools=tools.options)


def read_prompts(raw: Raw, most_ids: int, name: str = "prompt", most: int = MAX_PROMPTS) -> dict[str, Prompt]:
    """Parse the field ``name`` of up to ``most`` prompts (a text, texts, ids, or lists of ids).

    Returns the prompts by their fields' names. Raises ApiError; too many items are refused before they are parsed.
    """
    text = bytes(raw)
    begins = _LIST.match(text)
    if begins is None:
        return {name: _filled(str(parse_field(raw, str, name)), name)}
    # The first item's type is that of all items, so a list of mixed types is refused before it is parsed.
    first = begins[1]
    if first == b'"':
        items = parse_field(raw, list[str], name)
    elif text.count(b",") >= MAX_PROMPT_IDS:
        raise refused(name, f"more than {MAX_PROMPT_IDS} items")
    elif first == b"[":
        if text.count(b"[") > most + 1:
            raise refused(name, f"more than {most} {name}s")
        lists = parse_field(raw, list[Raw], name)
        items = [read_ids(one, f"{name}[{n}]", most_ids) for n, one in enumerate(lists)]
    else:
        return {name: _filled(read_ids(raw, name, most_ids), name)}
    if len(items) > most:
        raise refused(name, f"{len(items)} {name}s; at most {most}")
    return {(field := f"{name}[{n}]"): _filled(item, field) for n, item in enumerate(items)}


def read_ids(raw: Raw, field: str, most_ids: int) -> tuple[int, ...]:
    """Parse a list of token ids. Raises ApiError; too many are refused before they are parsed."""
    check_wanted()
    if bytes(raw).count(b",") >= most_ids:
        raise from_pillion(too_long(bytes(raw).count(b",") + 1, field, most_ids), {})
    return tuple(parse_field(raw, list[Int], field))


def _filled(prompt: Prompt, field: str) -> Prompt:
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
    """Return the id of the call that a result answers, and remove it from ``unanswered``.

    A result without an id belongs to the first unanswered call of its name, or else to the first one.
    """
    found = message.tool_call_id or ""
    if not found:
        names = [one for one, name in unanswered.items() if message.name in (None, "", name)]
        found = next(iter([*names, *unanswered]), "")
    unanswered.pop(found, None)
    return found


def read_tools(raw: Raw, choice: Raw, parallel: bool | None = None) -> ToolsRead:
    """Parse tools and tool choice. Raises ApiError; too many bytes are refused before they are parsed."""
    return ToolsRead(_bounded(raw, "tools") or (), _bounded(choice, "tool_choice"), parallel)


def chat_options(body: ChatBody | TokenizeBody, reasoning_effort: str | None = None) -> ChatOptions:
    """Return the template options of a body; ``reasoning_effort`` is one more variable. Raises ApiError."""
    raw, field = body.chat_template_kwargs, "chat_template_kwargs"
    wanted: list[tuple[str, Any, str]] = []
    if isinstance(body, ChatBody):
        if given(body.chat_template_args):
            if given(raw):
                raise refused("chat_template_args", "chat_template_kwargs, its other name, is also set; send one")
            raw, field = body.chat_template_args, "chat_template_args"
        thinks = body.thinking
        if isinstance(thinks, ThinkingSwitch):
            thinks = None if thinks.type == "adaptive" else thinks.type == "enabled"
        wanted = [("enable_thinking", thinks, "thinking"), ("thinking", thinks, "thinking")]
        wanted.append(("enable_thinking", body.enable_thinking, "enable_thinking"))
    wanted.append(("reasoning_effort", reasoning_effort, "reasoning_effort"))
    return ChatOptions(
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        chat_template_kwargs=template_kwargs(raw, wanted, field),
    )


def template_kwargs(raw: Raw, wanted: Sequence[tuple[str, Any, str]] = (), field: str = "chat_template_kwargs") -> str:
    """Return further variables of the chat template, as JSON text; "" for none.

    Args:
        raw: an object with variables.
        wanted: (variable, value, client's field that sets it); a value of None sets nothing.
        field: the client's name of ``raw``.

    Raises ApiError.
    """
    kwargs = _bounded(raw, field) or {}
    for name, value, setter in wanted:
        if value is not None:
            encoded = Raw(msgspec.json.encode(value))
            if bytes(kwargs.setdefault(name, encoded)) != bytes(encoded):
                raise refused(setter, f"another field sets the template's variable {name} to a different value")
    return msgspec.json.encode(kwargs).decode() if kwargs else ""


def read_stops(raw: Raw) -> tuple[str, ...]:
    """Parse stop strings: one or a list. Raises ApiError."""
    stops = _bounded(raw, "stop")
    return (stops,) if isinstance(stops, str) else tuple(stops or ())


def _sampling(
    body: CompletionBody | ChatBody,
    max_tokens: int | None,
    logprobs: int | None,
    structured: StructuredOutputs | None,
) -> SamplingParams:
    switches = {name: value for name in _SWITCHES if (value := getattr(body, name)) is not None}
    lists: dict[str, Any] = {name: tuple(_bounded(raw, name)) for name in _LISTS if given(raw := getattr(body, name))}
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
        logit_bias=_bounded(body.logit_bias, "logit_bias") or {},
    )


def sampling_of(body: msgspec.Struct, api: str) -> dict[str, Any]:
    """Return a body's sampling values by their names in SamplingParams."""
    return {name: getattr(body, name) for name, one in SAMPLING_OPTIONS.items() if api in one.apis}


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
    labels: dict[str, str] = _bounded(raw, "metadata") or {}
    oversized = any(len(one) > MAX_METADATA_NAME_CHARS or len(labels[one]) > MAX_LABEL_CHARS for one in labels)
    if oversized or len(labels) > MAX_METADATA_PAIRS:
        raise refused("metadata", _METADATA_BOUND)
    return labels


def _bounded(raw: Raw, field: str) -> Any:
    """Parse a raw field, None if absent; a field of too many bytes is refused before it is parsed."""
    if not given(raw):
        return None
    most_bytes, bound = _BOUNDS[field]
    if len(bytes(raw)) > most_bytes:
        raise refused(field, bound)
    return parse_field(raw, READ_LATER[field], field)
