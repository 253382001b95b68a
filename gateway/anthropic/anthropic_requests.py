"""Conversion of Anthropic's request bodies to requests of the gateway.

One message may become several, since each tool result is a separate message; consecutive user messages are joined.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import msgspec
from msgspec import Raw

from pillion.gateway.anthropic.anthropic_fields import (
    AnthropicMessage,
    CacheControl,
    CountTokensBody,
    ImageBlock,
    MessagesBody,
    OtherBlock,
    ResultPart,
    TextBlock,
    Thinking,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from pillion.gateway.anthropic.signatures import signed_thoughts
from pillion.gateway.http_api.body_reading import REQUIRED, note_ignored, parse
from pillion.gateway.http_api.content_parts import read_calls
from pillion.gateway.http_api.gathered_messages import UNSEEN, GatheredMessages, replace_textless
from pillion.gateway.http_api.http_errors import refused
from pillion.gateway.http_api.json_objects import arguments_of, text_in
from pillion.gateway.http_api.model_calls import ParsedCall
from pillion.gateway.http_api.openai_requests import request_of, structure_of, template_kwargs, token_limit
from pillion.gateway.http_api.tool_reading import ParsedTools
from pillion.gateway.prefix_pins.breakpoints import Breakpoint
from pillion.types import (
    ChatMessage,
    ChatOptions,
    GenerateRequest,
    SamplingParams,
    ToolCall,
)

Body = TypeVar("Body", bound=CountTokensBody)

MAX_BREAKPOINTS = 4
# Claude Code starts each system prompt with a line that contains a hash of the request, which would defeat prefix
# caching.
BILLING_HEADER = "x-anthropic-billing-header:"
_TTLS_S = {None: 300, "5m": 300, "1h": 3600}
_NAMES: Mapping[str, str] = {
    "sampling.stop": "stop_sequences",
    "chat.chat_template_kwargs": "output_config.effort",
    "tools.tools": "tools",
    "tools.choice": "tool_choice",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesRequest(ParsedCall):
    """A parsed call of /v1/messages.

    Attributes:
        shows_thinking: whether thinking blocks contain their text.
        breakpoints: positions of cache_control: per TTL the last one, in prompt order.
    """

    shows_thinking: bool
    breakpoints: tuple[Breakpoint, ...] = ()


def messages_request(raw: bytes, request_id: str) -> MessagesRequest:
    """Parse the body of POST /v1/messages, without the billing lines of system texts. Raises ApiError."""
    body = _without_billing(parse(raw, MessagesBody))
    thinking = body.thinking or Thinking("adaptive")
    structured, structure_names = structure_of(body)
    stops = body.stop_sequences
    sampling = SamplingParams(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        max_tokens=token_limit(body.max_tokens),
        stop=(stops,) if isinstance(stops, str) else tuple(stops or ()),
        ignore_eos=bool(body.ignore_eos),
        structured_outputs=structured,
    )
    conversation = _BlockConversation(body)
    request = request_of(
        body,
        request_id,
        sampling,
        messages=conversation.messages,
        chat=conversation.options,
        tools=conversation.tools,
    )
    return MessagesRequest(
        requests=(request,),
        names=({**conversation.names, **structure_names},),
        stream=bool(body.stream),
        shows_thinking=thinking.display != "omitted",
        breakpoints=_breakpoints(body),
    )


def count_tokens_request(raw: bytes) -> tuple[GenerateRequest, Mapping[str, str]]:
    """Parse the body of POST /v1/messages/count_tokens, without billing lines.

    Returns the request, and the client's names of its fields. Raises ApiError.
    """
    body = _without_billing(parse(raw, CountTokensBody))
    _checked_marks(body)
    conversation = _BlockConversation(body)
    request = GenerateRequest(
        model=body.model, messages=conversation.messages, chat=conversation.options, tools=conversation.tools
    )
    return request, conversation.names


def _without_billing(body: Body) -> Body:
    """Remove leading lines that start with BILLING_HEADER from the system texts, and blocks that are empty then."""
    if not body.system:
        return body
    if isinstance(body.system, str):
        kept: str | list[TextBlock] = _after_billing(body.system)
    else:
        texts = [(block, _after_billing(block.text)) for block in body.system]
        kept = [
            block if text == block.text else msgspec.structs.replace(block, text=text)
            for block, text in texts
            if text or not block.text
        ]
    if kept == body.system:
        return body
    note_ignored("system.line")
    return msgspec.structs.replace(body, system=kept)


def _after_billing(text: str) -> str:
    """Return a text without the lines at its start that begin with BILLING_HEADER."""
    start = 0
    while text.startswith(BILLING_HEADER, start):
        start = (text.find("\n", start) + 1) or len(text)
    return text[start:]


class _BlockConversation:
    """A call's body, converted to the gateway's types; without ``whole``, its messages only. Raises ApiError.

    Attributes:
        messages, options, tools: for a GenerateRequest.
        names: the gateway's names of fields -> the client's.
    """

    def __init__(self, body: CountTokensBody, *, whole: bool = True) -> None:
        if not body.messages:
            raise refused("messages", "at least one message is needed")
        self.names = dict(_NAMES)
        gathered = GatheredMessages("user", "messages", self.names)
        self._called: dict[str, str] = {}
        if body.system:
            gathered.add(ChatMessage("system", _text(body.system, "system")), "system")
        last = len(body.messages) - 1
        if whole and body.messages[last].role == "user" and body.messages[last].content == []:
            raise refused(f"messages[{last}].content", "the last message of the user is empty")
        # Be lenient with earlier turns, which clients resend: only messages after the last answer are new.
        last_old = max((n for n, one in enumerate(body.messages) if one.role == "assistant"), default=-1)
        last_old = last_old if whole else last
        for n, message in enumerate(body.messages):
            for converted in self._convert(message, f"messages[{n}]", is_new=n > last_old):
                gathered.add(converted, f"messages[{n}]")
        self.messages = gathered.joined(_join_users)
        if not whole:
            return
        self.options = _options(body)
        read = ParsedTools(body.tools or (), body.tool_choice, body.parallel_tool_calls)
        self.tools = read.options
        self.names |= read.names

    def _convert(self, message: AnthropicMessage, path: str, is_new: bool) -> Iterator[ChatMessage]:
        """Yield the gateway's messages for one of the client's. If it is new, a block without text is an error."""
        role = "system" if message.role == "developer" else message.role
        if role == "tool":
            yield self._tool_message(message, path)
            return
        calls = [*read_calls(message.tool_calls or (), None, path, f"{path}.tool_calls")]
        self._called.update((call.id, call.name) for call in calls)
        if isinstance(message.content, str):
            yield ChatMessage(role, message.content, tuple(calls))
            return
        texts: list[str] = []
        thoughts: list[str] = []
        for n, block in enumerate(message.content):
            where = f"{path}.content[{n}]"
            match block:
                case TextBlock():
                    texts.append(block.text)
                case OtherBlock():
                    texts += _other_texts(block, f"{path}.content", n, role, is_new=is_new)
                case ImageBlock() if role == "assistant":
                    pass
                case ThinkingBlock() if role == "assistant":
                    thoughts.append(_thoughts(block, where))
                case ToolUseBlock() if role == "assistant":
                    calls.append(ToolCall(block.id, block.name, arguments_of(block.input)))
                    self._called[block.id] = block.name
                case ToolResultBlock() if role == "user":
                    if texts:
                        yield ChatMessage(role, "\n".join(texts))
                        texts.clear()
                    yield self._result(block, f"{where}.content")
                case ImageBlock():
                    raise refused(f"{where}.type", "'image' is not supported here", "unsupported_value")
                case _:
                    raise refused(f"{where}.type", f"a message of role {role} has no such block")
        if texts or thoughts or calls or not message.content:
            yield ChatMessage(role, "\n".join(texts), tuple(calls), reasoning="\n".join(thoughts))

    def _tool_message(self, message: AnthropicMessage, path: str) -> ChatMessage:
        """Convert a tool result that came as a message of role "tool"."""
        if message.tool_call_id is None:
            raise refused(f"{path}.tool_call_id", REQUIRED, "missing_required_parameter")
        content = message.content
        parts = content if isinstance(content, str) else [part for part in content if isinstance(part, ResultPart)]
        name = self._called.get(message.tool_call_id, "")
        return ChatMessage("tool", _text(parts, f"{path}.content"), tool_call_id=message.tool_call_id, name=name)

    def _result(self, block: ToolResultBlock, path: str) -> ChatMessage:
        text = ("Error: " if block.is_error else "") + _text(block.content or "", path)
        name = self._called.get(block.tool_use_id, "")
        return ChatMessage("tool", text, tool_call_id=block.tool_use_id, name=name)


def _other_texts(block: OtherBlock, path: str, number: int, role: str, *, is_new: bool = False) -> list[str]:
    """Return the texts of a block of an unknown type, number ``number`` of the content ``path``. Raises ApiError for a
    new block of a user without text."""
    text = next(filter(None, map(text_in, (block.text, block.content, block.source, block.tool_name))), "")
    return [text] if text else replace_textless(block.sent_type, path, number, role, is_media=False, is_new=is_new)


def _thoughts(block: ThinkingBlock, path: str) -> str:
    """Return the text of a thinking block, decoded from its signature if it was omitted. Raises ApiError."""
    try:
        signed = None if block.thinking else signed_thoughts(block.signature)
    except ValueError:
        raise refused(f"{path}.signature", "the signature was changed; send thinking blocks back unchanged") from None
    if signed is None and block.signature:
        note_ignored(f"{path}.signature")
    return block.thinking or signed or ""


def _join_users(messages: Sequence[ChatMessage]) -> ChatMessage:
    """Join consecutive messages of the user."""
    return ChatMessage("user", "\n".join(message.content for message in messages))


def _breakpoints(body: CountTokensBody) -> tuple[Breakpoint, ...]:
    """Return the last breakpoint, preceded by the last one with a longer TTL, if any. Raises ApiError for too many."""
    chosen: list[Breakpoint] = []
    for mark, truncated in reversed(_checked_marks(body)):
        ttl_s = _TTLS_S[mark.ttl]
        if not chosen or ttl_s > chosen[-1].ttl_s:
            messages = None if truncated is None else _BlockConversation(truncated, whole=False).messages
            chosen.append(Breakpoint(messages, ttl_s))
    return tuple(reversed(chosen))


def _checked_marks(body: CountTokensBody) -> list[tuple[CacheControl, CountTokensBody | None]]:
    """Return all results of :func:`_marks`. Raises ApiError for more than MAX_BREAKPOINTS."""
    # Each one copies the body before it, so stop at the first one above the limit.
    marks = list(islice(_marks(body), MAX_BREAKPOINTS + 1))
    if len(marks) > MAX_BREAKPOINTS:
        raise refused("cache_control", f"too many breakpoints; at most {MAX_BREAKPOINTS} are possible")
    return marks


def _marks(body: CountTokensBody) -> Iterator[tuple[CacheControl, CountTokensBody | None]]:
    """Yield each cache_control in prompt order, with the body truncated after it, or None for the whole body."""
    replace = msgspec.structs.replace
    # Most templates require a user message.
    start = replace(body, messages=[AnthropicMessage("user", ".")])
    for tool in body.tools or ():
        if tool.cache_control is not None:
            yield tool.cache_control, start
    for n, block in enumerate(body.system if isinstance(body.system, list) else ()):
        if block.cache_control is not None:
            assert isinstance(body.system, list)
            yield block.cache_control, replace(start, system=body.system[: n + 1])
    for n, message in enumerate(body.messages):
        for m, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if not isinstance(part, ThinkingBlock) and part.cache_control is not None:
                last = replace(message, content=message.content[: m + 1])
                yield part.cache_control, replace(body, messages=[*body.messages[:n], last])
    if body.cache_control is not None:
        yield body.cache_control, None


def _text(content: str | Sequence[ResultPart], path: str) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for n, part in enumerate(content):
        match part:
            case TextBlock():
                texts.append(part.text)
            case OtherBlock():
                texts += _other_texts(part, path, n, "tool")
            case ImageBlock():
                texts.append(UNSEEN)
    return "\n".join(texts)


def _options(body: CountTokensBody) -> ChatOptions:
    """Return the template options of a conversation."""
    last, thinking = body.messages[-1], None
    calls = [block for block in last.content if isinstance(block, ToolUseBlock)] or last.tool_calls
    if calls:
        text = "an answer cannot be continued after tool calls; send their results"
        raise refused(f"messages[{len(body.messages) - 1}]", text)
    if body.thinking is not None and body.thinking.type != "adaptive":
        # Templates use one of these two variable names, or neither.
        thinking = body.thinking.type == "enabled"
    effort = None if body.output_config is None else body.output_config.effort
    variables: list[tuple[str, object, str]] = [
        (name, thinking, "thinking") for name in ("enable_thinking", "thinking")
    ]
    variables += [("reasoning_effort", effort, "output_config.effort")]
    return ChatOptions(
        continue_final_message=last.role == "assistant", chat_template_kwargs=template_kwargs(Raw(), variables)
    )
