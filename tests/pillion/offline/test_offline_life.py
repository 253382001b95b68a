"""How an LLM ends: in every way, and with nothing left behind. Cases share programs, whose start takes longest."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import pytest

from lab.testbed.tiny_model import save_model
from pillion.supervisor.component_process import SERVER_PACKAGES
from tests.support.processes import started

ROOT = pathlib.Path(__file__).resolve().parents[3]
HEAD = """
import asyncio, gc, os, signal, sys, threading
import psutil
from pillion import LLM, Cancelled, SamplingParams, Unavailable
from lab.testbed.conditions import wait_for

process = psutil.Process()

def held():
    gc.collect()
    threads = sorted(t.name for t in threading.enumerate() if not t.name.startswith("tqdm"))
    return process.num_fds(), threads, len(process.children(recursive=True))

def made(length=4096):
    options = {"dtype": "float32", "max_model_len": length, "kv_pool_bytes": "32MiB", "cpu_threads": 1}
    return LLM(sys.argv[1], **options)

TALK = [{"role": "user", "content": "x"}]
SHORT = SamplingParams(temperature=0, max_tokens=4)
LONG = SamplingParams(max_tokens=4000, ignore_eos=True)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


def run(model: pathlib.Path, body: str, folder: str = "") -> tuple[str, str]:
    """Return a program's output; its temporary folder and its process group are empty after it."""
    with contextlib.ExitStack() as stack:
        folder = folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="pl-"))
        command, environ = [sys.executable, "-c", HEAD + body, str(model)], {**os.environ, "TMPDIR": folder}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = stack.enter_context(started(command, cwd=ROOT, env=environ, start_new_session=True, **pipes))
        out, err = process.communicate(timeout=200)
        assert process.returncode == 0, err
        assert os.listdir(folder) == []
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    return out, err


CLOSED_INTERRUPTED_AND_FORKED = """
made().close()  # what is made once per process
before = held()
with made() as llm:
    llm.chat(TALK, SHORT, use_tqdm=False)
    assert held()[2] == 1 and len(held()[1]) > 3, held()
assert held() == before, (held(), before)
llm.close()
for call in (llm.generate, llm.chat):
    try:
        call(TALK if call == llm.chat else "x")
    except Unavailable as error:
        print(error)

# Without a close, what nobody holds is given back, too.
llm = made()
llm.generate("x", SHORT, use_tqdm=False)
del llm
wait_for(f"all but {before} to be given back", lambda: held() == before)
print("nothing was said", file=sys.stderr)

# Ctrl-C cancels the call, and the next one works.
llm = made()
def interrupt():
    wait_for("the call", lambda: llm.status().active_requests == 9)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    llm.generate(["x"] * 9, LONG)
except KeyboardInterrupt:
    print("interrupted")
wait_for("the requests' end", lambda: not llm.status().active_requests)
assert llm.status().completion_tokens < 9 * 4000, "they ran to their ends"

# A forked child lets it alone. It has a copy of what is still buffered, and would write that once more.
sys.stdout.flush()
pid = os.fork()
if not pid:
    try:
        llm.generate("x", SHORT, use_tqdm=False)
    except Unavailable as error:
        print(error, flush=True)
    llm.close()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
print(len(llm.generate("x", SHORT, use_tqdm=False)[0].outputs[0].token_ids))

# Close cancels the calls of other threads.
def close():
    wait_for("the call", lambda: llm.status().active_requests == 9)
    llm.close()
threading.Thread(target=close).start()
try:
    llm.generate(["x"] * 9, LONG, use_tqdm=False)
except Cancelled as error:
    print(error)
"""


def test_close_interrupt_and_fork_are_handled_cleanly(model: pathlib.Path) -> None:
    out, err = run(model, CLOSED_INTERRUPTED_AND_FORKED)
    assert out.splitlines() == [
        *["this LLM is closed"] * 2,
        "interrupted",
        "an LLM cannot be used in a forked process",
        "4",
        "the LLM was closed",
    ]
    # The first LLM says what it prepares, and nothing else is said.
    said = [line for line in err.splitlines() if not line.startswith("pillion    | ")]
    assert said[0] == "nothing was said", err


def test_an_llm_exits_with_the_interpreter_and_removes_folders_of_killed_ones(
    model: pathlib.Path,
) -> None:
    """Two of them, one in the middle of a call on a daemon thread, in a program with its own loop."""
    with tempfile.TemporaryDirectory(prefix="pl-") as folder:
        body = HEAD + "llm = made()\nprint('up', flush=True)\nsignal.pause()\n"
        command, environ = [sys.executable, "-c", body, str(model)], {**os.environ, "TMPDIR": folder}
        with started(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
        assert len(os.listdir(folder)) == 1
        out, err = run(
            model,
            """
first, second = made(), made()
def ask():
    try:
        second.generate(["x"] * 9, LONG, use_tqdm=False)
    except Cancelled:
        pass
threading.Thread(target=ask, daemon=True).start()
async def main():
    first.chat(TALK, SHORT, use_tqdm=False)
    await asyncio.to_thread(first.generate, ["y"] * 9, SHORT, use_tqdm=False)
asyncio.run(main())
wait_for("the second call", lambda: second.status().active_requests)
print("end")
""",
            folder,
        )
    assert (out, err) == ("end\n", "")


def test_a_missing_server_extra_is_named() -> None:
    """``pip install pillion`` without its ``server`` extra includes the servers' code, but none of its dependencies."""
    body = """
import sys
from importlib.machinery import PathFinder
class Without:
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in sys.argv[1:] else PathFinder.find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Without()
import pillion
try:
    pillion.LLM("demo")
except pillion.ConfigError as error:
    print(error)
"""
    for missing in (["torch"], SERVER_PACKAGES):
        words = [sys.executable, "-c", body, *missing]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.stdout == f"pillion.LLM needs {', '.join(missing)}: pip install 'pillion[server]'\n", done.stderr


def test_the_example_runs(model: pathlib.Path) -> None:
    out, _ = run(model, 'import runpy\nrunpy.run_path("examples/offline.py", run_name="__main__")')
    assert out.count("->") == 3
    cached = [int(count) for count in re.findall(r"\((\d+) of \d+ prompt tokens cached", out)]
    assert cached[0] == 0 < cached[1]
