"""Components of :class:`pillion.LLM` in this process: a KV node, a decode worker and a gateway without ports.

    caller's thread --submit--> [ thread "pillion-llm": event loop ]
                                  gateway core --in-process calls--> decode worker --> step thread
                                       '---------in-process calls--> KV node (owner of the pool)

There is no network, no Redis and no prefill worker: the components are fixed (:class:`LocalRegistry`), and the one node
reports cached blocks when it opens a request's ticket, so there is no index (I3). Calls between components use
:mod:`pillion.net.in_process`; only the pool's memory is passed through a Unix socket in a private folder, as in a
cluster. Everything else is as in ``pillion serve``, and so are the tokens.

    starting --> serving --close(), the last reference, or the interpreter's end--> calls cancelled, gateway, worker,
                                                                                   node, loop, thread and folder gone
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures

# Imported for its hook at the interpreter's end: this module's hook is registered later, so it runs earlier.
import concurrent.futures.thread
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pillion.config import DecodeFlags, GatewayFlags, KVNodeFlags, OfflineFlags, PrepareFlags
from pillion.errors import PillionError, Unavailable
from pillion.net.addresses import IN_PROCESS
from pillion.rules.weighted_limit import WeightedLimit
from pillion.tasks import end_tasks
from pillion.types import GenerateRequest
from pillion.wire.registry import ComponentRecord

log = logging.getLogger("pillion.llm")

# Max answers in flight over all calls of one LLM; further prompts wait in order. More than a step's sequences, so that
# a prompt is ready when an answer ends. The gateway refuses a request with more answers.
MAX_ANSWERS_AT_ONCE = 512
# The components share a process, so none can die alone, and one that waits for the GIL must not be taken for dead.
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 1000, 600_000
READY_TIMEOUT_S = 60.0
# Timeout of close(). The threads are daemons, so the interpreter's exit does not wait longer.
CLOSE_TIMEOUT_S = 20.0
STOP_GRACE_S = 1.0
NODE_ID, WORKER_ID = "kvnode-0", "decode-0"
CLOSED = "this LLM is closed"

T = TypeVar("T")


class LocalRegistry:
    """An LLM's registry: the KV node and the decode worker of this process, which are always alive."""

    refusal: str = ""

    def __init__(self, node: Any, worker: Any) -> None:
        self._node = node
        self._worker = worker

    async def components(self) -> list[ComponentRecord]:
        """Return the KV node's and the worker's records, as heartbeats would write them now."""
        # Without max_step_tokens the gateway has no waiting queue in front of the worker's.
        worker = msgspec.structs.replace(self._worker.describe(), max_step_tokens=0)
        return [self._node.record(0), worker]

    async def aclose(self) -> None:
        """Do nothing: there is no connection."""


@dataclass(slots=True)
class OfflineCluster:
    """The running components of an LLM. Used only on the event loop's thread.

    Attributes:
        entry: the model with its tokenizer and formats.
        vectors: serves requests for embeddings, scores and labels.
        limit: answers in flight.
    """

    gateway: Any
    entry: Any
    vectors: Any
    limit: WeightedLimit

    def token_text(self, token_id: int) -> str | None:
        """Return the text of one token; None for an id outside the vocabulary."""
        if self.entry.tokenizer.codec.id_to_token(token_id) is None:
            return None
        return str(self.entry.tokenizer.codec.decode([token_id], skip_special_tokens=False))

    @contextlib.asynccontextmanager
    async def templated(self, source: str) -> AsyncIterator[Callable[[GenerateRequest], Awaitable[Any]]]:
        """Yield a function that returns a request's model entry with the chat template ``source``. If ``source`` is "",
        the function returns None, and the gateway uses the model's own template."""
        from pillion.gateway.tokens.chat_template import ChatTemplate

        formats = self.entry.formats
        tokenizer = self.entry.tokenizer
        options = {"marks": tokenizer.marks, "spells_out": formats.spells_out, "spelling": formats.spelling}
        options["defaults"] = self.entry.template.defaults
        template = ChatTemplate(source, tokenizer.specials, **options) if source else None

        async def entry_of(request: GenerateRequest) -> Any:
            if template is None:
                return None
            return replace(await self.gateway.find_entry(request.model, None), template=template)

        try:
            yield entry_of
        finally:
            if template is not None:
                await template.aclose()

    def prompt_text(self, token_ids: list[int]) -> str:
        """Return the text of a prompt, including special tokens."""
        return str(self.entry.tokenizer.codec.decode(token_ids, skip_special_tokens=False))


async def start_cluster(
    flags: OfflineFlags, folder: Path, stack: contextlib.AsyncExitStack, check: Callable[[Path], None]
) -> OfflineCluster:
    """Start the components, and register their stops on ``stack``, also if a later one fails. ``check`` gets the folder
    of the prepared model before it is loaded. Raises ConfigError."""
    from pillion.cli.checks import check_flags
    from pillion.cli.console import Notices
    from pillion.cli.flags import subset
    from pillion.decode_service.assemble import start_decode
    from pillion.engine.backends.devices import pool_device, resolved
    from pillion.gateway.assemble import model_entry
    from pillion.gateway.pooling.vectors import GatewayVectors
    from pillion.kvstore.assemble import start_kvnode
    from pillion.supervisor.local_cluster import prepare_in_child, prepared_model

    flags = resolved(flags)
    heartbeats = {"heartbeat_ms": HEARTBEAT_MS, "heartbeat_timeout_ms": HEARTBEAT_TIMEOUT_MS}
    socket = str(folder / "attach.sock")
    pool = pool_device(flags.device, flags.tensor_parallel_size)
    changes = {"node_id": NODE_ID, "attach_socket": socket, "kv_device": pool}
    listen = f"{IN_PROCESS}{folder}/{NODE_ID}"
    node_flags = subset(KVNodeFlags, flags, **heartbeats, **changes, node_listen=listen, node_advertise=listen)
    listen = f"{IN_PROCESS}{folder}/{WORKER_ID}"
    worker_flags = subset(
        DecodeFlags,
        flags,
        **heartbeats,
        component_id=WORKER_ID,
        listen=listen,
        advertise=listen,
        attach_socket=socket,
    )
    check_flags(node_flags)
    check_flags(worker_flags)
    notices = Notices()
    with notices.progress(f"preparing model {flags.model}") as step:
        await prepare_in_child(subset(PrepareFlags, flags), step)
    model, fit = await asyncio.to_thread(prepared_model, flags)
    check(model.folder)
    if fit is not None and (longest := fit.max_model_len_tokens) < model.max_model_len:
        log.warning("requests may have %d tokens, because the pool of --kv-pool-bytes holds no more", longest)
        model, worker_flags = replace(model, max_model_len=longest), replace(worker_flags, max_model_len=longest)
    entry = await asyncio.to_thread(model_entry, model, flags)
    node = await start_kvnode(node_flags)
    stack.push_async_callback(node.stop, STOP_GRACE_S)
    with notices.progress(f"loading model {flags.model}"):
        worker = await start_decode(worker_flags)
    stack.push_async_callback(worker.stop, STOP_GRACE_S)
    gateway = await _start_gateway(flags, model, entry, LocalRegistry(node, worker.worker), stack)
    await _until_ready(gateway)
    return OfflineCluster(gateway, entry, GatewayVectors(gateway), WeightedLimit(MAX_ANSWERS_AT_ONCE))


async def _start_gateway(
    flags: OfflineFlags, model: Any, entry: Any, registry: LocalRegistry, stack: contextlib.AsyncExitStack
) -> Any:
    from pillion.gateway.gateway import Gateway
    from pillion.gateway.gateway_limits import GatewayLimits
    from pillion.gateway.links.cluster import Cluster
    from pillion.gateway.planning.cluster_snapshot import parse_policy
    from pillion.gateway.request.admitted_request import GatewayOptions

    cluster = Cluster(f"llm-{os.getpid()}", registry, None, HEARTBEAT_TIMEOUT_MS / 1000)
    options = GatewayOptions(
        policy=parse_policy("colocated"),
        # Longer than any prompt: there are no prefill workers to split chunks for.
        chunk_tokens=max(model.max_model_len, flags.block_size),
        max_attempts=GatewayLimits.max_attempts,
        max_inflight_requests=MAX_ANSWERS_AT_ONCE,
        max_inflight_tokens=MAX_ANSWERS_AT_ONCE * model.max_model_len,
        prefix_caching=flags.enable_prefix_caching,
    )
    gateway = Gateway({model.name: entry}, cluster, options, adapters=_adapters(flags, model, cluster.nodes))
    stack.push_async_callback(cluster.aclose)
    stack.push_async_callback(gateway.aclose)
    await cluster.start()
    return gateway


def _adapters(flags: OfflineFlags, model: Any, nodes: Any) -> Any:
    """Return the table of adapter names. Names only come from this process, so any readable folder is allowed."""
    from pillion.cli.flags import subset
    from pillion.gateway.adapters.adapter_names import load_adapters

    if not flags.enable_lora:
        return None
    own = subset(GatewayFlags, flags, lora_path=("/",), allow_runtime_lora_updating=True)
    aliases = dict.fromkeys(model.aliases, model.name)
    return load_adapters({model.name: model.folder}, aliases, own, nodes)


async def _until_ready(gateway: Any) -> None:
    """Wait until the gateway can serve. Raises Unavailable after READY_TIMEOUT_S, with the reason."""
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            while gateway.not_ready():  # noqa: ASYNC110  (there is no event to wait for)
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise Unavailable(f"not ready after {READY_TIMEOUT_S:g} s: {gateway.not_ready()}") from None


class OfflineThread:
    """Event loop, thread and private folder of an :class:`OfflineCluster`. :meth:`close` is idempotent and thread-safe,
    and runs at the interpreter's exit."""

    def __init__(self, flags: OfflineFlags, check: Callable[[Path], None] = lambda folder: None) -> None:
        from pillion.supervisor.runtime_dir import RuntimeDir

        self._pid = os.getpid()
        self._closing = threading.Lock()
        self._closed = False
        self._cluster: OfflineCluster | None = None
        self._folder = RuntimeDir.create()
        self._stack = contextlib.AsyncExitStack()
        self._runs: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="pillion-llm", daemon=True)
        self._thread.start()
        _LIVE.add(self)
        try:
            self._cluster = self.submit(start_cluster(flags, self._folder.path, self._stack, check)).result()
        except KeyboardInterrupt:
            # Only briefly: the user waits for Ctrl-C.
            self.close(1.0)
            raise
        except BaseException:
            self.close()
            raise

    @property
    def cluster(self) -> OfflineCluster:
        """The components of the running cluster. Raises Unavailable once it is closed."""
        if self._cluster is None:
            raise Unavailable(CLOSED)
        return self._cluster

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run ``work`` on the loop. Raises Unavailable if the cluster is closed, or belongs to the parent of a fork."""
        if self._closed or os.getpid() != self._pid:
            work.close()
            raise Unavailable(CLOSED if self._closed else "an LLM cannot be used in a forked process")
        return asyncio.run_coroutine_threadsafe(self._track(work), self._loop)

    def close(self, wait_s: float = CLOSE_TIMEOUT_S) -> None:
        """Cancel all calls, stop all components and remove the folder. Waits at most ``wait_s`` for the loop."""
        if os.getpid() != self._pid:
            return
        if threading.current_thread() is self._thread:
            # The last reference was dropped on the loop's own thread, which cannot wait for itself.
            threading.Thread(target=self.close, name="pillion-llm-close", daemon=True).start()
            return
        with self._closing:
            if self._closed:
                return
            self._closed = True
            ending = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
            try:
                ending.result(wait_s)
            except (PillionError, OSError, RuntimeError, TimeoutError) as error:
                log.log(
                    logging.WARNING if wait_s == CLOSE_TIMEOUT_S else logging.DEBUG,
                    "the LLM did not end properly: %r",
                    error,
                )
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(wait_s)
            self._folder.remove()

    async def _track(self, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work`` in a task that :meth:`close` cancels."""
        task = asyncio.current_task()
        assert task is not None
        self._runs.add(task)
        try:
            return await work
        finally:
            self._runs.discard(task)

    async def _end(self) -> None:
        await end_tasks(*self._runs)
        self._cluster = None
        await self._stack.aclose()
        await end_tasks(*(asyncio.all_tasks() - {asyncio.current_task()}))

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()


_LIVE: weakref.WeakSet[OfflineThread] = weakref.WeakSet()


def _close_all() -> None:
    for thread in list(_LIVE):
        thread.close()


# Closing needs the interpreter's thread pools, which are shut down before functions of ``atexit`` run.
getattr(threading, "_register_atexit", atexit.register)(_close_all)
