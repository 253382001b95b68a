"""`pillion chat` as people use it: on a real pseudo-terminal, with its commands and its editing."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import pathlib
import pty
import select
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from lab.testbed.conditions import WITHIN_S
from lab.testbed.ports import free_port
from pillion.cli import chat, talk
from pillion.cli.chat import BLOCK, Conversation, banner, read_message
from pillion.client.client import Client
from pillion.errors import ConfigError, Overloaded, Unavailable
from pillion.types import ModelInfo
from pillion.v1 import gateway_pb2, gateway_pb2_grpc
from tests.pillion.client.test_connection import serving
from tests.support.processes import started

ROOT = pathlib.Path(__file__).resolve().parents[3]


class Parrot(gateway_pb2_grpc.GatewayServicer):
    """Answers with the number of messages and the last one; "wait" never ends, "full" is refused."""

    def __init__(self) -> None:
        self.asked: list[list[tuple[str, str]]] = []

    async def ListModels(self, request: Any, context: Any) -> gateway_pb2.ListModelsResponse:  # noqa: N802
        return gateway_pb2.ListModelsResponse(models=[gateway_pb2.Model(name="parrot-1")])

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[gateway_pb2.GenerateResponse]:  # noqa: N802
        messages = [(message.role, message.content) for message in request.messages]
        self.asked.append(messages)
        if messages[-1][1] == "full":
            raise Overloaded("the parrot is full")
        yield gateway_pb2.GenerateResponse(text=f"{len(messages)}: {messages[-1][1]}!")
        if messages[-1][1] == "wait":
            await asyncio.Event().wait()


class Terminal:
    """A program's terminal: its output, and its input."""

    def __init__(self, side: int) -> None:
        self._side = side
        self.shown = ""

    def expect(self, text: str) -> None:
        """Read until ``text`` appears after what was expected before."""
        end_s = time.monotonic() + 60
        while text not in self.shown:
            ready, _, _ = select.select([self._side], [], [], max(0.0, end_s - time.monotonic()))
            assert ready, f"{text!r} is not in {self.shown!r}"
            self.shown += os.read(self._side, 4096).decode(errors="replace")
        self.shown = self.shown.partition(text)[2]

    def type(self, keys: str) -> None:
        os.write(self._side, keys.encode())


@contextlib.contextmanager
def chatting(target: str, folder: pathlib.Path, *options: str) -> Iterator[tuple[Terminal, Any]]:
    ours, theirs = pty.openpty()
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PILLION_")}
    environ = clean | {"TERM": "dumb", "COLUMNS": "200", "PYTHONPATH": str(ROOT)}
    # The terminal is the program's own, so that Ctrl-C reaches it.
    own = "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    run = "from pillion.cli.app import main; main(sys.argv[1:])"
    argv = [sys.executable, "-c", own + run, "chat", "--target", target, *options]
    try:
        with contextlib.closing(os.fdopen(theirs, "wb", buffering=0)) as side:
            pipes = {"stdin": side, "stdout": side, "stderr": side}
            made = started(argv, env=environ, cwd=folder, start_new_session=True, **pipes)
            with made as process:
                yield Terminal(ours), process
    finally:
        os.close(ours)


async def test_a_conversation_on_a_terminal(tmp_path: pathlib.Path) -> None:
    parrot = Parrot()

    def converse(address: str) -> None:
        with chatting(address, tmp_path, "--system", "Be brief.") as (terminal, process):
            terminal.expect(f"parrot-1 at {address}. /help lists commands, Ctrl-D ends.")
            for typed, shown in [
                ("one\x01no\n", "2: noone!"),
                ("two \\\nlines\n", "4: two \r\nlines!"),
                (f"{BLOCK}one\n  two{BLOCK}\n", "6: one\r\n  two!"),
                ("//slash\n", "8: /slash!"),
                ("full\n", "pillion: the parrot is full"),
                ("/help\n", "/save FILE     write the conversation"),
                ("/nothing\n", "unknown command /nothing"),
                ("/save talk.json\n", "9 messages saved to talk.json"),
                ("/save talk.json\n", "talk.json: File exists"),
                ("/clear\n", "conversation cleared"),
                ("/system\n", "system message: Be brief."),
                ("/system -\n", "there is no system message"),
                ("wait\n", "1: wait!"),
                ("\x03", "you> "),
                ("again\n", "3: again!"),
            ]:
                terminal.expect("you> ") if typed != "\x03" else None
                terminal.type(typed)
                terminal.expect(shown)
                if typed == "\x03":
                    terminal.shown = "you> "
            terminal.expect("you> ")
            terminal.type("\x04")
            assert process.wait(WITHIN_S) == 0
        with chatting(address, tmp_path, "--no-history") as (terminal, process):
            terminal.expect("Warning: --history has no effect")
            terminal.expect("you> ")
            terminal.type("kept\n")
            terminal.expect("1: kept!")
            terminal.expect("you> ")
            terminal.type("\x10\n")
            terminal.expect("3: kept!")
            terminal.expect("you> ")
            terminal.type("/exit\n")
            assert process.wait(WITHIN_S) == 0

    async with serving(parrot) as address:
        await asyncio.to_thread(converse, address)
    assert parrot.asked[0] == [("system", "Be brief."), ("user", "noone")]
    # The user has read what Ctrl-C cut off, so it stays in the conversation.
    assert parrot.asked[-3] == [("user", "wait"), ("assistant", "1: wait!"), ("user", "again")]
    saved = [tuple(message.values()) for message in json.loads((tmp_path / "talk.json").read_text())]
    assert saved == [*parrot.asked[3], ("assistant", "8: /slash!")]


@pytest.mark.parametrize("command", [chat, talk])
def test_a_wrong_address_fails_at_once(command: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    def client(**options: Any) -> Client:
        made.append(options)
        return Client(**options)

    monkeypatch.setattr(command, "Client", client)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    reach = {"target": f"127.0.0.1:{free_port()}"}
    with pytest.raises(Unavailable, match="does a gateway listen at"):
        chat.run_chat("", reach, {}) if command is chat else talk.run_generate("hello", reach, {})
    assert made == [reach | {"connect_timeout_s": 0.0}]


def test_messages_of_several_lines() -> None:
    def read(*lines: str) -> str:
        left = iter(lines)
        return read_message(lambda prompt: next(left))

    assert read(" one ") == "one"
    assert read("a\\", " b\\", "c") == "a\n b\nc"
    assert read(f"{BLOCK}a{BLOCK}") == "a"
    assert read(BLOCK, "  a\\", "", "b", BLOCK) == "  a\\\n\nb"


def test_the_banner() -> None:
    a, b, m = (ModelInfo(name, 64, "") for name in "abm")
    assert banner([m], "", "h:1").startswith("m at h:1.")
    # A model's other name is none to choose from, and one that may be chosen.
    other = replace(m, name="models/m", alias_of="m")
    assert banner([m, other], "", "h:1").startswith("m at h:1.")
    assert banner([m, other], "models/m", "h:1").startswith("models/m at h:1.")
    assert banner([], "", "h:1").startswith("no model yet at h:1.")
    with pytest.raises(ConfigError, match="h:1 serves a, b: choose one with --model"):
        banner([a, b], "", "h:1")
    with pytest.raises(ConfigError, match="--model x is not served at h:1; served: a"):
        banner([a], "x", "h:1")


def test_the_system_message_comes_first_and_save_needs_a_file() -> None:
    talk = Conversation()
    assert talk.command("/system Sing.") == "system message: Sing."
    assert [message.role for message in talk.messages()] == ["system"]
    assert talk.command("/save") == "/save needs a file: /save FILE"
