"""Gateways in a test's process that see only some workers of one KV node."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from lab.testbed.conditions import until
from pillion.engine.worker.worker_server import WorkerServer
from pillion.gateway.gateway import Gateway
from pillion.gateway.links.cluster import Cluster
from pillion.gateway.planning.cluster_snapshot import parse_policy
from pillion.gateway.request.admitted_request import GatewayOptions
from pillion.kvstore.client.node_client import NodeClient
from pillion.kvstore.node.kv_node import KVNode
from pillion.wire.registry import ComponentRecord


class ShownWorkers:
    """The registry of a gateway that sees only the workers in ``shown``."""

    refusal = ""

    def __init__(self, node: KVNode, workers: dict[str, WorkerServer], shown: set[str]) -> None:
        self.node, self.workers, self.shown = node, workers, shown

    async def components(self) -> list[ComponentRecord]:
        return [self.node.record(0), *(self.workers[name].worker.describe() for name in self.shown)]

    async def aclose(self) -> None:
        pass

    @contextlib.asynccontextmanager
    async def gateway(self, name: str, entry: Any, chunk_tokens: int) -> AsyncIterator[Gateway]:
        """Run a gateway that serves the model ``name`` by these workers; prompts are always prefilled by a prefill
        worker."""
        view = Cluster("gateway", self, None, 60.0)
        options = GatewayOptions(
            policy=parse_policy("disaggregated"),
            chunk_tokens=chunk_tokens,
            max_attempts=8,
            max_inflight_requests=4,
            max_inflight_tokens=4096,
            prefix_caching=True,
        )
        gateway = Gateway({name: entry}, view, options)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(view.aclose)
            stack.push_async_callback(gateway.aclose)
            await view.start()
            await until("the gateway to be ready", lambda: not gateway.not_ready())
            yield gateway


async def at_rest(node: KVNode) -> None:
    """Wait until no request uses resources; only the free slots of live workers are leased."""
    client = NodeClient(node.address, "test")

    async def nothing_held() -> bool:
        await client.check_integrity()
        books = await client.status()
        return not (books.pinned_blocks or books.tickets or books.reserved_blocks or books.quarantined_blocks)

    await until("the return of every slot and ticket", nothing_held)
    await client.aclose()
