"""Families after a kill: the decode worker, a real process, dies amid an answer whose tokens are transformers'.

One Redis and one fork server are there for all families, of which each has a KV node and a gateway in this process. Its
decode worker is a fork, as below `pillion serve`, and so is the one that goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM

from lab.testbed.cluster import AMID_STEPS, PATIENT_MS
from lab.testbed.conditions import WITHIN_S, until, within
from lab.testbed.defaults import DECODE, defaults_environment
from lab.testbed.faults.board import FaultBoard, hook_environment
from lab.testbed.faults.points import BY_NAME
from lab.testbed.redis import running_redis
from pillion import AsyncClient, Delta
from pillion.cli.flags import to_argv
from pillion.config import DecodeFlags, GatewayFlags, KVNodeFlags
from pillion.gateway.assemble import start_gateway
from pillion.gateway.gateway_server import GatewayServer
from pillion.kvstore.assemble import start_kvnode
from pillion.kvstore.node.kv_node import KVNode
from pillion.supervisor.child_process import ChildProcess, child_environ
from pillion.supervisor.component_process import preloaded_modules
from pillion.supervisor.standbys.fork_server import ForkServer
from tests.support.components import until_known
from tests.support.cpu_model import needs_kernels
from tests.support.families import FAMILIES, make_model, tokens_of
from tests.support.hybrids import HYBRIDS
from tests.support.oracle import Oracle, first_difference
from tests.support.patient_calls import patient_calls
from tests.support.redis_nodes import patient

pytestmark = [pytest.mark.cluster, needs_kernels, pytest.mark.usefixtures("own_cache")]

# A step adds at most one token, so the answer is not finished at that step.
TOKENS, KILLED_AT_STEP = 20, 9
PROMPT = tokens_of(37, 5)
EPSILON = 1e-3
WORKER = "decode-0"
SHOWN_LINES = 40
# These families are rows of the table, and have positions, places or layers of kinds that its other rows lack. What
# workers keep and compute again for those other rows, they do for the families beside the table, too.
OTHER_STATE = ("gpt2", "gpt-oss", "deepseek-v3", "llama4", "gemma4")
CASES = {**FAMILIES, **HYBRIDS}
HYBRIDS_FIRST = {options["model_type"]: name for name, options in reversed(HYBRIDS.items())}
# Of those that are no rows, these have windows, layers without positions, norms or experts of their own.
KINDS = ("llama-gqa-tied", "smollm3-nope", "gemma2", "gemma3", "olmo2", "phi3", "qwen3-moe", "cohere")
EVERY = (*KINDS, *OTHER_STATE, *HYBRIDS_FIRST.values())


@dataclass(frozen=True)
class ForkedWorkers:
    """Starts decode workers as forks of one process, whose hooks pass the points of ``board``."""

    server: ForkServer
    board: FaultBoard
    environ: dict[str, str]

    @contextlib.asynccontextmanager
    async def worker(self, flags: DecodeFlags) -> AsyncIterator[ChildProcess]:
        """Run a decode worker for the block."""
        lines: list[str] = []
        argv = (sys.executable, "-m", "pillion", "decode", *to_argv(flags))
        child = await self.server.launch(argv, self.environ, lines.append)
        try:
            yield child
        except BaseException:
            sys.stderr.write("\n".join(lines[-SHOWN_LINES:]))
            raise
        finally:
            await child.stop(WITHIN_S)


@contextlib.asynccontextmanager
async def forked_workers(folder: pathlib.Path) -> AsyncIterator[ForkedWorkers]:
    board = FaultBoard(folder / "board")
    environ = child_environ(os.environ, "") | hook_environment(folder / "board")
    environ |= defaults_environment({DECODE: {"partial_block_percent": 0}})
    server = ForkServer(preloaded_modules("cpu"), environ, lambda line: None)
    server.start()
    try:
        yield ForkedWorkers(server, board, environ)
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def edge_of(
    folder: pathlib.Path, url: str, model: str
) -> AsyncIterator[tuple[KVNode, GatewayServer, DecodeFlags]]:
    """Run a model's KV node and gateway; yield its decode worker's flags."""
    common = {"redis_url": url, "heartbeat_ms": 100, "heartbeat_timeout_ms": PATIENT_MS}
    shape = {"model": model, "dtype": "float32", "max_model_len": 512}
    attach = str(folder / "a.sock")
    listen = {"node_listen": f"unix:{folder}/k.sock", "attach_socket": attach}
    async with contextlib.AsyncExitStack() as stack:
        node = await start_kvnode(KVNodeFlags(**common, **listen, kv_pool_bytes=2**23))
        stack.push_async_callback(node.stop)
        public = {"http_port": 0, "grpc_port": 0, "split_policy": "colocated"}
        gateway = await start_gateway(GatewayFlags(**common, **shape, **public))
        stack.push_async_callback(gateway.stop)
        patient(gateway.gateway.cluster.index)
        place = {"component_id": WORKER, "listen": f"unix:{folder}/d.sock", "attach_socket": attach, "cpu_threads": 1}
        yield node, gateway, DecodeFlags(**common, **shape, **place)


async def answer_over_a_kill(workers: ForkedWorkers, folder: pathlib.Path, url: str, model: str) -> list[Delta]:
    """Return the deltas of an answer whose worker is killed amid it, after checking that nothing leaks."""

    async def read() -> list[Delta]:
        options = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
        async with AsyncClient(gateway.grpc_address) as client:
            return [delta async for delta in client.generate(PROMPT, **options)]

    async with edge_of(folder, url, model) as (node, gateway, flags):
        async with workers.worker(flags) as first:
            await until_known(gateway.gateway, {WORKER})
            workers.board.clear()
            workers.board.arm(0, BY_NAME[AMID_STEPS], KILLED_AT_STEP, signal.SIGKILL)
            reading = asyncio.create_task(read())
            assert await within("the worker's end", first.wait()) == -signal.SIGKILL
            assert workers.board.fired(0) is not None
        async with workers.worker(flags):
            deltas = await within("the answer's end", reading)
            await until("every ticket's end", lambda: not node.pool.ledger.tickets)
            node.pool.check_integrity()
    return deltas


def wrong_with(model: pathlib.Path, deltas: list[Delta]) -> str:
    """Return the error of an answer; "" if none."""
    timings = deltas[-1].timings
    if timings is None or not timings.replays:
        return "no other worker has gone on"
    oracle = Oracle(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))
    tokens = [token for delta in deltas for token in delta.token_ids]
    return first_difference(oracle.greedy(PROMPT, TOKENS), tokens, EPSILON)


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_a_stream_continues_after_a_kill(tmp_path: pathlib.Path) -> None:
    wrong = {}
    with tempfile.TemporaryDirectory(prefix="pil-") as short, running_redis() as redis, patient_calls():
        async with forked_workers(pathlib.Path(short)) as workers:
            for name in EVERY:
                model, _ = make_model(tmp_path / name, CASES[name])
                folder = pathlib.Path(tempfile.mkdtemp(dir=short))
                deltas = await answer_over_a_kill(workers, folder, redis.url, str(model))
                wrong[name] = wrong_with(model, deltas)
                redis.command("FLUSHALL")
    assert {name: what for name, what in wrong.items() if what} == {}
