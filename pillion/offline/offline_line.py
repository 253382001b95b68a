"""The parts behind :class:`pillion.LLM`, in this process: a KV node, a decode worker and a gateway without ports.

    caller's thread --submit--> [ thread "pillion-llm": event loop ]
                                  gateway core --unix sockets in a private folder--> decode worker --> step thread
                                                                       '--> KV node (owner of the pool) <--'

There is no network, no Redis and no prefill worker: who lives is known (:class:`LocalRegistry`), and what is cached the
one node says itself when a request's ticket is opened, so the index is empty (:class:`NoIndex`, I3). Everything else is
what ``pillion serve`` runs, and so are the tokens.

    starting --> serving --close(), the last reference, or the interpreter's end--> calls cancelled, gateway, worker,
                                                                                   node, loop, thread and folder gone
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures

# Its own hook for the interpreter's end is registered by this import; ours has to come later, so as to run before it.
import concurrent.futures.thread
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pillion.config import DecodeFlags, KVNodeFlags, OfflineFlags
from pillion.errors import PillionError, Unavailable
from pillion.types import GenerateRequest
from pillion.wire.registry import ComponentRecord

if TYPE_CHECKING:
    from pillion.supervisor.runtime_dir import RuntimeDir

log = logging.getLogger("pillion.llm")

# Answers under way at once, over all calls of one LLM; more wait in the order of their prompts. More than run in a
# step, so that prompts are ready when an answer ends; a request of more answers than this is refused.
MAX_ANSWERS_AT_ONCE = 512
# The parts share a process: none falls silent alone, and one that waits for the interpreter is not lost.
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 1000, 600_000
READY_TIMEOUT_S = 60.0
READY_POLL_S = 0.01
# Longest wait of close(); the threads are daemons, so the interpreter's end does not wait for them longer.
CLOSE_TIMEOUT_S = 20.0
MAX_ATTEMPTS = 4
# For what the parts have to tell each other when they end.
STOP_GRACE_S = 1.0
NODE_ID, WORKER_ID = "kvnode-0", "decode-0"

T = TypeVar("T")


class LocalRegistry:
    """The registry of a process that holds all parts: they live as long as it does."""

    def __init__(self, *records: ComponentRecord) -> None:
        self._records = records

    async def components(self) -> list[ComponentRecord]:
        """Always the same."""
        return list(self._records)

    async def aclose(self) -> None:
        """Holds nothing."""


class NoIndex:
    """Knows of no blocks: with one node, its own word comes as early."""

    available = True

    async def longest_prefix(self, block_hashes: bytes) -> list[Any]:
        """Nobody else has any."""
        return []

    async def aclose(self) -> None:
        """Holds nothing."""


class Room:
    """At most ``most`` answers inside, first come, first served."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._inside = 0
        self._turn = asyncio.Lock()
        self._left = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def holding(self, answers: int) -> AsyncIterator[None]:
        """Waits for room. More than there ever is are let in alone: the gateway refuses them in its own words."""
        async with self._turn, self._left:
            await self._left.wait_for(lambda: self._inside == 0 or self._inside + answers <= self._most)
            self._inside += answers
        try:
            yield
        finally:
            async with self._left:
                self._inside -= answers
                self._left.notify_all()


@dataclass(slots=True)
class Line:
    """The running parts. For the loop's own thread."""

    gateway: Any
    entry: Any
    room: Room
    stack: contextlib.AsyncExitStack

    async def generate(self, request: GenerateRequest) -> Any:
        """As :meth:`pillion.gateway.gateway.Gateway.generate`."""
        return await self.gateway.generate(request)

    def token_text(self, token_id: int) -> str | None:
        """Text of one token; None for a number that is none."""
        if self.entry.tokenizer.codec.id_to_token(token_id) is None:
            return None
        return str(self.entry.tokenizer.codec.decode([token_id], skip_special_tokens=False))

    def prompt_text(self, token_ids: list[int]) -> str:
        """The text of a prompt, special tokens and all."""
        return str(self.entry.tokenizer.codec.decode(token_ids, skip_special_tokens=False))


async def start_line(flags: OfflineFlags, folder: Path) -> Line:
    """Raises ConfigError for what cannot work; nothing is left behind then."""
    from pillion.cli.checks import check_flags
    from pillion.cli.flags import subset
    from pillion.decode_service.decode_server import start_decode
    from pillion.engine.backends.backend import kv_layout
    from pillion.engine.backends.devices import pool_device, resolved
    from pillion.engine.checkpoints.prepare import prepare
    from pillion.gateway.gateway_server import model_entry
    from pillion.kvstore.node.kv_node import start_kvnode
    from pillion.supervisor.pool_fit import fit_pool

    flags = resolved(flags)
    beats = {"heartbeat_ms": HEARTBEAT_MS, "heartbeat_timeout_ms": HEARTBEAT_TIMEOUT_MS}
    socket = str(folder / "attach.sock")
    listen = f"unix:{folder}/{NODE_ID}.sock"
    own = {"node_id": NODE_ID, "node_listen": listen, "attach_socket": socket, "kv_device": pool_device(flags.device)}
    node_flags = subset(KVNodeFlags, flags, **beats, **own)
    listen = f"unix:{folder}/{WORKER_ID}.sock"
    worker_flags = subset(
        DecodeFlags,
        flags,
        **beats,
        component_id=WORKER_ID,
        listen=listen,
        attach_socket=socket,
        max_waiting_seqs=2 * MAX_ANSWERS_AT_ONCE,
    )
    check_flags(node_flags)
    check_flags(worker_flags)
    model = await asyncio.to_thread(prepare, flags, log.info)
    if flags.kv_pool_bytes:
        fit_pool(
            kv_pool_bytes=flags.kv_pool_bytes,
            block_bytes=kv_layout(model, flags.block_size).block_bytes,
            block_size_tokens=flags.block_size,
            max_model_len_tokens=model.max_model_len,
            decode_reserve_percent=flags.decode_reserve_percent,
            decode_workers=1,
        )
    entry = await asyncio.to_thread(model_entry, model)
    async with contextlib.AsyncExitStack() as stack:
        node = await start_kvnode(node_flags)
        stack.push_async_callback(node.stop, STOP_GRACE_S)
        worker = await start_decode(worker_flags)
        stack.push_async_callback(worker.stop, STOP_GRACE_S)
        gateway = await _start_gateway(flags, model, entry, _records(node, worker), stack)
        await _until_ready(gateway)
        return Line(gateway, entry, Room(MAX_ANSWERS_AT_ONCE), stack.pop_all())
    raise AssertionError("the stack swallows nothing")


def _records(node: Any, component: Any) -> tuple[ComponentRecord, ComponentRecord]:
    """What the heartbeats of both would say."""
    worker = component.worker
    prepared = worker.model.prepared
    return (
        ComponentRecord(
            component_id=NODE_ID,
            role="kvnode",
            address=node.address,
            node_id=NODE_ID,
            total_blocks=node.status().total_blocks,
        ),
        ComponentRecord(
            component_id=WORKER_ID,
            role="decode",
            address=component.address,
            model=prepared.name,
            fingerprint=prepared.fingerprint,
            namespace=worker.model.namespace().hex(),
            block_size_tokens=worker.block_size,
            max_model_len_tokens=worker.max_model_len,
            vocab_size=worker.model.backend.vocab_size,
            node_id=NODE_ID,
            kernels=worker.model.operators,
        ),
    )


async def _start_gateway(
    flags: OfflineFlags, model: Any, entry: Any, records: tuple[ComponentRecord, ...], stack: contextlib.AsyncExitStack
) -> Any:
    from pillion.gateway.gateway import Gateway, GatewayOptions
    from pillion.gateway.links.cluster import Cluster
    from pillion.gateway.planning.cluster_snapshot import parse_policy

    cluster = Cluster(f"llm-{os.getpid()}", LocalRegistry(*records), NoIndex(), HEARTBEAT_TIMEOUT_MS / 1000)
    options = GatewayOptions(
        policy=parse_policy("colocated"),
        # No span is longer than the longest prompt: here nobody runs spans.
        chunk_tokens=max(model.max_model_len, flags.block_size),
        max_attempts=MAX_ATTEMPTS,
        max_inflight_requests=MAX_ANSWERS_AT_ONCE,
        max_inflight_tokens=MAX_ANSWERS_AT_ONCE * model.max_model_len,
        prefix_caching=flags.enable_prefix_caching,
    )
    gateway = Gateway({model.name: entry}, cluster, options)
    stack.push_async_callback(cluster.aclose)
    stack.push_async_callback(gateway.aclose)
    await cluster.start()
    return gateway


async def _until_ready(gateway: Any) -> None:
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            while gateway.not_ready():  # noqa: ASYNC110  (nobody sends an event)
                await asyncio.sleep(READY_POLL_S)
    except TimeoutError:
        raise Unavailable(f"not ready after {READY_TIMEOUT_S:g} s: {gateway.not_ready()}") from None


class LineThread:
    """Owns the loop, its thread and the folder of a :class:`Line`. ``close`` may be called anywhere, any number of
    times; the interpreter's end calls it too."""

    def __init__(self, flags: OfflineFlags) -> None:
        from pillion.supervisor.runtime_dir import RuntimeDir

        self._pid = os.getpid()
        self._closing = threading.Lock()
        self._closed = False
        self.line: Line | None = None
        self._folder: RuntimeDir = RuntimeDir.create()
        self._runs: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="pillion-llm", daemon=True)
        self._thread.start()
        _close_at_exit(self)
        try:
            self.line = self.submit(start_line(flags, self._folder.path)).result()
        except BaseException:
            self.close()
            raise

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Runs ``work`` on the loop. Raises Unavailable once closed."""
        if self._closed or os.getpid() != self._pid:
            work.close()
            raise Unavailable("this LLM is closed" if self._closed else "an LLM cannot be used in a forked process")
        return asyncio.run_coroutine_threadsafe(self._tracked(work), self._loop)

    def close(self) -> None:
        """Cancels what runs and ends everything; returns when nothing of it is left."""
        if os.getpid() != self._pid:
            return
        if threading.current_thread() is self._thread:
            # The last reference went away in the loop's own thread, which cannot wait for itself.
            threading.Thread(target=self.close, name="pillion-llm-close", daemon=True).start()
            return
        with self._closing:
            if self._closed:
                return
            self._closed = True
            ending = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
            try:
                ending.result(CLOSE_TIMEOUT_S)
            except (PillionError, OSError, RuntimeError, TimeoutError) as error:
                log.warning("the LLM did not end as it should: %r", error)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_TIMEOUT_S)
            self._folder.remove()

    async def _tracked(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._runs.add(task)
        try:
            return await work
        finally:
            self._runs.discard(task)

    async def _end(self) -> None:
        # What callers wait for first, and a start that has not ended, which undoes itself.
        await _cancel(list(self._runs))
        line, self.line = self.line, None
        if line is not None:
            await line.stack.aclose()
        await _cancel([task for task in asyncio.all_tasks() if task is not asyncio.current_task()])

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            asyncio.set_event_loop(None)
            self._loop.close()


async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class GrpcNoise(logging.Filter):
    """Drops a record that says nothing: grpc.aio wakes every event loop of a process for each event, and asyncio logs a
    BlockingIOError wherever another loop was faster (grpc/grpc issue 25364). A notebook has a loop beside ours."""

    def filter(self, record: logging.LogRecord) -> bool:
        """False for that record."""
        error = record.exc_info[1] if record.exc_info else None
        return not (isinstance(error, BlockingIOError) and "PollerCompletionQueue" in record.getMessage())


_NOISE = GrpcNoise()
_LIVE: weakref.WeakSet[LineThread] = weakref.WeakSet()
_AT_EXIT = threading.Lock()
_registered = False


def _close_at_exit(thread: LineThread) -> None:
    """``thread`` is closed before the interpreter ends its thread pools, which closing needs; ``atexit`` comes after
    that."""
    global _registered
    logging.getLogger("asyncio").addFilter(_NOISE)
    with _AT_EXIT:
        _LIVE.add(thread)
        if not _registered:
            getattr(threading, "_register_atexit", atexit.register)(_close_all)
            _registered = True


def _close_all() -> None:
    for thread in list(_LIVE):
        thread.close()
