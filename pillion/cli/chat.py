"""`pillion chat`: a conversation on a terminal, or one message per line of standard input.

on a terminal:  message | several lines | /command --> Conversation --> sent whole, with its prefix in the KV cache
otherwise:      each line of standard input is a message; no commands, and the first error ends it
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from pillion.cli.talk import explicit_options, show
from pillion.client.client import Client
from pillion.errors import ConfigError, PillionError
from pillion.near_names import did_you_mean
from pillion.types import ChatMessage, ModelInfo

PROMPT, MORE = "you> ", "...> "
BLOCK = '"""'
HELP = """\
/help          show this
/clear         forget the conversation; the system message stays
/system        show the system message; /system TEXT sets it, /system - removes it
/save FILE     write the conversation to a new file, as JSON for the API
/exit          end, like Ctrl-D
A line that ends with \\ continues on the next one, and \"\"\" begins and ends a message of several lines.
Start a message that begins with / with //. Ctrl-C stops an answer; the conversation keeps what was shown."""


class Conversation:
    """Messages of a conversation, and the commands that change them."""

    def __init__(self, system: str = "") -> None:
        self.system = system
        self.turns: list[ChatMessage] = []

    def messages(self) -> list[ChatMessage]:
        """Return all messages, the system message first."""
        return [ChatMessage("system", self.system), *self.turns] if self.system else list(self.turns)

    def command(self, line: str) -> str:
        """Run a "/" command; return the text to show. Raises EOFError to end the conversation."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name == "/help":
            return HELP
        if name == "/clear":
            self.turns.clear()
            return "conversation cleared"
        if name == "/system":
            if rest:
                self.system = "" if rest == "-" else rest
            return f"system message: {self.system}" if self.system else "there is no system message"
        if name == "/save":
            return self._save(rest)
        if name in ("/exit", "/quit"):
            raise EOFError
        return f"unknown command {name}; /help lists them, and // begins a message with a /"

    def _save(self, name: str) -> str:
        if not name:
            return "/save needs a file: /save FILE"
        path = Path(name).expanduser()
        try:
            with path.open("x", encoding="utf-8") as file:
                messages = [{"role": message.role, "content": message.content} for message in self.messages()]
                json.dump(messages, file, ensure_ascii=False, indent=2)
        except OSError as error:
            return f"{path}: {error.strerror}"
        return f"{len(self.messages())} messages saved to {path}"


def run_chat(system: str, reach: dict[str, Any], sampling: dict[str, Any]) -> None:
    """Run a conversation until its end. Raises PillionError; on a terminal only before the first message.

    Args:
        system: the system message; "" for none.
        reach, sampling: arguments of :class:`pillion.Client` and of its ``chat``.
    """
    talk, options = Conversation(system), explicit_options(sampling)
    if not sys.stdin.isatty():
        # Do not wait for a gateway that is down, like `pillion generate`.
        with Client(**reach, connect_timeout_s=0.0) as client:
            for line in sys.stdin:
                if line.strip():
                    _turn(client, talk, line.strip(), options)
        return
    with Client(**reach) as client:
        print(banner(client.models(), options.get("model", ""), reach["target"]))
        with contextlib.suppress(ImportError):
            import_module("readline")
        _converse(client, talk, options)


def _converse(client: Client, talk: Conversation, options: dict[str, Any]) -> None:
    """Read messages and commands from the terminal until Ctrl-D or /exit."""
    while True:
        try:
            message = read_message(input)
            if message.startswith("/") and not message.startswith("//"):
                print(talk.command(message))
                continue
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if message.strip():
            try:
                _turn(client, talk, message.removeprefix("/") if message.startswith("//") else message, options)
            except PillionError as error:
                print(f"pillion: {error.message}", file=sys.stderr)


def _turn(client: Client, talk: Conversation, message: str, options: dict[str, Any]) -> None:
    """Request one answer and show the text. A failed request leaves the conversation unchanged. If Ctrl-C ends the
    answer, the shown text stays in the conversation, so that the model sees what the user has read."""
    question = ChatMessage("user", message)
    texts: list[str] = []
    try:
        show(client.chat([*talk.messages(), question], **options), texts)
    except KeyboardInterrupt:
        print()
        if not texts:
            return
    talk.turns += [question, ChatMessage("assistant", "".join(texts))]


def banner(infos: Sequence[ModelInfo], model: str, target: str) -> str:
    """Return the first lines of a conversation. Raises ConfigError if the model must be chosen, or is not served."""
    names, served = [info.name for info in infos], [info.name for info in infos if not info.alias_of]
    if model and names and model not in names:
        hint = did_you_mean(model, names)
        raise ConfigError(f"--model {model} is not served at {target}; served: {', '.join(names)}{hint}")
    if not model and len(served) > 1:
        raise ConfigError(f"{target} serves {', '.join(served)}: choose one with --model")
    name = model or "".join(served) or "no model yet"
    return f"{name} at {target}. /help lists commands, Ctrl-D ends."


def read_message(read_line: Callable[[str], str]) -> str:
    """Read one message. It has several lines if a line ends with a backslash or the first one begins with three quotes.

    Args:
        read_line: returns a line for a prompt such as "you> "; raises EOFError at the end.
    """
    line = read_line(PROMPT).strip()
    if line.startswith(BLOCK):
        lines, line = [], line[len(BLOCK) :]
        while not line.rstrip().endswith(BLOCK):
            lines.append(line)
            line = read_line(MORE)
        return "\n".join([*lines, line.rstrip().removesuffix(BLOCK)]).strip("\n")
    lines = []
    while line.endswith("\\"):
        lines.append(line[:-1])
        line = read_line(MORE)
    return "\n".join([*lines, line])
