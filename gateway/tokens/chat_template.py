"""Renders conversations to prompts by the model's chat template, in a process that can be killed. Converts messages and
tools to the form that transformers gives to templates.

If the template does not support tools, they are inserted as text, in the words of Hermes' and Qwen's templates.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Raw

from pillion.errors import FieldViolation, InvalidRequest
from pillion.gateway.boxed_process import BoxedProcess, BoxFailure, BoxLimits
from pillion.gateway.request.validation import conversation_bytes
from pillion.gateway.tokens.client_marks import BREAKER
from pillion.types import ChatMessage, ChatOptions, Tool

RENDER_CPU_S = 2.0
RENDER_WALL_S = 20.0
RENDER_MEMORY_BYTES = 512 * 2**20
MAX_RENDERED_CHARS = 8 * 2**20
MAX_WAITING_RENDERS = 1024
DEFAULT_OPTIONS = ChatOptions()
_HANDLER = Path(__file__).with_name("template_worker.py")


class ChatTemplate:
    """Renderer of one model's chat template.

    Args:
        source: the template's text; "" if the model has none.
        specials: texts of the special tokens, by name.
        marks: texts of special tokens that a client's strings must not become; in these, the prompt has them broken by
            BREAKER (client_marks.py).
        spells_out: whether tools are inserted as text if the template does not support them.
        spelling: how calls are written into content if the template does not render them, see
            :func:`pillion.gateway.formats.tool_formats.spelling`.
        defaults: default variables, a JSON object or "".
    """

    def __init__(
        self,
        source: str,
        specials: Mapping[str, str],
        *,
        marks: Sequence[str] = (),
        spells_out: bool = False,
        spelling: tuple[str, str, str] = ("", "", "object"),
        defaults: str = "",
    ) -> None:
        self.defaults = defaults
        self._source = source
        self._knows_tools = knows_tools(source)
        self._reasoning_key = reasoning_key(source)
        self._spells_out = spells_out and not self._knows_tools
        setup = {
            "template": source,
            "variables": {**specials, "documents": None},
            "defaults": defaults,
            "max_chars": MAX_RENDERED_CHARS,
            "marks": marks,
            "breaker": BREAKER,
            "spelling": spelling,
        }
        limits = BoxLimits(
            cpu_s=RENDER_CPU_S,
            wall_s=RENDER_WALL_S,
            memory_bytes=RENDER_MEMORY_BYTES,
            max_waiting=MAX_WAITING_RENDERS,
            what="conversations wait to be rendered",
        )
        self._box = BoxedProcess(_HANDLER, setup, limits)

    async def render(
        self, messages: Sequence[ChatMessage], options: ChatOptions = DEFAULT_OPTIONS, tools: Sequence[Tool] = ()
    ) -> str:
        """Return the prompt of a validated conversation, up to where the answer begins.

        Raises:
            InvalidRequest: there is no template, it refuses the conversation, or it exceeded a limit.
            Overloaded: too many conversations wait to be rendered.
        """
        if not self._source:
            raise _violation("this model has no chat template; send text or token_ids")
        if self._spells_out and (tools or any(one.tool_calls or one.tool_call_id for one in messages)):
            messages, tools = spelled_out(messages, introduction(tools) if tools else ""), ()
        if tools and not self._knows_tools:
            text = "the model's chat template does not support tools"
            raise InvalidRequest.of(FieldViolation("tools.tools", text))
        conversation: dict[str, Any] = {
            "messages": template_messages(messages, self._reasoning_key),
            "tools": template_tools(tools),
            "add_generation_prompt": options.begins_message,
            "continue_final_message": options.continue_final_message,
            "kwargs": options.chat_template_kwargs,
        }
        try:
            answer = await self._box.run(conversation, conversation_bytes(messages, tools))
        except BoxFailure as failure:
            answer = {"broken": str(failure)}
        if "text" in answer:
            return str(answer["text"])
        if "refused" in answer:
            raise _violation(f"the model's chat template refuses this conversation: {answer['refused']}")
        raise _violation(f"the model's chat template failed: {answer['broken']}")

    async def warm_up(self) -> None:
        """Start the rendering process, so that the first conversation does not wait for it."""
        with contextlib.suppress(InvalidRequest):
            await self.render((ChatMessage("user", "x"),))

    async def aclose(self) -> None:
        """End the rendering process; another conversation would start a new one."""
        await self._box.aclose()


def _violation(description: str) -> InvalidRequest:
    return InvalidRequest.of(FieldViolation("messages", description))


_INTRODUCTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
# A custom tool is a function with the single argument INPUT, in whose schema GRAMMAR has the grammar of the text, for
# the model and for the grammar of calls (gateway/grammars/tool_pieces.py).
INPUT, GRAMMAR = "input", "x-grammar"
# Max characters of calls' arguments per conversation that are reformatted, which takes up to 15 ms on the event loop.
MAX_REWRITTEN_CHARS = 2**20
_TOOLS = re.compile(r"\btools\b")
_REASONING = {key: re.compile(rf"""\.{key}\b|(["']){key}\1""") for key in ("reasoning", "thinking")}


def knows_tools(template: str) -> bool:
    """Return whether a chat template supports tools."""
    return _TOOLS.search(template) is not None


def reasoning_key(template: str) -> str:
    """Return the key under which a chat template reads earlier reasoning."""
    if "reasoning_content" not in template:
        for key, pattern in _REASONING.items():
            if pattern.search(template):
                return key
    return "reasoning_content"


def template_messages(messages: Sequence[ChatMessage], reasoning: str = "reasoning_content") -> list[dict[str, Any]]:
    """Return messages in transformers' form, without empty fields, because templates test for their presence.

    Arguments of calls are objects, and results have the tool's name. ``reasoning`` is the key of reasoning.
    """
    names: dict[str, str] = {}
    return [_message(message, names, reasoning) for message in messages]


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    """Return tools in OpenAI's form; None without tools."""
    return [{"type": "function", "function": _function(tool)} for tool in tools] or None


def introduction(tools: Sequence[Tool]) -> str:
    """Return the text that introduces tools to a model whose template does not."""
    return _INTRODUCTION.format(
        tools="\n".join(msgspec.json.encode(one).decode() for one in template_tools(tools) or ())
    )


def spelled_out(messages: Sequence[ChatMessage], tool_text: str) -> list[ChatMessage]:
    """Return a conversation with tools, calls and results as text, for a template that does not support them.

    ``tool_text``, which introduces the tools, is appended to the system message if there is one, else put before the
    first message, since some templates have no system role. Results become messages of the user, joined with the user's
    next message: many templates require that user and assistant alternate.
    """
    rewritten: list[ChatMessage] = []
    after_result, left = False, MAX_REWRITTEN_CHARS
    for message in messages:
        calls = []
        for call in message.tool_calls:
            left -= len(call.arguments)
            calls.append(_spelled_call(call.name, _as_written(call.arguments) if left >= 0 else call.arguments))
        content = "\n".join(filter(None, (message.content, *calls)))
        if message.role == "tool":
            content = f"<tool_response>\n{message.content}\n</tool_response>"
        role = "user" if message.role == "tool" else message.role
        if after_result and role == "user":
            rewritten[-1] = ChatMessage("user", f"{rewritten[-1].content}\n{content}")
        else:
            rewritten.append(replace(message, role=role, content=content, tool_calls=(), tool_call_id="", name=""))
        after_result = message.role == "tool" or (after_result and role == "user")
    if tool_text:
        first = rewritten[0].content
        texts = (first, tool_text) if rewritten[0].role in ("system", "developer") else (tool_text, first)
        rewritten[0] = replace(rewritten[0], content="\n\n".join(filter(None, texts)))
    return rewritten


def _spelled_call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments or "{}"}}}\n</tool_call>'


def _as_written(arguments: str) -> str:
    """Return a call's arguments with the white space that models write: a client's would differ from the cached
    prefix."""
    try:
        return msgspec.json.format(arguments, indent=0)
    except (ValueError, RecursionError):
        return arguments


def _message(message: ChatMessage, names: dict[str, str], reasoning: str) -> dict[str, Any]:
    rendered: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        rendered[reasoning] = message.reasoning
    if message.tool_calls:
        rendered["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": Raw((call.arguments or "{}").encode())},
            }
            for call in message.tool_calls
        ]
        names.update((call.id, call.name) for call in message.tool_calls)
    if message.tool_call_id:
        rendered["tool_call_id"] = message.tool_call_id
    name = message.name or names.get(message.tool_call_id)
    return rendered | {"name": name} if name else rendered


def _function(tool: Tool) -> dict[str, Any]:
    rendered: dict[str, Any] = {"name": tool.name}
    if tool.description:
        rendered["description"] = tool.description
    if tool.parameters:
        rendered["parameters"] = Raw(tool.parameters.encode())
    return rendered
