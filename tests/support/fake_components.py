"""Scripted peers of the gateway: a KV node, a prefill and a decode worker that compute nothing, over real gRPC.

The decode worker's answer is a script of token ids by position after the prompt, so that a replay can be checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pathlib
import shutil
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import grpc
import numpy as np

from lab.testbed.conditions import until
from lab.testbed.redis import RedisServer, running_redis
from lab.testbed.toy_tokenizer import TEMPLATE, byte_tokenizer, write_tokenizer
from pillion import AsyncClient
from pillion.config import GatewayFlags
from pillion.engine.checkpoints.prepare import PreparedModel
from pillion.errors import Conflict, NotFound, Overloaded, PillionError
from pillion.gateway.assemble import start_gateway
from pillion.gateway.gateway_limits import GatewayLimits
from pillion.gateway.gateway_server import GatewayServer
from pillion.gateway.tokens.chat_template import ChatTemplate
from pillion.kvstore.index.index import PrefixHit
from pillion.kvstore.index.registry import Registry
from pillion.net import rpc
from pillion.types import FinishReason, TokenLogprob
from pillion.v1 import decode_pb2_grpc, kvnode_pb2, kvnode_pb2_grpc, prefill_pb2_grpc
from pillion.v1.common_pb2 import Queued
from pillion.v1.decode_pb2 import DecodeBatch, DecodeDelta, DecodeError, DecodeTimings, Submit
from pillion.v1.prefill_pb2 import ChunkAck, RunPrefillRequest
from pillion.wire.common import check_hello, finish_to_pb, hello_to_pb, logprob_to_pb
from pillion.wire.registry import ComponentRecord
from tests.support.fixed_limits import split_limits
from tests.support.patient_calls import patient_calls
from tests.support.redis_nodes import patient

BLOCK = 4
NAMESPACE = "ab" * 32
FINGERPRINT = "cd" * 32
EOS = 257
MAX_LEN = 256


def record(component_id: str, role: str, address: str, **more: Any) -> ComponentRecord:
    """Return the registry record of a component of the toy model."""
    served = {} if role == "kvnode" else {"model": "toy", "fingerprint": FINGERPRINT, "namespace": NAMESPACE}
    fields = {"block_size_tokens": BLOCK, "max_model_len_tokens": MAX_LEN, "node_id": "kv-0"} | served | more
    return ComponentRecord(component_id=component_id, role=role, address=address, **fields)


def vector_of(token_ids: Sequence[int]) -> np.ndarray:
    """Return the vector of a text at a fake decode worker: of a fixed length, and dependent on all tokens."""
    return np.array([len(token_ids), sum(token_ids), *token_ids[:1], *token_ids[-1:]], "<f4")


def logits_of(token_ids: Sequence[int], wanted: Sequence[int]) -> np.ndarray:
    """Return the logits of tokens after a text, with which a fake worker ends its stream."""
    return np.array([(sum(token_ids) * (1 + one)) % 7 - 3 for one in wanted], "<f4")


def script_of(text: str) -> tuple[int, ...]:
    """Return the tokens that a decode worker samples to write ``text`` and end."""
    return (*byte_tokenizer().encode(text).ids, EOS)


class FakeKVNode(kvnode_pb2_grpc.KVNodeServicer):
    """Grants every ticket, with ``pinned`` blocks.

    ``brings``: ends of the chain after the next prefetches, or errors; by default everything requested.
    """

    def __init__(self, node_id: str = "kv-0") -> None:
        self.node_id = node_id
        self.pinned = 0
        self.brings: list[int | PillionError] = []
        self.fetches: list[kvnode_pb2.PrefetchRequest] = []
        self.fetch_gate = asyncio.Event()
        self.fetch_gate.set()
        self.fetching = 0
        self.opened: list[kvnode_pb2.OpenTicketRequest] = []
        self.held: dict[int, int] = {}
        self.forgotten: set[int] = set()
        self.failures: list[PillionError] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.waiting = 0
        self.metadata: list[Any] = []
        self._epochs = itertools.count(1000)
        self._tickets = itertools.count(1)
        self._by_nonce: dict[int, int] = {}

    async def OpenSession(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        check_hello(request.hello)
        epoch = next(self._epochs)
        context.add_done_callback(lambda _: self._drop(epoch))
        yield kvnode_pb2.SessionEvent(hello=hello_to_pb(self.node_id), epoch=epoch)
        await asyncio.Event().wait()

    async def OpenTicket(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.metadata.append(context.invocation_metadata())
        self.opened.append(request)
        await self.granted()
        ticket = next(self._tickets)
        if request.nonce not in self.forgotten:
            self.held[ticket] = request.epoch
            self._by_nonce[request.nonce] = ticket
        blocks = min(self.pinned, len(request.block_hashes) // 32)
        return kvnode_pb2.OpenTicketReply(ticket_id=ticket, pinned_blocks=blocks)

    async def granted(self) -> None:
        """Return when there is memory. Raises the test's error."""
        self.waiting += 1
        try:
            await self.gate.wait()
        finally:
            self.waiting -= 1
        if self.failures:
            raise self.failures.pop(0)

    async def ReleaseTicket(self, request: Any, context: Any) -> Any:  # noqa: N802
        for ticket in request.ticket_ids:
            assert self.held.get(ticket) == request.epoch, "released twice, or by a stranger"
            del self.held[ticket]
        self.forgotten.update(request.nonces)
        for nonce in request.nonces:
            self.held.pop(self._by_nonce.get(nonce, 0), None)
        return kvnode_pb2.ReleaseTicketReply()

    async def Prefetch(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.fetches.append(request)
        outcome = self.brings.pop(0) if self.brings else len(request.block_hashes) // 32
        self.fetching += 1
        try:
            await self.fetch_gate.wait()
        finally:
            self.fetching -= 1
        if isinstance(outcome, PillionError):
            raise outcome
        if self.held.get(request.ticket_id) != request.epoch:
            raise NotFound("no such ticket")
        return kvnode_pb2.PrefetchReply(blocks=outcome, fetched_blocks=outcome, fetched_ms=1.0)

    async def FindAdapters(self, request: Any, context: Any) -> Any:  # noqa: N802
        return kvnode_pb2.FindAdaptersReply()

    def _drop(self, epoch: int) -> None:
        self.held = {ticket: holder for ticket, holder in self.held.items() if holder != epoch}


class FakePrefill(prefill_pb2_grpc.PrefillServicer):
    """Acknowledges chunk by chunk. ``failures`` are (chunks before it, error), one per prefill range.

    ``hang_at``: the chunk that is never computed. ``breaks_at``: queue positions at which the connection breaks, one
    per prefill range; at 0 its first step has begun.
    """

    def __init__(self) -> None:
        self.breaks_at: list[int] = []
        self.hang_at: int | None = None
        self.prefill_ranges: list[RunPrefillRequest] = []
        self.failures: list[tuple[int, PillionError]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.running = 0
        self.tells_queued = False
        self.metadata: list[Any] = []
        # By ticket: set when its prefill range is done.
        self.through: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)

    async def RunPrefill(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        check_hello(request.hello)
        self.prefill_ranges.append(request)
        self.metadata.append(context.invocation_metadata())
        fail_at, error = self.failures.pop(0) if self.failures else (-1, Conflict(""))
        if self.breaks_at:
            yield ChunkAck(end_tokens=request.start_tokens, queued=Queued(position=self.breaks_at.pop(0)))
            await context.abort(grpc.StatusCode.UNAVAILABLE, "pulled the plug")
        end = request.start_tokens
        self.running += 1
        try:
            for index, tokens in enumerate(request.chunk_tokens):
                if index == fail_at:
                    raise error
                while self.tells_queued and not self.gate.is_set():
                    yield ChunkAck(end_tokens=end, queued=Queued(position=2))
                    await asyncio.sleep(0.05)
                await (asyncio.Event() if index == self.hang_at else self.gate).wait()
                end += tokens
                if index == len(request.chunk_tokens) - 1:
                    self.through[request.ticket_id].set()
                yield ChunkAck(chunk_index=index, end_tokens=end, queue_ms=0.5, compute_ms=1.0)
        finally:
            self.running -= 1


class FakeDecode(decode_pb2_grpc.DecodeServicer):
    """Streams ``script`` after the prompt, ``per_delta`` tokens at a time, then ends with EOS or max_tokens.

    ``scripts``: another script by seed, for several answers. ``break_after``: number of tokens (all streams together)
    until the connection breaks, once. ``refusals``: errors for the next submits, with the message ``refusal``; with
    ``refuses_in_step`` they come in one delta with the beginning of the prompt's step and the first token. ``gate``:
    while closed, no stream continues; a stream closes it after ``hold_after`` tokens, so that only the test ends it.
    ``silent``: keys of streams that send nothing any more. ``pace_s``: seconds per step of a stream. ``is_killed_by``:
    predicate for submits in whose first step the connection breaks. ``breaks_in_line``: number of further submits
    during whose queueing it breaks.
    """

    def __init__(self, script: str) -> None:
        self.script = script_of(script)
        self.scripts: dict[int, tuple[int, ...]] = {}
        self.worth: dict[int, float] = {}
        self.per_delta = 1
        # Sent at the end, and with each delta if there are drafts.
        self.timings = DecodeTimings(tail_tokens=1, tail_steps=1, queue_ms=0.25)
        self.pace_s = 0.001
        self.is_killed_by: Callable[[Submit], bool] = lambda submit: False
        self.breaks_in_line = 0
        # True if streams and prefill ranges blocked by the gate report every 50 ms that they are queued.
        self.tells_queued = False
        self.submits: list[Submit] = []
        self.cancelled: list[int] = []
        self.connections = 0
        self.break_after: int | None = None
        # Remaining breaks of the connection amid the scores of a prompt.
        self.breaks_amid_scores = 0
        self.scores_per_delta = 8
        # Older workers end such a stream without a vector.
        self.knows_vectors = True
        self.refusals: list[tuple[int, bool]] = []
        self.refusal, self.refuses_in_step = "refused by the script", False
        self.silent: set[int] = set()
        self.hold_after: int | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.streams: set[asyncio.Task[None]] = set()
        self.most_streams = 0
        self.prefill = FakePrefill()
        self.node = FakeKVNode()

    def logprob(self, submit: Submit, at: int, token_id: int) -> TokenLogprob:
        """Return the log probability of the answer's token at position ``at``: decreasing with it, exact in 32 bits.

        ``worth`` of the seed is added, so that answers can be ranked.
        """
        value, count = self.worth.get(submit.sampling.seed, 0.0) - (at + 1) / 64, submit.sampling.logprobs
        tops = range(token_id, token_id + count)
        return TokenLogprob(token_id, value, tuple(tops), tuple(value - n for n in range(count)))

    async def Connect(self, commands: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        check_hello((await anext(commands)).hello)
        self.connections += 1
        out: asyncio.Queue[DecodeDelta | None] = asyncio.Queue()
        streams: dict[int, asyncio.Task[None]] = {}
        reader = asyncio.create_task(self._read(commands, streams, out))
        try:
            while (delta := await out.get()) is not None:
                yield DecodeBatch(deltas=[delta])
            await context.abort(grpc.StatusCode.UNAVAILABLE, "pulled the plug")
        finally:
            for task in (reader, *streams.values()):
                task.cancel()

    async def _read(self, commands: Any, streams: dict[int, asyncio.Task[None]], out: asyncio.Queue[Any]) -> None:
        async for command in commands:
            if command.HasField("submit"):
                submit = command.submit
                self.submits.append(submit)
                computed = asyncio.Event()
                works = {submit.key: self._lead(submit, computed, out)}
                for sample in submit.siblings:
                    own = Submit()
                    own.CopyFrom(submit)
                    own.key, own.sampling.seed = sample.key, sample.seed
                    works[sample.key] = self._follow(own, computed, out)
                for key, work in works.items():
                    assert key not in streams, "a key is used once"
                    task = streams[key] = asyncio.create_task(work)
                    self.streams.add(task)
                    task.add_done_callback(self.streams.discard)
                self.most_streams = max(self.most_streams, len(self.streams))
            elif command.HasField("cancel"):
                self.cancelled.append(command.cancel.key)
                streams[command.cancel.key].cancel()

    async def _lead(self, submit: Submit, computed: asyncio.Event, out: asyncio.Queue[Any]) -> None:
        if self.refusals:
            code, retryable = self.refusals.pop(0)
            delta = DecodeDelta(key=submit.key)
            delta.error.CopyFrom(DecodeError(code=code, message=self.refusal, retryable=retryable))
            if self.refuses_in_step:
                delta.queued.CopyFrom(Queued())
                delta.token_ids.append(self.script[0])
            out.put_nowait(delta)
            return
        if submit.awaited_blocks:
            await self.prefill.through[submit.ticket_id].wait()
        pinned = min(self.node.pinned, len(submit.block_hashes) // 32)
        if not submit.ticket_id:
            try:
                await self.node.granted()
                if pinned < submit.expected_blocks:
                    raise NotFound("less is here")
            except PillionError as error:
                refused = DecodeError(code=error.code, message=error.message)
                refused.retryable = not isinstance(error, Overloaded)
                refused.retry_after_ms = 0 if refused.retryable else error.retry_after_ms
                out.put_nowait(DecodeDelta(key=submit.key, error=refused))
                return
        if self.is_killed_by(submit):
            out.put_nowait(DecodeDelta(key=submit.key, queued=Queued()))
            out.put_nowait(None)
            return
        out.put_nowait(DecodeDelta(key=submit.key, pinned_blocks=pinned))
        if self.breaks_in_line:
            self.breaks_in_line -= 1
            out.put_nowait(DecodeDelta(key=submit.key, queued=Queued(position=3)))
            out.put_nowait(None)
            return
        while self.tells_queued and not self.gate.is_set():
            out.put_nowait(DecodeDelta(key=submit.key, queued=Queued(position=3)))
            await asyncio.sleep(0.05)
        await self.gate.wait()
        if submit.sampling.HasField("prompt_logprobs") and not await self._score(submit, out):
            return
        if submit.pooled or submit.pooled_rows:
            ended = finish_to_pb(FinishReason.LENGTH)
            row = logits_of(submit.token_ids, submit.pooled_ids) if submit.pooled_ids else vector_of(submit.token_ids)
            vector = row.tobytes() if self.knows_vectors else b""
            out.put_nowait(DecodeDelta(key=submit.key, finish_reason=ended, vector=vector))
            return
        computed.set()
        await self._stream(submit, out)

    async def _score(self, submit: Submit, out: asyncio.Queue[Any]) -> bool:
        """Score the prompt, ``scores_per_delta`` tokens at a time. False: the connection breaks after the first."""
        tokens = submit.token_ids[: submit.prompt_tokens]
        for at in range(submit.scored_tokens + 1, len(tokens), self.scores_per_delta):
            await asyncio.sleep(self.pace_s)
            delta = DecodeDelta(key=submit.key)
            for place, token in enumerate(tokens[at : at + self.scores_per_delta], at):
                tops = range(token, token + submit.sampling.prompt_logprobs)
                scored = TokenLogprob(token, -place / 64, tuple(tops), tuple(-float(n) for n in tops), 2)
                delta.prompt_logprobs.append(logprob_to_pb(scored))
            out.put_nowait(delta)
            if self.breaks_amid_scores:
                self.breaks_amid_scores -= 1
                out.put_nowait(None)
                return False
        return True

    async def _follow(self, sample: Submit, computed: asyncio.Event, out: asyncio.Queue[Any]) -> None:
        await computed.wait()
        await self._stream(sample, out)

    @property
    def holds(self) -> bool:
        """Return True if a stream is held after ``hold_after`` tokens."""
        return bool(self.streams) and not self.gate.is_set()

    def go_on(self) -> None:
        self.hold_after = None
        self.gate.set()

    async def _stream(self, submit: Submit, out: asyncio.Queue[Any]) -> None:
        script = self.scripts.get(submit.sampling.seed, self.script)
        at, reason = len(submit.token_ids) - submit.prompt_tokens, None
        while reason is None:
            if at == self.hold_after:
                self.gate.clear()
            await self.gate.wait()
            await asyncio.sleep(self.pace_s)
            if submit.key in self.silent:
                await asyncio.Event().wait()
            begun, ids = at, script[at : at + self.per_delta][: submit.max_tokens - at]
            at += len(ids)
            if self.break_after is not None:
                self.break_after -= len(ids)
                if self.break_after <= 0:
                    self.break_after = None
                    out.put_nowait(None)
                    return
            ended = [n for n, one in enumerate(ids) if one in submit.stop_token_ids]
            if ended:
                ids, reason = ids[: ended[0] + 1], FinishReason.STOP
            elif at >= submit.max_tokens:
                reason = FinishReason.LENGTH
            delta = DecodeDelta(key=submit.key, token_ids=ids, finish_reason=finish_to_pb(reason))
            if submit.sampling.HasField("logprobs"):
                delta.logprobs.extend(logprob_to_pb(self.logprob(submit, begun + n, one)) for n, one in enumerate(ids))
            if reason or self.timings.guessed_tokens:
                delta.timings.CopyFrom(self.timings)
            out.put_nowait(delta)


def knows(fakes: FakeCluster, **hits: int) -> None:
    """Set the index's answer for every prompt from now on: ``kv_0=3`` is three blocks on kv-0."""
    found = [PrefixHit(name.replace("_", "-"), blocks) for name, blocks in hits.items()]

    async def longest_prefix(_: bytes) -> list[PrefixHit]:
        return sorted(found, key=lambda hit: -hit.blocks)

    fakes.gateway.cluster.index.longest_prefix = longest_prefix


@dataclass
class FakeCluster:
    """Fake peers, a real registry, and a real gateway before them. The far ones, if running, are on the node kv-1."""

    node: FakeKVNode
    prefill: FakePrefill
    decode: FakeDecode
    far_node: FakeKVNode
    far_prefill: FakePrefill
    gateway: GatewayServer
    client: AsyncClient
    registry: Registry
    redis: RedisServer
    folder: pathlib.Path
    servers: dict[str, rpc.RunningServer] = field(default_factory=dict)

    async def settled(self) -> None:
        """Return when nothing is in flight anywhere. Raises AssertionError for leftovers."""
        core = self.gateway.gateway
        for node in (self.node, self.far_node):
            await until(
                "a node at rest and no request under way",
                lambda n=node: not (n.held or n.waiting or n.fetching or core.active_requests),
            )
        await until(
            "all workers to be at rest",
            lambda: not (self.prefill.running or self.far_prefill.running or self.decode.streams),
        )
        assert core.admission.tokens == 0
        assert not self.gateway.cluster.load.busy(), self.gateway.cluster.load.busy()


def impatient_client(fakes: FakeCluster) -> AsyncClient:
    """Return a client that does not wait for a lost gateway: no other will listen at its address."""
    return AsyncClient(fakes.gateway.grpc_address, connect_timeout_s=0, resume_timeout_s=0)


def toy_model(folder: pathlib.Path, **tokenizer: Any) -> PreparedModel:
    """Write a model that consists of its tokenizer."""
    return PreparedModel(
        folder=write_tokenizer(folder, byte_tokenizer(), **tokenizer),
        name="toy",
        fingerprint=FINGERPRINT,
        dtype="float32",
        max_model_len=MAX_LEN,
        vocab_size=259,
        eos_token_ids=(EOS,),
        bos_token_id=None,
        aliases=("models/toy",),
        weights="gptq, 8 bits",
    )


@contextlib.contextmanager
def short_folder() -> Iterator[pathlib.Path]:
    """Yield a short folder: a Unix socket's path is limited to some hundred characters, and pytest's folders are
    longer."""
    with tempfile.TemporaryDirectory(prefix="plf-") as name:
        yield pathlib.Path(name)


@contextlib.asynccontextmanager
async def running_fake_cluster(
    script: str = "The answer.",
    roles: str = "kvnode prefill decode",
    template: str = TEMPLATE,
    config: pathlib.Path | None = None,
    **flags: Any,
) -> AsyncIterator[FakeCluster]:
    """Run Redis, the fake components of ``roles``, and a gateway with ``flags`` whose model has the ``template``.

    "far-kvnode" and "far-prefill" are those of the node kv-1. With ``config``, a config.json, the workers support
    adapters for such a model.
    """
    node, prefill, decode = FakeKVNode(), FakePrefill(), FakeDecode(script)
    far_node, far_prefill = FakeKVNode("kv-1"), FakePrefill()
    decode.prefill, decode.node = prefill, node
    add_node, add_prefill = kvnode_pb2_grpc.add_KVNodeServicer_to_server, prefill_pb2_grpc.add_PrefillServicer_to_server
    services = {
        "kvnode": ("kv-0", "KVNode", node, add_node),
        "prefill": ("prefill-0", "Prefill", prefill, add_prefill),
        "decode": ("decode-0", "Decode", decode, decode_pb2_grpc.add_DecodeServicer_to_server),
        "far-kvnode": ("kv-1", "KVNode", far_node, add_node),
        "far-prefill": ("prefill-1", "Prefill", far_prefill, add_prefill),
    }
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(short_folder())
        stack.enter_context(patient_calls())
        redis = stack.enter_context(running_redis())
        url = redis.url
        registry = patient(Registry(url, 600_000))
        stack.push_async_callback(registry.aclose)
        servers = {}
        for role in roles.split():
            component_id, name, servicer, add = services[role]
            address = f"unix:{folder}/{role}.sock"
            servers[role] = await rpc.start_server(
                address, [(f"pillion.v1.{name}", lambda s, a=add, v=servicer: a(v, s))]
            )
            stack.push_async_callback(servers[role].stop, 0)
            far = {"node_id": "kv-1"} if role.startswith("far-") else {}
            runs = {"max_loras": 4, "max_lora_rank": 16} if config and not role.endswith("kvnode") else {}
            await registry.heartbeat(record(component_id, role.removeprefix("far-"), address, **far, **runs))
        options = {"redis_url": url, "block_size": BLOCK, "chunk_size": 8, "http_port": 0, "grpc_port": 0}
        options |= {"split_policy": "disaggregated"} | flags
        options, limits = split_limits(GatewayLimits, options)
        model = toy_model(folder / "model", template=template)
        if config is not None:
            shutil.copy(config, model.folder)
        # The template process starts with the first conversation, which most tests lack.
        with mock.patch.object(ChatTemplate, "warm_up"):
            gateway = await start_gateway(GatewayFlags(**options), prepared=model, limits=limits)
        stack.push_async_callback(gateway.stop, 0)
        client = await stack.enter_async_context(AsyncClient(gateway.grpc_address))
        if "decode" in roles and "kvnode" in roles:
            await until("a model to be served", gateway.gateway.models)
        if "far-kvnode" in roles:
            await until("a session at kv-1", lambda: gateway.cluster.node_lives("kv-1"))
        yield FakeCluster(
            node, prefill, decode, far_node, far_prefill, gateway, client, registry, redis, folder, servers
        )
