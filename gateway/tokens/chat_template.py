"""Renders conversations to prompt text by the model's template, which runs in a process that can be killed.

no process --render--> idle --request--> busy --answer--> idle
                         ^                 |
                         |                 +-- out of time, memory or life --> killed, no process
                         +-- the next request starts a fresh one
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pillion.errors import FieldViolation, InvalidRequest, Overloaded
from pillion.gateway.formats.tool_prompt import message_bytes, template_messages, template_tools
from pillion.gateway.tokens.tokenizer import LOOP_BYTES
from pillion.types import ChatMessage, ChatOptions, Tool

T = TypeVar("T")

# Computing time of one rendering; a real template takes a millisecond.
RENDER_CPU_S = 2.0
# Wall-clock time of one rendering, for a machine that is very busy.
RENDER_WALL_S = 20.0
RENDER_MEMORY_BYTES = 512 * 2**20
MAX_RENDERED_CHARS = 8 * 2**20
MAX_WAITING_RENDERS = 1024
DEFAULT_OPTIONS = ChatOptions()
_TOOLS = re.compile(r"\btools\b")
# The variables that a Python with libraries of its own needs to start, and those of strftime_now's time zone.
_ENVIRONMENT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ", "TZDIR")
_WORKER = Path(__file__).with_name("template_worker.py")


class ChatTemplate:
    """One model's chat template. ``specials`` are the special tokens' texts by name."""

    def __init__(self, source: str, specials: Mapping[str, str]) -> None:
        self._source = source
        self._specials = dict(specials)
        self._process: Process | None = None
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def render(
        self, messages: Sequence[ChatMessage], options: ChatOptions = DEFAULT_OPTIONS, tools: Sequence[Tool] = ()
    ) -> str:
        """The prompt's text, up to where the answer begins. Everything has been checked.

        Raises:
            InvalidRequest: the model has no template, the template refuses the conversation, or it met a bound.
            Overloaded: too many conversations wait for it.
        """
        if not self._source:
            raise _violation("this model has no chat template; send text or token_ids")
        if tools and not self.knows_tools:
            text = "the model's chat template does not know tools"
            raise InvalidRequest.of(FieldViolation("tools.tools", text))
        if self._waiting >= MAX_WAITING_RENDERS:
            raise Overloaded(f"{MAX_WAITING_RENDERS} conversations wait to be rendered", retry_after_ms=1000)
        self._waiting += 1
        try:
            async with self._turn:
                answer = await self._render(
                    {
                        "messages": messages,
                        "tools": tools,
                        "add_generation_prompt": options.begins_message,
                        "continue_final_message": options.continue_final_message,
                        "kwargs": options.chat_template_kwargs,
                    }
                )
        finally:
            self._waiting -= 1
        if "text" in answer:
            return str(answer["text"])
        if "refused" in answer:
            raise _violation(f"the model's chat template refuses this conversation: {answer['refused']}")
        raise _violation(f"the model's chat template failed: {answer['broken']}")

    @property
    def knows_tools(self) -> bool:
        """Whether the template has a place for tools."""
        return _TOOLS.search(self._source) is not None

    async def warm_up(self) -> None:
        """Starts the process, so that the first conversation does not wait for it."""
        with contextlib.suppress(InvalidRequest):
            await self.render((ChatMessage("user", "x"),))

    async def _render(self, conversation: dict[str, Any]) -> dict[str, Any]:
        """Sends one conversation to the process, which is killed after a failure or where the caller was cancelled."""
        answered = False
        try:
            async with asyncio.timeout(RENDER_WALL_S):
                if self._process is None:
                    self._process = await self._start()
                answer = await _exchange(self._process, conversation)
            answered = True
        except TimeoutError:
            return {"broken": f"it took more than {RENDER_WALL_S:g} s"}
        except (asyncio.IncompleteReadError, ConnectionError):
            return {"broken": f"it took more than {RENDER_CPU_S:g} s of computing or too much memory"}
        finally:
            if not answered:
                await self.aclose()
        return answer

    async def _start(self) -> Process:
        # -I: the process sees the installed packages, not the folder it was started from. It inherits neither keys and
        # addresses in the environment nor descriptors.
        env = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", str(_WORKER), stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=env, close_fds=True
        )
        setup = {
            "template": self._source,
            "variables": {**self._specials, "documents": None},
            "max_chars": MAX_RENDERED_CHARS,
            "cpu_s": RENDER_CPU_S,
            "memory_bytes": RENDER_MEMORY_BYTES,
        }
        _send(process, msgspec.json.encode(setup))
        return process

    async def aclose(self) -> None:
        """Ends the process; the next conversation would start another one."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        if process.stdin is not None:
            process.stdin.close()
        await process.wait()


def _violation(description: str) -> InvalidRequest:
    return InvalidRequest.of(FieldViolation("messages", description))


def _send(process: Process, data: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(len(data).to_bytes(4, "big") + data)


async def _exchange(process: Process, conversation: dict[str, Any]) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    size = message_bytes(conversation["messages"], conversation["tools"])
    _send(process, await _off_loop(size, _encoded, conversation))
    await process.stdin.drain()
    head = await process.stdout.readexactly(4)
    answer = await process.stdout.readexactly(int.from_bytes(head, "big"))
    return dict(await _off_loop(len(answer), msgspec.json.decode, answer))


def _encoded(conversation: dict[str, Any]) -> bytes:
    messages, tools = template_messages(conversation["messages"]), template_tools(conversation["tools"])
    return msgspec.json.encode(conversation | {"messages": messages, "tools": tools})


async def _off_loop(size_bytes: int, job: Callable[[Any], T], argument: Any) -> T:
    return job(argument) if size_bytes <= LOOP_BYTES else await asyncio.to_thread(job, argument)
