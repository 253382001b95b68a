"""Renders conversations to prompt text by the model's template, which runs in a process that can be killed."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pillion.errors import FieldViolation, InvalidRequest
from pillion.gateway.boxed_process import BoxedProcess, BoxFailure, BoxLimits
from pillion.gateway.tokens.client_marks import BREAKER
from pillion.gateway.tokens.tool_prompt import (
    channel_messages,
    introduction,
    knows_tools,
    message_bytes,
    reasoning_key,
    spelled_out,
    template_messages,
    template_tools,
)
from pillion.types import ChatMessage, ChatOptions, Tool

# One rendering may take this much computing time; a real template takes a millisecond.
RENDER_CPU_S = 2.0
# One rendering may take this much wall-clock time, on a machine that is very busy.
RENDER_WALL_S = 20.0
RENDER_MEMORY_BYTES = 512 * 2**20
MAX_RENDERED_CHARS = 8 * 2**20
MAX_WAITING_RENDERS = 1024
DEFAULT_OPTIONS = ChatOptions()
_HANDLER = Path(__file__).with_name("template_worker.py")


class ChatTemplate:
    """Renders conversations by one model's chat template.

    Args:
        source: the template's text; "" where the model has none.
        specials: the special tokens' texts by name.
        marks: the special tokens that a client's strings may not become; those that they spell come out broken, as
            client_marks.py reads them.
        spells_out: whether a template that has no place for tools gets them as text.
        in_channels: whether it writes messages in channels, one call in each.
        defaults: variables where a request gives no value, a JSON object or "".
    """

    def __init__(
        self,
        source: str,
        specials: Mapping[str, str],
        *,
        marks: Sequence[str] = (),
        spells_out: bool = False,
        in_channels: bool = False,
        defaults: str = "",
    ) -> None:
        self.defaults = defaults
        self._in_channels = in_channels
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
        """Returns the prompt's text for a conversation that was checked, up to where the answer begins.

        Raises:
            InvalidRequest: the model has no template, the template refuses the conversation, or it met a bound.
            Overloaded: too many conversations wait to be rendered.
        """
        if not self._source:
            raise _violation("this model has no chat template; send text or token_ids")
        told = ""
        if self._spells_out and (tools or any(one.tool_calls or one.tool_call_id for one in messages)):
            told = introduction(tools) if tools else ""
            messages, tools = spelled_out(messages, told), ()
        if tools and not self._knows_tools:
            text = "the model's chat template does not know tools"
            raise InvalidRequest.of(FieldViolation("tools.tools", text))
        conversation: dict[str, Any] = {
            "messages": channel_messages(messages)
            if self._in_channels
            else template_messages(messages, self._reasoning_key),
            "introduction": told,
            "tools": template_tools(tools, described=self._in_channels),
            "add_generation_prompt": options.begins_message,
            "continue_final_message": options.continue_final_message,
            "kwargs": options.chat_template_kwargs,
        }
        try:
            answer = await self._box.run(conversation, message_bytes(messages, tools))
        except BoxFailure as failure:
            answer = {"broken": str(failure)}
        if "text" in answer:
            return str(answer["text"])
        if "refused" in answer:
            raise _violation(f"the model's chat template refuses this conversation: {answer['refused']}")
        raise _violation(f"the model's chat template failed: {answer['broken']}")

    async def warm_up(self) -> None:
        """Starts the process that renders, so that the first conversation does not wait for it."""
        with contextlib.suppress(InvalidRequest):
            await self.render((ChatMessage("user", "x"),))

    async def aclose(self) -> None:
        """Ends the process that renders; the next conversation would start another one."""
        await self._box.aclose()


def _violation(description: str) -> InvalidRequest:
    return InvalidRequest.of(FieldViolation("messages", description))
