"""The processes of `lab.benchmarks.edge`: a decode worker that computes nothing, and the real gateway before it.

    python -m lab.benchmarks.edge_processes worker SOCKET_FOLDER REDIS_URL STREAMS STEP_S
    python -m lab.benchmarks.edge_processes gateway MODEL_FOLDER REDIS_URL

The worker begins once STREAMS streams wait. It sends a batch with one token for each stream every STEP_S seconds, or as
fast as the gateway reads; when all streams have ended it writes the time of each token to times.json.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import pathlib
import sys
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from lab.testbed.toy_tokenizer import byte_tokenizer, write_tokenizer
from pillion.config import GatewayFlags
from pillion.engine.checkpoints.prepare import PreparedModel
from pillion.gateway.assemble import start_gateway
from pillion.kvstore.index.registry import Registry
from pillion.net import rpc
from pillion.types import FinishReason
from pillion.v1 import decode_pb2_grpc, kvnode_pb2, kvnode_pb2_grpc
from pillion.v1.decode_pb2 import DecodeBatch, DecodeDelta, Submit
from pillion.wire.common import check_hello, finish_to_pb, hello_to_pb
from pillion.wire.registry import ComponentRecord

BLOCK = 16
MODEL = "toy"
NAMESPACE, FINGERPRINT = "ab" * 32, "cd" * 32
MAX_LEN = 2**20
HEARTBEAT_TIMEOUT_MS = 600_000
# The text that all streams repeat.
TEXT = byte_tokenizer().encode("the quick brown fox jumps over the lazy dog, ").ids


class IdleKVNode(kvnode_pb2_grpc.KVNodeServicer):
    """A KV node without blocks: it grants every ticket."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    async def OpenSession(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """Grants an epoch and keeps the session open until the gateway ends."""
        check_hello(request.hello)
        yield kvnode_pb2.SessionEvent(hello=hello_to_pb("kv-0"), epoch=next(self._numbers))
        await asyncio.Event().wait()

    async def OpenTicket(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Grants a ticket without any block of the prompt."""
        return kvnode_pb2.OpenTicketReply(ticket_id=next(self._numbers), pinned_blocks=0)

    async def ReleaseTicket(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Answer; a ticket holds nothing here."""
        return kvnode_pb2.ReleaseTicketReply()


class ScriptedDecode(decode_pb2_grpc.DecodeServicer):
    """A decode worker that steps all streams together, every ``step_s`` seconds (0: at full speed)."""

    def __init__(self, streams: int, step_s: float, folder: pathlib.Path) -> None:
        self._wanted = streams
        self._step_s = step_s
        self._folder = folder
        self._streams: dict[int, Submit] = {}
        self._ready = asyncio.Event()

    async def Connect(self, commands: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """Serves one gateway's streams, round after round."""
        check_hello((await anext(commands)).hello)
        reader = asyncio.create_task(self._read(commands))
        try:
            while True:
                await self._ready.wait()
                self._ready.clear()
                streams, self._streams = self._streams, {}
                yield DecodeBatch(deltas=[DecodeDelta(key=key) for key in streams])
                async for batch in self._steps(streams):
                    yield batch
        finally:
            reader.cancel()

    async def _steps(self, streams: dict[int, Submit]) -> AsyncIterator[Any]:
        keys, count = list(streams), next(iter(streams.values())).max_tokens
        sent: list[float] = []
        begun = time.monotonic()
        # The messages are made once, because the worker shares its core with the clients.
        batches = [DecodeBatch(deltas=[DecodeDelta(key=key, token_ids=(token,)) for key in keys]) for token in TEXT]
        last = DecodeBatch()
        last.CopyFrom(batches[0])
        for delta in last.deltas:
            delta.finish_reason = finish_to_pb(FinishReason.LENGTH)
        for step in range(count):
            if self._step_s:
                await asyncio.sleep(max(0.0, begun + step * self._step_s - time.monotonic()))
            sent.append(time.monotonic())
            yield last if step + 1 == count else batches[step % len(TEXT)]
        draft = self._folder / "times.part"
        draft.write_text(json.dumps(sent))
        draft.rename(self._folder / "times.json")

    async def _read(self, commands: Any) -> None:
        async for command in commands:
            if command.HasField("submit"):
                self._streams[command.submit.key] = command.submit
                if len(self._streams) == self._wanted:
                    self._ready.set()


async def run_worker(folder: pathlib.Path, redis_url: str, streams: int, step_s: float) -> None:
    """Runs the node and the decode worker until the process is killed."""
    registry = Registry(redis_url, HEARTBEAT_TIMEOUT_MS)
    node, decode = IdleKVNode(), ScriptedDecode(streams, step_s, folder)  # type: ignore[abstract]
    served: dict[str, Any] = {
        "model": MODEL,
        "fingerprint": FINGERPRINT,
        "namespace": NAMESPACE,
        "max_model_len_tokens": MAX_LEN,
    }
    kv, worker = f"unix:{folder}/kv.sock", f"unix:{folder}/decode.sock"
    # The reference keeps the servers alive: gRPC ends a server that is collected.
    servers = [
        await rpc.start_server(
            kv, [("pillion.v1.KVNode", partial(kvnode_pb2_grpc.add_KVNodeServicer_to_server, node))]
        ),
        await rpc.start_server(
            worker, [("pillion.v1.Decode", partial(decode_pb2_grpc.add_DecodeServicer_to_server, decode))]
        ),
    ]
    common: dict[str, Any] = {"node_id": "kv-0", "block_size_tokens": BLOCK}
    await registry.heartbeat(ComponentRecord(component_id="kv-0", role="kvnode", address=kv, **common))
    await registry.heartbeat(
        ComponentRecord(component_id="decode-0", role="decode", address=worker, **common, **served)
    )
    await asyncio.gather(*(server.server.wait_for_termination() for server in servers))


async def run_gateway(folder: pathlib.Path, redis_url: str) -> None:
    """Runs the gateway until the process is killed; its addresses are in ports.json."""
    prepared = PreparedModel(
        folder=write_tokenizer(folder / "model", byte_tokenizer()),
        name=MODEL,
        fingerprint=FINGERPRINT,
        dtype="float32",
        max_model_len=MAX_LEN,
        vocab_size=259,
        eos_token_ids=(257,),
        bos_token_id=None,
    )
    # The worker registers only once, without heartbeats.
    flags = GatewayFlags(
        redis_url=redis_url,
        heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS,
        http_port=0,
        grpc_port=0,
        split_policy="colocated",
        block_size=BLOCK,
    )
    component = await start_gateway(flags, prepared=prepared)
    while component.gateway.not_ready():  # noqa: ASYNC110  (a benchmark's start)
        await asyncio.sleep(0.05)
    draft = folder / "ports.part"
    draft.write_text(json.dumps({"http": component.http_address, "grpc": component.grpc_address}))
    draft.rename(folder / "ports.json")
    await asyncio.Event().wait()


def main() -> None:
    """Runs one of the processes on the core that EDGE_CORE names."""
    os.sched_setaffinity(0, {int(os.environ["EDGE_CORE"])})
    role, folder, redis_url, *rest = sys.argv[1:]
    if role == "worker":
        asyncio.run(run_worker(pathlib.Path(folder), redis_url, int(rest[0]), float(rest[1])))
    else:
        asyncio.run(run_gateway(pathlib.Path(folder), redis_url))


if __name__ == "__main__":
    main()
