"""Agents and their libraries, as docs/agents.md sets them up, do a task with tools on real components.

The model's answers are written beforehand (lab/testbed/scripted_model.py), so each client has to call its own tools,
send their results, and print the last answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import re
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio

from lab.testbed.conditions import WITHIN_S
from lab.testbed.scripted_model import called, save_scripted_model, thought
from pillion.types import ChatMessage, GenerateRequest
from tests.cluster.test_tools import CLIENTS, ROOT
from tests.support.components import Components, running_components

PAGE = (ROOT / "docs" / "agents.md").read_text()
PROGRAMS = CLIENTS / "node" / "node_modules" / ".bin"
PYTHON = CLIENTS / "bin" / "python"
# A program's first start compiles and reads some thousand files.
STARTED_WITHIN_S = 3 * WITHIN_S
NOTES = "Say hello.\n"
# Settings against updates and any traffic except to the gateway.
QUIET = {
    "CONTINUE_TELEMETRY_ENABLED": "0",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
}
# By block language: the program that runs it, and its file.
RUN = {"python": ("python", "program.py"), "js": ("node", "program.mjs")}
PATCH = "*** Begin Patch\n*** Add File: hello.txt\n+Hello ¦from Codex.\n*** End Patch\n"


@dataclass(frozen=True, slots=True)
class Agent:
    """What a section of the page is run with.

    Attributes:
        program: what has to be installed.
        text: what the client's tool writes to hello.txt.
        last: the last answer, which the client prints.
        flags: what is put behind a command of the page, so that the client asks nobody.
        again: the command that goes on with the conversation; "" where none does.
    """

    program: pathlib.Path
    text: str
    last: str
    flags: Mapping[str, str] = field(default_factory=dict)
    again: str = ""


def library(program: pathlib.Path = PYTHON, last: str = "The file hello.txt is written.") -> Agent:
    """A library, whose section of the page has a program with the tool write_file."""
    return Agent(program, "Hello from a library.", last)


# Without a nested sandbox: the test itself is one.
UNBOXED = " --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox"
OPENCODE = PROGRAMS.parent / "opencode-linux-x64" / "bin" / "opencode"
SECOND = "Is the file right?"
AGENTS = {
    "Codex": Agent(
        PROGRAMS / "codex",
        "Hello from Codex.\n",
        "Codex has written the file.",
        {"codex exec": UNBOXED},
        f'codex exec{UNBOXED} resume --last "{SECOND}"',
    ),
    "Claude Code": Agent(
        PROGRAMS / "claude",
        "Hello from Claude Code.\n",
        "Claude Code has written it.",
        again=f'claude -c -p "{SECOND}" --allowedTools Bash Write',
    ),
    "OpenCode": Agent(
        pathlib.Path(shutil.which("opencode") or OPENCODE),
        "Hello from OpenCode.\n",
        "OpenCode has written it.",
        again=f'opencode run -c "{SECOND}"',
    ),
    "Continue": Agent(PROGRAMS / "cn", "Hello from Continue.\n", "Continue has written the file."),
    "OpenAI's Agents SDK": library(),
    "LangChain": library(),
    "LlamaIndex": library(),
    "LiteLLM": library(),
    "Instructor": library(last="path='hello.txt' text='Hello from a library.'"),
    "Vercel AI SDK": library(PROGRAMS.parent / "ai"),
}
# The model's reasoning before each answer to agents whose conversation continues: three answers to the first message,
# and two to the second one.
THOUGHTS = ("The notes come before the file.", "Now I can write.", "That was all.", "I read what I wrote.", "It is so.")


def script(folder: pathlib.Path) -> dict[str, Sequence[str]]:
    """Return the model's answers to each client, by a tool that distinguishes the client."""
    path = str(folder / "hello.txt")
    return {
        "exec_command": thinking(
            "Codex",
            "I read the ¦notes first.¦" + called("exec_command", {"cmd": "cat ¦notes.txt"}),
            called("apply_patch", {"input": PATCH}),
            "Codex has ¦written the ¦file.",
            called("exec_command", {"cmd": "cat hello.txt ¦| cat"}),
            "Codex ¦finds it right.",
        ),
        "Checklist": [
            "The notes ¦come first. ¦" + called("Bash", {"command": "cat ¦notes.txt "}),
            called("Write", {"filepath": "hello.txt", "content": "Hello from ¦Continue.\n"}),
            "Continue ¦has written ¦the file.",
        ],
        "write": thinking(
            "OpenCode",
            "I look first.¦" + called("bash", {"command": "cat note¦s.txt", "description": "Reads the notes"}),
            called("write", {"content": "Hello from ¦OpenCode.\n", "filePath": path}),
            "OpenCode ¦has written it.",
            called("bash", {"command": "cat hell¦o.txt", "description": "Reads the file"}),
            "So OpenCode ¦finds it right. ",
        ),
        "Write": thinking(
            "Claude",
            "I look at the ¦notes.\n¦" + called("Bash", {"command": "cat notes.¦txt", "description": "Reads them"}),
            called("Write", {"file_path": path, "content": "Hello from ¦Claude Code.\n"}),
            "Claude ¦Code has written it.",
            called("Bash", {"command": "cat he¦llo.txt", "description": "Reads it"}),
            "Claude Code ¦finds it right.\n",
        ),
        "write_file": [
            called("write_file", {"path": "hello¦.txt", "text": "Hello from ¦a library."}),
            "The file ¦hello.txt is ¦written.",
        ],
    }


def thinking(name: str, *answers: str) -> list[str]:
    """Answers with what the model thinks before each; the name tells the thoughts of one part from another's."""
    return [f"{thought(f'{name}: {text}')}¦{answer}" for text, answer in zip(THOUGHTS, answers, strict=True)]


def blocks(section: str) -> list[tuple[str, str, str]]:
    """Language, path and text of each block of a section; a block whose path stands before it is a file."""
    (body,) = re.findall(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    return re.findall(r"(?:`~/(\S+)`:\n\n)?```(\w+)\n(.*?)```", body, re.DOTALL)


@dataclass(slots=True)
class Workplace:
    """A running cluster, and the client's working folder."""

    components: Components
    folder: pathlib.Path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place() -> AsyncIterator[Workplace]:
    with tempfile.TemporaryDirectory(prefix="pil-") as name:
        folder = pathlib.Path(name)
        work = folder / "work"
        work.mkdir()
        model = {"model": str(save_scripted_model(folder / "demo", script(work)))}
        async with running_components(folder, model={**model, "dtype": "float32", "max_model_len": 32768}) as running:
            yield Workplace(running, work)


pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]


async def said(command: str, folder: pathlib.Path, environment: Mapping[str, str]) -> str:
    """Run a command and return its output; it and its children end within the limit."""
    process = await asyncio.create_subprocess_exec(
        *("bash", "-euc", command),
        cwd=folder,
        env={**environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, errors = await asyncio.wait_for(process.communicate(), STARTED_WITHIN_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, (out + errors).decode(errors="replace")[-4000:]
    return out.decode()


@pytest.mark.parametrize("name", AGENTS)
async def test_an_agent_set_up_as_documented_calls_its_tools(
    place: Workplace, name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, asked = AGENTS[name], list[Sequence[ChatMessage]]()
    if not agent.program.exists():
        pytest.skip("`make setup-clients` installs the clients; npm's need node and npm, OpenCode Linux on x86 too")
    shutil.rmtree(place.folder)
    place.folder.mkdir()
    (place.folder / "notes.txt").write_text(NOTES)
    (tmp_path / "node_modules").symlink_to(PROGRAMS.parent)
    commands = []
    for path, language, text in blocks(name):
        text = text.replace("http://127.0.0.1:8000", f"http://{place.components.gateway.http_address}")
        if path:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
            continue
        if language in RUN:
            program, file = RUN[language]
            (tmp_path / file).write_text(text)
            commands.append(f"{program} {tmp_path / file}")
            continue
        assert language == "sh"
        for words, flags in agent.flags.items():
            assert words in text
            text = text.replace(words, words + flags)
        commands.append(text)
    generate = place.components.gateway.gateway.generate

    async def noted(request: GenerateRequest, **more: Any) -> Any:
        asked.append(request.messages)
        return await generate(request, **more)

    monkeypatch.setattr(place.components.gateway.gateway, "generate", noted)
    path = f"{PROGRAMS}:{agent.program.parent}:{CLIENTS / 'bin'}:{os.environ['PATH']}"
    environ = {"PATH": path, "HOME": str(tmp_path), **QUIET}
    printed = await said("\n".join([*commands, agent.again]), place.folder, environ)
    assert agent.last in printed
    assert (place.folder / "hello.txt").read_text() == agent.text
    if agent.again:
        assert "finds it right." in printed
        check_second_turn(asked)
    await place.components.proven()


def check_second_turn(asked: Sequence[Sequence[ChatMessage]]) -> None:
    """The last call includes both user messages, the results of all tools, and earlier reasoning."""
    last = max(asked, key=len)
    assert [one for one in last if one.role == "user" and SECOND in one.content]
    results = [one.content for one in last if one.role == "tool"]
    assert len(results) == 3
    assert NOTES.strip() in results[0]
    thoughts = [one.reasoning.partition(": ")[2].strip() for one in last if one.role == "assistant"]
    assert thoughts == list(THOUGHTS[:-1])
