"""Loading of adapters by a worker: transfer of the files to its machine, and packing for its backend.

    request --fetch--> the files are in this machine's store, or come from the worker's KV node, verified by digest
    scheduler's order --load--> a subprocess reads and packs them during steps --> the scheduler places the adapter
                                                                                   between two steps

Requests for one adapter share a transfer. An unavailable adapter fails only these requests, which the gateway may plan
on another worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from pillion.engine.adapters.adapter_process import READ_TIMEOUT_S, AdapterProcess
from pillion.engine.adapters.adapter_store import AdapterStore
from pillion.engine.backends.backend import Backend, PackedAdapter, bound_adapters
from pillion.errors import (
    ConfigError,
    Internal,
    InvalidRequest,
    NotFound,
    Overloaded,
    PillionError,
    Unavailable,
)
from pillion.host.adapter_folders import TRANSFER_TIMEOUT_S
from pillion.kvstore.adapters.adapter_pieces import next_piece, receive_files
from pillion.kvstore.client.node_client import NodeClient
from pillion.observability import metric_catalog
from pillion.observability.metrics import Meters

log = logging.getLogger("pillion.worker")

MAX_TRANSFERS = 2
MAX_PENDING_FETCHES = 256


class AdapterLoader:
    """Adapter loader of one worker.

    Args:
        process: runs the jobs of an AdapterReader; closed by the loader.
        backend: backend for which adapters are packed.
        store_bytes: max size of all adapters on the worker's machine.
        node: client of the worker's KV node.
    """

    def __init__(
        self, process: AdapterProcess, backend: Backend, store_bytes: int, node: NodeClient, meters: Meters
    ) -> None:
        self._process = process
        self._backend = backend
        self._store = AdapterStore(store_bytes=store_bytes, digest_of=process.digest)
        self._node = node
        self._fetches: dict[str, asyncio.Task[None]] = {}
        self._transfers = asyncio.Semaphore(MAX_TRANSFERS)
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "pillion-adapter")
        self._thread.submit(process.start)
        self._loads = {
            ok: meters.counter(metric_catalog.ADAPTER_LOADS, "ok" if ok else "failed") for ok in (True, False)
        }
        self._durations = meters.distribution(metric_catalog.ADAPTER_LOAD)
        self._transferred = meters.counter(metric_catalog.ADAPTER_TRANSFERS)

    async def fetch(self, digest: str) -> None:
        """Wait until the adapter's files are in this machine's store. Raises NotFound, Unavailable or Overloaded if
        they cannot be fetched; on another worker's machine they may be available."""
        try:
            self._store.find(digest)
        except NotFound:
            pass
        else:
            return
        fetch = self._fetches.get(digest)
        if fetch is None:
            if len(self._fetches) >= MAX_PENDING_FETCHES:
                raise Overloaded(f"{MAX_PENDING_FETCHES} adapters are already being fetched by this worker")
            fetch = self._fetches[digest] = asyncio.create_task(self._fetch(digest))
            fetch.add_done_callback(lambda task: self._on_fetched(digest, task))
        # Shielded: the transfer continues if one of its waiters is cancelled.
        await asyncio.shield(fetch)

    async def load(self, digest: str) -> PackedAdapter:
        """Read and pack an adapter. Raises PillionError; InvalidRequest for one that this worker can never run."""
        loop = asyncio.get_running_loop()
        try:
            # The store may have evicted the copy since the request arrived.
            await self.fetch(digest)
            async with self._turn:
                packed, pack_s = await loop.run_in_executor(self._thread, self._pack, digest)
        except PillionError:
            self._loads[False].add()
            raise
        except Exception:
            self._loads[False].add()
            log.exception("adapter %s could not be loaded", digest[:12])
            raise Internal(f"adapter {digest[:12]} could not be loaded; the worker's log says why") from None
        self._loads[True].add()
        self._durations.observe(pack_s)
        log.info("adapter %s is packed, %.1f MiB", digest[:12], packed.nbytes / 2**20)
        return packed

    def close(self) -> None:
        """Stop running transfers and the subprocess. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._process.close()
        for fetch in self._fetches.values():
            fetch.cancel()

    def _on_fetched(self, digest: str, task: asyncio.Task[None]) -> None:
        del self._fetches[digest]
        if not task.cancelled():
            # Retrieve the exception: all waiters may be gone.
            task.exception()

    async def _fetch(self, digest: str) -> None:
        try:
            async with asyncio.timeout(TRANSFER_TIMEOUT_S), self._transfers:
                await self._transfer(digest)
        except TimeoutError:
            raise Unavailable(f"adapter {digest[:12]} was not fetched within {TRANSFER_TIMEOUT_S:g} s") from None
        except (ConfigError, InvalidRequest, OSError) as error:
            raise Unavailable(f"adapter {digest[:12]} is unavailable on this machine: {error}") from None
        except PillionError:
            raise
        except Exception:
            log.exception("adapter %s could not be fetched", digest[:12])
            raise Unavailable(f"adapter {digest[:12]} could not be fetched; the worker's log says why") from None
        self._transferred.add()
        log.info("adapter %s was fetched from another machine", digest[:12])

    async def _transfer(self, digest: str) -> None:
        async with contextlib.aclosing(self._node.read_adapter(digest, TRANSFER_TIMEOUT_S)) as pieces:
            await receive_files(await next_piece(pieces), pieces, partial(self._store.receive, digest))

    def _pack(self, digest: str) -> tuple[PackedAdapter, float]:
        """Return the packed adapter and the seconds that packing took."""
        began_s, folder = time.monotonic(), self._store.find(digest)
        try:
            about, data = self._process.run(READ_TIMEOUT_S, "packed", str(folder), digest)
            return bound_adapters(self._backend.adapters).build(digest, about, data), time.monotonic() - began_s
        except Unavailable as error:
            raise Unavailable(f"adapter {digest[:12]} cannot be packed: {error.message}") from None
        except ConfigError as error:
            if self._is_intact(folder, digest):
                raise InvalidRequest(f"this worker cannot run adapter {digest[:12]}: {error}") from None
            self._store.remove(digest)
            raise Unavailable(f"the copy of adapter {digest[:12]} on this machine is damaged") from None

    def _is_intact(self, folder: Path, digest: str) -> bool:
        try:
            return self._process.digest(folder) == digest
        except ConfigError:
            return False
