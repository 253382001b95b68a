"""A real KV node and real workers over gRPC, with the fake model, for the services' tests."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import grpc

from lab.testbed.conditions import WITHIN_S, until, within
from pillion.config import DecodeFlags, KVNodeFlags, PrefillFlags
from pillion.decode_service.assemble import start_decode
from pillion.engine.backends.loaded_model import BackendFactory
from pillion.engine.grammars import grammar_state, mask_threads
from pillion.engine.worker import tickets
from pillion.engine.worker.worker_server import WorkerServer
from pillion.gateway.links.decode_link import DecodeDelta, batch_from_pb
from pillion.kvstore.assemble import start_kvnode
from pillion.kvstore.client.node_client import NodeClient, NodeSession
from pillion.kvstore.hashing import chain_hashes
from pillion.kvstore.node.kv_node import KVNode
from pillion.net.rpc import open_channel
from pillion.prefill_service.assemble import start_prefill
from pillion.settings.node_limits import NodeLimits
from pillion.types import SamplingParams, TokenLogprob
from pillion.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2_grpc
from pillion.v1.decode_pb2 import Submit
from pillion.v1.kvnode_pb2 import OpenTicketReply
from pillion.v1.prefill_pb2 import RunPrefillRequest
from pillion.wire.common import hello_to_pb, sampling_to_pb
from tests.support.fake_backend import VOCAB_SIZE, FakeBackend, factory
from tests.support.fixed_limits import split_limits
from tests.support.patient_calls import patient_calls

BLOCK = 4
ROOT = b"\5" * 32
GREEDY = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, seed=1)


def prompt(seed: int, length: int) -> list[int]:
    """Return tokens of the fake model; prompts of one seed are prefixes of each other."""
    return [(seed * 13 + position * 7) % VOCAB_SIZE for position in range(length)]


@dataclass
class Workers:
    """Handles of running components without a gateway; the test acts as the gateway."""

    kvnode: KVNode
    prefill: WorkerServer
    decode: WorkerServer
    prefill_backend: FakeBackend
    decode_backend: FakeBackend
    node: NodeClient
    session: NodeSession
    to_decode: grpc.aio.Channel
    to_prefill: grpc.aio.Channel
    folder: pathlib.Path

    @property
    def decode_stub(self) -> Any:
        """Call the decode worker."""
        return decode_pb2_grpc.DecodeStub(self.to_decode)

    @property
    def prefill_stub(self) -> Any:
        """Call the prefill worker."""
        return prefill_pb2_grpc.PrefillStub(self.to_prefill)

    @property
    def text_stub(self) -> Any:
        """Call the prefill worker for texts that end with a vector."""
        return decode_pb2_grpc.DecodeStub(self.to_prefill)

    async def ticket(self, tokens: Sequence[int], *, hits: bool = True) -> OpenTicketReply:
        """Open a ticket for a prompt, as a gateway does; without ``hits`` it pins nothing."""
        hashes = chain_hashes(ROOT, tokens, BLOCK)[: (len(tokens) - 1) // BLOCK * 32 * hits]
        return await self.node.open_ticket(self.session.epoch, hashes, len(tokens) // BLOCK + 1, timeout_s=WITHIN_S)

    async def release(self, *tickets: OpenTicketReply) -> None:
        """Return the gateway's hold."""
        await self.node.release(self.session.epoch, [ticket.ticket_id for ticket in tickets])

    async def quiet(self) -> None:
        """Wait until nothing is leased, pinned, promised or held, checking integrity on the way."""

        async def nothing_left() -> bool:
            await self.node.check_integrity()
            books = await self.node.status()
            return not (books.leased_blocks or books.pinned_blocks or books.tickets or books.reserved_blocks)

        await until("the return of every slot and ticket", nothing_left)

    def prefill_range(
        self, ticket: OpenTicketReply, tokens: Sequence[int], chunks: Sequence[int], **other: Any
    ) -> RunPrefillRequest:
        """Return the whole blocks of ``tokens`` that the ticket lacks, in chunks of ``chunks`` tokens."""
        start = ticket.pinned_blocks * BLOCK
        hashes = chain_hashes(ROOT, tokens, BLOCK)
        fields: dict[str, Any] = {
            "hello": hello_to_pb("test-gateway"),
            "request_id": "r",
            "attempt": 1,
            "ticket_id": ticket.ticket_id,
            "parent_hash": hashes[: ticket.pinned_blocks * 32][-32:] or ROOT,
            "start_tokens": start,
            "token_ids": tuple(tokens[start : start + sum(chunks)]),
            "chunk_tokens": tuple(chunks),
        }
        return RunPrefillRequest(**{**fields, **other})


def submit_of(
    key: int,
    ticket: OpenTicketReply,
    tokens: Sequence[int],
    max_tokens: int = 8,
    sampling: SamplingParams = GREEDY,
    **other: Any,
) -> Submit:
    """Return a submit, greedy by default."""
    fields: dict[str, Any] = {
        "key": key,
        "request_id": f"r{key}",
        "attempt": 1,
        "ticket_id": ticket.ticket_id,
        "root_hash": ROOT,
        "token_ids": tuple(tokens),
        "prompt_tokens": len(tokens),
        "sampling": sampling_to_pb(sampling),
        "stop_token_ids": (),
        "max_tokens": max_tokens,
    }
    return Submit(**{**fields, **other})


@dataclass
class Answer:
    """The deltas of one stream."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    last: DecodeDelta | None = None
    draft_tokens: list[tuple[int, int]] = field(default_factory=list)
    pinned: list[int] = field(default_factory=list)
    queued: list[int] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def ended(self) -> None:
        """Wait for its last delta."""
        await within("the last delta of a stream", self.over.wait(), saw=lambda: self)


class Connection:
    """A gateway's side of Decode.Connect."""

    def __init__(self, stub: Any) -> None:
        self.call = stub.Connect()
        self.answers: dict[int, Answer] = {}
        self.batches = 0
        self._reader: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()

    async def hello(self) -> None:
        """Send the hello, and read from now on."""
        await self.write(decode_pb2.DecodeCommand(hello=hello_to_pb("test-gateway")))
        self._reader = asyncio.create_task(self._read())

    async def submit(self, submit: Submit) -> Answer:
        """Start a stream."""
        answer = self.answers[submit.key] = Answer()
        await self.write(decode_pb2.DecodeCommand(submit=submit))
        return answer

    async def cancel(self, key: int) -> None:
        """End a stream."""
        await self.write(decode_pb2.DecodeCommand(cancel=decode_pb2.Cancel(key=key)))

    async def write(self, command: decode_pb2.DecodeCommand) -> None:
        """Send any command, valid or not."""
        async with self._writing:
            await self.call.write(command)

    async def close(self) -> None:
        """Drop the connection."""
        self.call.cancel()
        if self._reader is not None:
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await self._reader

    async def _read(self) -> None:
        async for message in self.call:
            self.batches += 1
            for delta in batch_from_pb(message):
                answer = self.answers[delta.key]
                assert answer.last is None, "a delta after the end"
                answer.token_ids.extend(delta.token_ids)
                answer.logprobs.extend(delta.logprobs)
                answer.prompt_logprobs.extend(delta.prompt_logprobs)
                if delta.timings is not None:
                    answer.draft_tokens.append((delta.timings.guessed_tokens, delta.timings.accepted_tokens))
                answer.pinned += [] if delta.pinned_blocks is None else [delta.pinned_blocks]
                answer.queued += [] if delta.queued is None else [delta.queued]
                if delta.finish_reason is not None or delta.error is not None:
                    answer.last = delta
                    answer.over.set()


async def answered(workers: Workers) -> None:
    """Return once the node has answered all that the decode worker has asked."""
    epoch = workers.decode.worker.epoch
    await epoch._updates.drained()
    await until("the node's answers", lambda: len(epoch._tasks) <= 2)


def answered_first(workers: Workers) -> None:
    """Make each step of the decode worker wait until the node has answered all earlier calls."""
    loop = asyncio.get_running_loop()
    workers.decode_backend.before_step = lambda batch: asyncio.run_coroutine_threadsafe(answered(workers), loop).result(
        WITHIN_S
    )


@contextlib.contextmanager
def patient_workers() -> Iterator[None]:
    """Lengthen workers' waits for a node, a ticket's last use and a grammar's mask, for machines that stall for
    seconds."""
    with (
        patient_calls(),
        mock.patch.object(tickets, "IN_USE_TIMEOUT_S", WITHIN_S),
        mock.patch.object(mask_threads, "MASK_LIMIT_MS", WITHIN_S * 1000),
        mock.patch.object(grammar_state, "MASK_LIMIT_MS", WITHIN_S * 1000),
    ):
        yield


@contextlib.asynccontextmanager
async def running_workers(
    *,
    slots: int = 256,
    decode: dict[str, Any] | None = None,
    prefill: dict[str, Any] | None = None,
    node: dict[str, Any] | None = None,
    backend: Callable[[int], FakeBackend] = FakeBackend,
    tokenizer: str = "nowhere",
    load: BackendFactory | None = None,
) -> AsyncIterator[Workers]:
    """Run one KV node of ``slots`` blocks of 4 tokens, and one worker of each kind, with optional flags. ``backend``
    makes one for blocks of this number of tokens. ``tokenizer`` is a folder with one. ``load`` makes the decode
    worker's model in place of ``backend``."""
    async with contextlib.AsyncExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pil-")))
        stack.enter_context(patient_workers())
        # A stall of seconds must not fence workers, unless a test wants it.
        common: dict[str, Any] = {
            "heartbeat_ms": 50,
            "heartbeat_timeout_ms": 60_000,
            "attach_socket": str(folder / "a.sock"),
        }
        backends = backend(BLOCK), backend(BLOCK)
        pool_bytes = slots * backends[0].layout.block_bytes
        own, limits = split_limits(NodeLimits, node or {})
        kvnode = await start_kvnode(
            KVNodeFlags(**{**common, "node_listen": f"unix:{folder}/k.sock", "kv_pool_bytes": pool_bytes, **own}),
            limits,
        )
        stack.push_async_callback(kvnode.stop)
        worker: dict[str, Any] = {**common, "block_size": BLOCK, "cpu_threads": 1, "max_model_len": 1024}
        first = await start_prefill(
            PrefillFlags(
                **{**worker, "component_id": "prefill-0", "listen": f"unix:{folder}/p.sock", **(prefill or {})}
            ),
            backend_factory=factory(backends[0]),
        )
        stack.push_async_callback(first.stop, 0.0)
        second = await start_decode(
            DecodeFlags(
                **{
                    **worker,
                    "component_id": "decode-0",
                    "listen": f"unix:{folder}/d.sock",
                    **(decode or {}),
                }
            ),
            backend_factory=load or factory(backends[1], tokenizer),
            partial_block_percent=0,
        )
        stack.push_async_callback(second.stop, 0.0)
        client = NodeClient(kvnode.address, "test-gateway")
        stack.push_async_callback(client.aclose)
        session = await client.open_session()
        stack.push_async_callback(session.aclose)
        to_decode = await stack.enter_async_context(open_channel(second.address))
        to_prefill = await stack.enter_async_context(open_channel(first.address))
        yield Workers(
            kvnode,
            first,
            second,
            *backends,
            client,
            session,
            to_decode,
            to_prefill,
            folder,
        )


@contextlib.asynccontextmanager
async def connected(workers: Workers, *, for_texts: bool = False) -> AsyncIterator[Connection]:
    """Open a connection that has sent its hello, to the decode worker or, ``for_texts``, to the prefill worker."""
    connection = Connection(workers.text_stub if for_texts else workers.decode_stub)
    await connection.hello()
    try:
        yield connection
    finally:
        await connection.close()
