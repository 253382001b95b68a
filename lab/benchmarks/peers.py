"""The measured systems, run one at a time: Pillion as its users start it, and the installed peers.

Two servers at once would share the cores even while one is idle. So each system is a context manager that ends its
processes; vLLM, which compiles for minutes at its start, is paused by a signal while others run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import psutil

from lab.benchmarks import llama_stream
from lab.benchmarks.closed_loop import ClosedLoad, DrivenLoad, measure
from lab.testbed.cluster import served
from lab.testbed.conditions import wait_for
from lab.testbed.ports import free_port
from pillion.loadgen.figures import Record, Run
from pillion.loadgen.openai_target import OpenAITarget
from pillion.loadgen.target import LoadTarget, PillionTarget

HOST = "127.0.0.1"
VLLM_START_TIMEOUT_S = 300.0
VLLM_STOP_TIMEOUT_S = 30.0
# Longest pause of a peer.
MAX_PAUSE_S = 86_400
# Pool size: two pools are in memory at once, and the largest load needs a sixth of one.
VLLM_KV_CACHE_GIB = 2
# Required by vLLM and missing in Pillion's converted folder.
VLLM_OVERRIDES = {"architectures": ["LlamaForCausalLM"]}
# Limits of vLLM's instruction set: of its product libraries (oneDNN, MKL), of torch's kernels, and of those that torch
# compiles and caches per limit. The folder limits vLLM's own kernels.
AVX2_ONLY = pathlib.Path(__file__).parent / "avx2_only"
PEER_ISAS = {
    "": {},
    "avx2": {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "TORCHINDUCTOR_CPP_MARCH": "x86-64-v3",
        "PYTHONPATH": str(AVX2_ONLY),
    },
}
# The demo model's context.
CONTEXT_TOKENS = 8192
LOG_TAIL_BYTES = 8000

# Runs one load on a running system, with prompts drawn from a seed.
Measure = Callable[[DrivenLoad, int], Run]


@dataclass(frozen=True, slots=True)
class RunningSystem:
    """A system ready for load.

    ``version``: as reported; ``about``: remarks on its figures; ``group``: its process group if it may be paused.
    """

    version: str
    measure: Measure
    about: str = ""
    group: int | None = None

    def pause(self) -> None:
        if self.group is not None:
            os.killpg(self.group, signal.SIGSTOP)

    def resume(self) -> None:
        """Continue after :meth:`pause`; a no-op without one."""
        if self.group is not None:
            os.killpg(self.group, signal.SIGCONT)


@dataclass(frozen=True, slots=True)
class System:
    """A system to measure: its name, a function that starts it in a fresh folder, and which loads it supports.

    ``stays``: started once and paused while others run, instead of restarted in every round.
    """

    name: str
    flags: tuple[str, ...]
    start: Callable[[pathlib.Path], contextlib.AbstractContextManager[RunningSystem]]
    takes: Callable[[ClosedLoad], bool]
    stays: bool = False

    @contextlib.contextmanager
    def running(self) -> Iterator[RunningSystem]:
        """Start the system with a temporary folder."""
        with tempfile.TemporaryDirectory(prefix="pil-") as folder, self.start(pathlib.Path(folder)) as running:
            yield running


def pillion_system(name: str, model: str, flags: Sequence[str]) -> System:
    """Describe `pillion serve MODEL FLAGS` with its defaults, driven over gRPC by the SDK."""

    @contextlib.contextmanager
    def start(folder: pathlib.Path) -> Iterator[RunningSystem]:
        from pillion import __version__

        with served(folder, model, *flags, split_policy="") as cluster:
            ready = about_kernels(cluster.log.read_text("utf-8"))
            yield RunningSystem(__version__, over(lambda: PillionTarget("", True, 0.0, target=cluster.target)), ready)

    return System(name, tuple(flags), start, lambda _: True)


def about_kernels(log: str) -> str:
    """Return the kernels named in the workers' log: the fallback's figures are not the CPU engine's."""
    lines = [line.split("pillion.worker: ")[1] for line in log.splitlines() if "operators run on" in line]
    return "; ".join(dict.fromkeys(lines))


def over(make: Callable[[], LoadTarget]) -> Measure:
    """Measure loads with the closed loop of `pillion bench`, over a new target per load."""

    def run(load: DrivenLoad, seed: int) -> Run:
        async def all_of_it() -> Run:
            return await measure(make(), load.sessions(seed), load.concurrency)

        return asyncio.run(all_of_it())

    return run


def vllm_system(
    name: str,
    program: str,
    model: pathlib.Path,
    dtype: str,
    flags: Sequence[str],
    takes: Callable[[ClosedLoad], bool],
    isa: str = "",
) -> System:
    """Describe `vllm serve` of the same folder, in a new session so that all its processes can be ended.

    ``isa``: a key of PEER_ISAS.
    """

    @contextlib.contextmanager
    def start(folder: pathlib.Path) -> Iterator[RunningSystem]:
        usual = ("--max-model-len", str(CONTEXT_TOKENS), "--block-size", "32")
        overrides = ("--hf-overrides", json.dumps(VLLM_OVERRIDES))
        log = folder / "vllm.log"
        with serving_vllm(program, model, dtype, (*usual, *overrides, *flags), log, isa) as (url, version, pid):
            stream = over(lambda: OpenAITarget("peer", True, 0.0, target=url))
            yield RunningSystem(version, stream, about_vllm(pid, isa), group=pid)

    return System(name, tuple(flags), start, takes, stays=True)


@contextlib.contextmanager
def serving_vllm(
    program: str, model: pathlib.Path, dtype: str, flags: Sequence[str], log: pathlib.Path, isa: str = ""
) -> Iterator[tuple[str, str, int]]:
    """Run `vllm serve` until the block ends; yield its URL, version and process group.

    The model's name is "peer". The end of ``log`` is shown on failures. ``isa``: a key of PEER_ISAS.
    """
    port = free_port()
    command = [program, "serve", str(model), "--served-model-name", "peer", "--host", HOST, "--port", str(port)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--dtype", dtype, *flags],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=vllm_environment(isa),
            start_new_session=True,
        )
    try:
        version = wait_for("vLLM to serve", lambda: _vllm_version(process, port), VLLM_START_TIMEOUT_S)
        yield f"http://{HOST}:{port}", version, process.pid
    except BaseException:
        sys.stderr.write(tail(log))
        raise
    finally:
        stop_session(process)


def about_vllm(pid: int, isa: str) -> str:
    """Return which of vLLM's kernels a server and its children have mapped, and their limits."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    mapped = {pathlib.Path(piece.path) for process in processes for piece in process.memory_maps()}
    kernels = sorted(path.name for path in mapped if path.parent.name == "vllm" and path.name.startswith("_C"))
    return f"{', '.join(kernels) or 'no kernels of its own'}{f', limited to {isa}' * bool(isa)}"


def vllm_environment(isa: str = "") -> dict[str, str]:
    """Return this process's environment with all cores for vLLM's threads and without model hubs. ``isa``: a key of
    PEER_ISAS."""
    return {
        **os.environ,
        **PEER_ISAS[isa],
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": str(VLLM_KV_CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        "VLLM_NO_USAGE_STATS": "1",
        # Otherwise vLLM takes a pause for a hanging step and exits.
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(MAX_PAUSE_S),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }


def _vllm_version(process: subprocess.Popen[bytes], port: int) -> str:
    """Return vLLM's version once it is healthy, "" before. Raises AssertionError if its process has ended."""
    assert process.poll() is None, f"vLLM ended with status {process.returncode}"
    try:
        for path in ("health", "version"):
            with urllib.request.urlopen(f"http://{HOST}:{port}/{path}", timeout=5.0) as reply:
                body = reply.read()
    except OSError:
        return ""
    return str(json.loads(body)["version"])


def stop_session(process: subprocess.Popen[bytes], timeout_s: float = VLLM_STOP_TIMEOUT_S) -> None:
    """End a process, paused or not, as Ctrl-C does, then kill the rest of its session."""
    with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):
        os.killpg(process.pid, signal.SIGCONT)
        process.send_signal(signal.SIGINT)
        process.wait(timeout_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def llama_system(name: str, python: str, gguf: pathlib.Path) -> System:
    """Describe llama.cpp in a process, with one stream and all cores."""

    @contextlib.contextmanager
    def start(folder: pathlib.Path) -> Iterator[RunningSystem]:
        log = folder / "llama.log"
        threads = str(len(os.sched_getaffinity(0)))
        command = [python, llama_stream.__file__, str(gguf), threads, str(CONTEXT_TOKENS)]
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out)
        assert process.stdin is not None
        assert process.stdout is not None
        questions, answers = process.stdin, process.stdout
        try:
            version = str(_reply(answers)["version"])
            yield RunningSystem(version, lambda load, seed: _run_llama(questions, answers, load, seed))
        except BaseException:
            sys.stderr.write(tail(log))
            raise
        finally:
            process.kill()
            process.wait()
            for pipe in (questions, answers):
                with contextlib.suppress(OSError):
                    pipe.close()

    return System(name, (), start, lambda load: load.concurrency == 1)


def bf16_gguf(python: str, gguf: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Convert a GGUF file's model to bfloat16 in ``folder`` by llama.cpp; return the new file."""
    written = folder / f"{gguf.stem}-bf16.gguf"
    subprocess.run([python, llama_stream.__file__, str(gguf), str(written)], check=True, stderr=subprocess.DEVNULL)
    return written


def _reply(pipe: IO[bytes]) -> dict[str, Any]:
    line = pipe.readline()
    if not line:
        raise RuntimeError("llama.cpp ended")
    reply: dict[str, Any] = json.loads(line)
    return reply


def _run_llama(questions: IO[bytes], replies: IO[bytes], load: DrivenLoad, seed: int) -> Run:
    """Run the prompts of a closed load one by one. The process has its own clock, so only differences of times
    count."""
    assert isinstance(load, ClosedLoad), "one stream has no times of arrival"
    cpu, begin, records = time.process_time(), time.perf_counter(), []
    for number, session in enumerate(load.sessions(seed)):
        question = {"prompt": list(session.turns[0].ids), "max_tokens": load.output_tokens}
        questions.write(json.dumps(question).encode() + b"\n")
        questions.flush()
        answer = _reply(replies)
        record = Record(
            number=number,
            session=number,
            turn=0,
            due_s=answer["asked_s"],
            held_s=0.0,
            sent_s=answer["asked_s"],
            ended_s=answer["token_s"][-1],
            messages=tuple((at_s, 1) for at_s in answer["token_s"]),
            output_tokens=len(answer["token_s"]),
            asked_tokens=load.output_tokens,
        )
        records.append(record)
    return Run(tuple(records), time.perf_counter() - begin, time.process_time() - cpu, stalls_s=())


def tail(log: pathlib.Path) -> str:
    return log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
