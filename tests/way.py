"""The way of one chat through the code: ``python -m tests.way`` prints it, ``--write`` puts it into the walkthrough.

One chat is sent over HTTP to the real components (gateway, KV node, workers and Redis, in one process and over their
sockets, with a tiny random model on the CPU kernels), once co-located and once disaggregated. The trace begins at the
first byte that the gateway reads. Its first part ends when the decode worker calls into the compiled step (the LLVM
function): that is the first native instruction for the prompt's tail. Where a prefill worker computes first, its step
is in it. Its second part ends when the gateway writes the first byte of the answer.

A *file* is on the way if a function of it runs, or an instance of a dataclass of it is made, on any thread, on behalf
of the request. What runs when a module is imported does not count, nor do the tasks of ``BACKGROUND``, which run
without a request. A *passage* is one run of such a function; ``--calls`` prints all of them in order. The *lines* are
the lines of code in all functions that run, each once, however often they run.

A *form* is a class of ours, or a generated message, of which an instance is made for the request and holds values of
the request in its own fields, up to the native instruction: the prompt's text or tokens, its block hashes, the
request's id, or its seed. What only refers to a form carries it whole, and is none. Messages nested in a message, and
the items of a form's list, count with it. Handles that components make (tickets, keys of streams) are no values.

A *call* is one that leaves its component: a method of a gRPC service, or a command that Redis gets. Those of
``NAMED_ONCE`` are named at the first of them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dis
import pathlib
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType, FrameType
from typing import Any

import msgspec
import numpy as np
import pytest
from google.protobuf.message import Message

from lab.testbed.conditions import WITHIN_S
from lab.testbed.tiny_model import save_model
from pillion.engine.scheduling.scheduler import Scheduler
from pillion.engine.worker.step_loop import StepLoop
from pillion.gateway import boxed_process
from pillion.gateway.planning.cluster_snapshot import parse_policy
from pillion.gateway.tokens import chat_template
from pillion.kvstore.hashing import HASH_BYTES
from pillion.kvstore.index import index
from tests.support.components import Components, running_components
from tests.support.http import call

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "walkthrough.md"
PACKAGES = ("decode_service", "engine", "gateway", "kernels", "kvstore", "pillion", "prefill_service")
BEGIN, END = "<!-- the way: written by tests/way.py -->\n", "<!-- end of the way -->\n"
# The outermost functions of ours in tasks and threads that run without any request, too, and methods of gRPC.
BACKGROUND = {
    "Announcer.run",
    "Cluster._poll",
    "GatewayServer._beat",
    "Heartbeats.run",
    "KVNode/Heartbeat",
    "Heartbeats._beat_node",
    "Heartbeats._beat_registry",
    "KVNode._watch_silence",
    "LoadExchange._report_now",
    "LoadExchange._publish",
    "NodeDirectory.announce",
    "NodeExchange.run",
    "NodePrefixPins.run",
    "close_silent",
}
# Not awaited by the answer, after the native step. Their calls are not on the way.
NOT_AWAITED = {
    "ComponentCalls._release",
    "ComponentCalls._run_prefill",
    "KVNode/Commit",
    "KVNode/ReleaseTicket",
    "NodeLink._release_all",
    "WorkerEpoch._send_updates",
    "_reading.<locals>.read",
}
# A worker commits what has been computed since the node answered its last commit, so how often it does depends on how
# long the node takes.
NAMED_ONCE = {"KVNode/Commit"}
# A call of Python begins at a RESUME whose argument has 0 as its two lowest bits. A coroutine goes on at another one,
# and at any operation where an exception is thrown into it.
RESUME, RESUMED = dis.opmap["RESUME"], 3
WORDS = "quagga zebra okapi bongo "
LABEL, SEED = "request-of-the-way", 2**40 + 77
# Max parts of a container that are searched for values.
MAX_PARTS = 64


@dataclass(frozen=True, slots=True)
class Entered:
    """One passage: the file, from the repository's folder on, and the function."""

    file: str
    function: str
    thread: str


@dataclass(frozen=True, slots=True)
class Carried:
    """A form, and the fields that hold values of the request."""

    form: str
    fields: list[str]


@dataclass(slots=True)
class Way:
    """What one chat has passed, in order."""

    policy: str
    passages: list[Entered] = field(default_factory=list)
    forms: dict[type, Carried] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    # Passages, and functions that ran, before the native instruction.
    to_native: int = 0
    run_to_native: int = 0
    # Functions that ran, in order of their first call.
    run: dict[CodeType, None] = field(default_factory=dict)

    @property
    def files(self) -> list[str]:
        """The files up to the native instruction, in the order in which they were entered."""
        return list(dict.fromkeys(entered.file for entered in self.passages[: self.to_native]))

    @property
    def answer_files(self) -> list[str]:
        """The files that are entered on the way back only."""
        return [file for file in dict.fromkeys(entered.file for entered in self.passages) if file not in self.files]

    def run_lines(self, *, to_native: bool) -> int:
        """The lines of code in the functions that ran, to the native instruction or to the answer's first byte."""
        codes = list(self.run)[: self.run_to_native if to_native else None]
        return len({(code.co_filename, line) for code in codes for *_, line in code.co_lines() if line})

    def head(self) -> str:
        """The counts that are kept down, as text."""
        files, back = len(self.files), len(self.answer_files)
        forms, calls = len(self.forms), len(self.calls)
        return f"{files} files, {files + back} to the answer's first byte, {forms} forms, {calls} calls"

    def lines(self, every_call: bool = False, beside: Way | None = None) -> list[str]:
        """The way as text. Where there is another way ``beside`` it, what the two share is left out."""
        known = [*beside.files, *beside.answer_files] if beside else []
        files, answer_files = ([file for file in way if file not in known] for way in (self.files, self.answer_files))
        forms = [one for kind, one in self.forms.items() if beside is None or kind not in beside.forms]
        lines = [
            f"{self.policy}: {self.head()}" + (f" (what {beside.policy} has, too, is left out)" if beside else ""),
            "",
        ]
        lines += [*_by_folder(files), *(["", "on the way back:", *_by_folder(answer_files)] if answer_files else [])]
        lines += ["", "forms:"]
        lines += [f"    {one.form}  ({', '.join(sorted(one.fields))})" for one in forms]
        lines += ["", "calls:", f"    {', '.join(self.calls)}"]
        if every_call:
            lines += ["", "passages:"]
            lines += [f"    {one.thread}: {one.file} {one.function}" for one in self.passages]
        return lines


def _by_folder(files: Sequence[str]) -> list[str]:
    """The files as lines of text, one line a folder."""
    folders: dict[str, list[str]] = {}
    for file in files:
        folder, _, name = file.rpartition("/")
        folders.setdefault(folder, []).append(name.removesuffix(".py"))
    return [f"    {folder}/  {', '.join(names)}" for folder, names in folders.items()]


class Tracer:
    """Follows calls on all threads that start while :meth:`watching`, from :meth:`begin` to :meth:`stop`."""

    def __init__(self) -> None:
        self.way = Way("")
        self._active = False
        self._tokens: list[int] = []
        # The step loop that ends the way, and whether it has got the request.
        self._steps: StepLoop | None = None
        self._handed_over = self._native = False
        # Objects created since the API, by identity; kept, so that no identity is reused.
        self._made: dict[int, Any] = {}
        # Values of the request besides its text and tokens.
        self._values: set[Any] = set()
        self._nested: set[type] = set()
        self._files: dict[CodeType, str] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        threading.setprofile(self._event)
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def begin(self, way: Way, tokens: Sequence[int], steps: StepLoop) -> None:
        """The API is open. ``tokens`` are some of the prompt's, in order; the way ends in a step of ``steps``."""
        self.way, self._tokens, self._steps = way, list(tokens), steps
        self._values = {LABEL, SEED}
        self._handed_over, self._native, self._active = False, False, True

    def native(self) -> None:
        """The native instruction; the way back begins."""
        if not self._native:
            for made in list(self._made.values()):
                self._inspect(made)
            for kind in self._nested:
                self.way.forms.pop(kind, None)
            self.way.to_native, self.way.run_to_native = len(self.way.passages), len(self.way.run)
        self._native = True

    def _event(self, frame: FrameType, event: str, result: Any) -> None:
        if not self._active or event not in ("call", "return"):
            return
        if self._handed_over and not self._native and threading.current_thread() is not self._steps._thread:
            return
        code = frame.f_code
        if event == "call" and code.co_name == "__init__" and frame.f_lasti >= 0:
            made = frame.f_locals.get(code.co_varnames[0])
            self._made[id(made)] = made
            self._note_dataclass(frame, made)
        file = self._file(code)
        if not file or self._in_background(frame):
            return
        if event == "return":
            self._note_values(code.co_qualname, result)
            if self._native and code.co_qualname == "StrictParser.send" and result:
                self._active = False
            return
        operation, argument = code.co_code[frame.f_lasti : frame.f_lasti + 2]
        if operation != RESUME or argument & RESUMED:
            return
        self.way.passages.append(Entered(file, code.co_qualname, threading.current_thread().name))
        self.way.run.setdefault(code)
        if not self._native:
            self._note_call(frame)
        if not self._native:
            for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
                self._inspect(frame.f_locals.get(name))

    def _file(self, code: CodeType) -> str:
        """The file of a function of ours, from the repository's folder on; "" for another one."""
        found = self._files.get(code)
        if found is None:
            path = pathlib.Path(code.co_filename).resolve()
            own = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES
            found = str(path.relative_to(ROOT)) if own and code.co_name != "<module>" else ""
            self._files[code] = found
        return found

    def _note_dataclass(self, frame: FrameType, made: Any) -> None:
        """Notes the file of a dataclass of which an instance is made, for its ``__init__`` has no file."""
        module = sys.modules.get(type(made).__module__)
        if frame.f_code.co_filename != "<string>" or not type(made).__module__.startswith("pillion."):
            return
        if module is None or not module.__file__ or not self._file(frame.f_back.f_code) or self._in_background(frame):
            return
        file = str(pathlib.Path(module.__file__).resolve().relative_to(ROOT))
        self.way.passages.append(Entered(file, f"{type(made).__qualname__} (made)", threading.current_thread().name))

    def _in_background(self, frame: FrameType | None) -> bool:
        root = frame
        while frame is not None:
            if self._file(frame.f_code):
                root = frame
                if self._native and frame.f_code.co_qualname in NOT_AWAITED:
                    return True
            frame = frame.f_back
        assert root is not None
        names = {root.f_code.co_qualname, _method_of(root)}
        return not names.isdisjoint(BACKGROUND) or (self._native and not names.isdisjoint(NOT_AWAITED))

    def _note_call(self, frame: FrameType) -> None:
        """A call that leaves its component, seen where it arrives, or where Redis is asked."""
        name, values = frame.f_code.co_qualname, frame.f_locals
        if name == "ErrorInterceptor.intercept_service" and (method := _method_of(frame)):
            if method not in NAMED_ONCE or method not in self.way.calls:
                self.way.calls.append(method)
        elif name == "DecodeSession.submit":
            self.way.calls.append("Decode/Connect submit")
        elif name == "StepLoop.post_event" and values["self"] is self._steps and values["event"] is Scheduler.add:
            self._handed_over = True
        elif name == "RedisLink.call_each":
            self.way.calls.append(f"Redis {values['script']}")
        elif name == "BoxedProcess._run":
            # The process is started with -I and an empty environment, so that its two files are named and not traced.
            self.way.calls.append("boxed process")
            for path in (boxed_process._WORKER, chat_template._HANDLER):
                file = str(path.resolve().relative_to(ROOT))
                self.way.passages.append(Entered(file, "(the whole job)", "boxed process"))

    def _note_values(self, function: str, result: Any) -> None:
        """Notes values that the request gets on its way, and the form of a result."""
        if self._native:
            return
        if function == "chain_hashes" and result:
            self._values.add(bytes(result[:HASH_BYTES]))
        self._inspect(result)

    def _inspect(self, value: Any) -> None:
        """Notes the type of an object that was made for the request, where it is a form."""
        kind = type(value)
        if not kind.__module__.startswith("pillion.") or not self._is_ours(value):
            return
        parts = _fields(value)
        found = [name for name, part in parts if self._is_value(part)]
        if found:
            for _, part in parts:
                items = part if type(part) in (list, tuple) or type(part).__name__.startswith("Repeated") else ()
                self._nested.update(map(type, items))
                if isinstance(value, Message) and isinstance(part, Message):
                    self._nested.add(type(part))
            name = f"{kind.__module__.removeprefix('pillion.')}.{kind.__qualname__}"
            form = self.way.forms.setdefault(kind, Carried(name, []))
            form.fields.extend(one for one in found if one not in form.fields)

    def _is_ours(self, value: Any) -> bool:
        """Whether it was made since the API."""
        return id(value) in self._made or isinstance(value, msgspec.Struct | Message | tuple)

    def _is_value(self, part: Any) -> bool:
        """Whether a field is a value of the request, or a container of some."""
        if isinstance(part, str):
            return WORDS in part or part in self._values
        if isinstance(part, bytes | bytearray):
            return WORDS.encode() in part or any(isinstance(one, bytes) and one in part for one in self._values)
        if isinstance(part, int):
            return part in self._values
        if isinstance(part, np.ndarray):
            return part.ndim == 1 and self._is_prompt(part.tolist())
        if isinstance(part, dict):
            return any(map(self._is_value, list(part.values())[:MAX_PARTS]))
        if type(part) in (list, tuple) or type(part).__name__.startswith("Repeated"):
            parts = list(part)
            return self._is_prompt(parts) or any(map(self._is_value, parts[:MAX_PARTS]))
        return False

    def _is_prompt(self, parts: list[Any]) -> bool:
        wanted = self._tokens
        starts = range(len(parts) - len(wanted) + 1)
        return any(parts[start] == wanted[0] and parts[start : start + len(wanted)] == wanted for start in starts)


def _method_of(frame: FrameType) -> str:
    """The method of gRPC whose call a frame has just received; "" for another frame."""
    if frame.f_code.co_qualname == "ErrorInterceptor.intercept_service":
        return str(frame.f_locals["details"].method).rpartition(".")[2]
    if frame.f_code.co_qualname.endswith("_guard.<locals>.call"):
        return str(frame.f_locals["method"]).rpartition(".")[2]
    return ""


def _fields(value: Any) -> list[tuple[str, Any]]:
    """The fields of an object by name."""
    if isinstance(value, Message):
        return [(field.name, part) for field, part in value.ListFields()]
    if isinstance(value, tuple):
        return list(value._asdict().items()) if hasattr(value, "_asdict") else []
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    names = [*slots, *getattr(type(value), "__struct_fields__", ())]
    found = {name: getattr(value, name, None) for name in names}
    return list({**found, **getattr(value, "__dict__", {})}.items())


async def trace(folder: pathlib.Path) -> list[Way]:
    """The ways of one chat each, co-located and disaggregated. Another chat has gone before it, and has started what
    starts once."""
    found = []
    model = {"model": str(save_model(folder / "tiny")), "dtype": "float32", "max_model_len": 1024}
    tracer = Tracer()
    with tracer.watching(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "NODES_MAX_AGE_MS", 1000 * WITHIN_S)
        async with running_components(folder, model=model, gateway={"chunk_size": 32}) as running:
            gateway, loop = running.gateway.gateway, _stop_at_native(running, tracer)
            served = next(iter(gateway._models.values()))
            # What a gateway makes after its start is no part of a chat's way.
            await asyncio.gather(*(one for one in asyncio.all_tasks() if one.get_name() == "first grammars"))
            for policy in ("colocated", "disaggregated"):
                gateway._options = replace(gateway._options, policy=parse_policy(policy))
                for text in (f"hello {policy} " * 10, f"{policy} {WORDS * 4}"):
                    await running.proven()
                    if WORDS in text:
                        tracer.begin(Way(policy), served.tokenizer.encode_text(WORDS, max_tokens=1000), loop)
                    messages = [{"role": "user", "content": text}]
                    body = {"model": served.name, "messages": messages, "max_tokens": 2, "seed": SEED}
                    label = {"x-request-id": LABEL}
                    reply = await call(running.gateway.http_address, "/v1/chat/completions", body, label)
                    assert reply.status == 200
                found.append(tracer.way)
    return found


def _stop_at_native(running: Components, tracer: Tracer) -> StepLoop:
    """Has the trace end where the decode worker calls the compiled step; returns the loop of its steps."""
    worker = running.decode.worker
    native = worker.model.backend._thread_pool._native
    run = native.run

    def stopped(*arguments: int) -> int:
        tracer.native()
        return int(run(*arguments))

    native.run = stopped
    return worker.epoch._steps


def ways() -> list[Way]:
    """Both ways."""
    with tempfile.TemporaryDirectory(prefix="pil-") as folder:
        return asyncio.run(trace(pathlib.Path(folder)))


def render(text: str, found: Sequence[Way]) -> str:
    """``text``, with the ways between the markers."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    shown = [way.lines(beside=found[0] if place else None) for place, way in enumerate(found)]
    lines = [line for way in shown for line in ("```text", *way, "```", "")]
    return before + BEGIN + "\n" + "\n".join(lines) + END + after


def main() -> None:
    """Prints both ways, or writes them into the walkthrough."""
    parser = argparse.ArgumentParser(prog="python -m tests.way", description="The way of one chat through the code.")
    parser.add_argument("--write", action="store_true", help="Write the ways into docs/walkthrough.md.")
    parser.add_argument("--calls", action="store_true", help="Print every function that is called, too.")
    chosen = parser.parse_args()
    found = ways()
    if chosen.write:
        PAGE.write_text(render(PAGE.read_text(), found))
    for way in found:
        native, answer = (way.run_lines(to_native=to_native) for to_native in (True, False))
        print(*way.lines(chosen.calls), "", f"{native} lines run, {answer} to the answer's first byte", "", sep="\n")


if __name__ == "__main__":
    main()
