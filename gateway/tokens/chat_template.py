"""Renders conversations to prompt text by the model's template, which runs in a process that can be killed."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from pillion.errors import FieldViolation, InvalidRequest
from pillion.gateway.boxed_process import BoxedProcess, BoxFailure, BoxLimits
from pillion.types import ChatMessage, ChatOptions

# About what a message has around its content.
MESSAGE_BYTES = 64
# Computing time of one rendering; a real template takes a millisecond.
RENDER_CPU_S = 2.0
# Wall-clock time of one rendering, for a machine that is very busy.
RENDER_WALL_S = 20.0
RENDER_MEMORY_BYTES = 512 * 2**20
MAX_RENDERED_CHARS = 8 * 2**20
MAX_WAITING_RENDERS = 1024
DEFAULT_OPTIONS = ChatOptions()
_HANDLER = Path(__file__).with_name("template_worker.py")


class ChatTemplate:
    """One model's chat template. ``specials`` are the special tokens' texts by name."""

    def __init__(self, source: str, specials: Mapping[str, str]) -> None:
        self._source = source
        setup = {
            "template": source,
            "variables": {**specials, "tools": None, "documents": None},
            "max_chars": MAX_RENDERED_CHARS,
        }
        limits = BoxLimits(
            cpu_s=RENDER_CPU_S,
            wall_s=RENDER_WALL_S,
            memory_bytes=RENDER_MEMORY_BYTES,
            max_waiting=MAX_WAITING_RENDERS,
            what="conversations wait to be rendered",
        )
        self._box = BoxedProcess(_HANDLER, setup, limits)

    async def render(self, messages: Sequence[ChatMessage], options: ChatOptions = DEFAULT_OPTIONS) -> str:
        """The prompt's text, up to where the answer begins. ``options`` have been checked.

        Raises:
            InvalidRequest: the model has no template, the template refuses the conversation, or it met a bound.
            Overloaded: too many conversations wait for it.
        """
        if not self._source:
            raise _violation("this model has no chat template; send text or token_ids")
        conversation = {
            "messages": messages,
            "add_generation_prompt": options.begins_message,
            "continue_final_message": options.continue_final_message,
            "kwargs": options.chat_template_kwargs,
        }
        try:
            size = sum(MESSAGE_BYTES + len(message.content) for message in messages)
            answer = await self._box.run(conversation, size)
        except BoxFailure as failure:
            answer = {"broken": str(failure)}
        if "text" in answer:
            return str(answer["text"])
        if "refused" in answer:
            raise _violation(f"the model's chat template refuses this conversation: {answer['refused']}")
        raise _violation(f"the model's chat template failed: {answer['broken']}")

    async def warm_up(self) -> None:
        """Starts the process, so that the first conversation does not wait for it."""
        with contextlib.suppress(InvalidRequest):
            await self.render((ChatMessage("user", "x"),))

    async def aclose(self) -> None:
        """Ends the process; the next conversation would start another one."""
        await self._box.aclose()


def _violation(description: str) -> InvalidRequest:
    return InvalidRequest.of(FieldViolation("messages", description))
