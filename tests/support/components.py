"""The real components in one process over a real Redis, for trace, parity and fault tests."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from lab.testbed.cluster import PATIENT_MS
from lab.testbed.conditions import until, within
from lab.testbed.redis import running_redis
from pillion import AsyncClient
from pillion.config import DecodeFlags, GatewayFlags, KVNodeFlags, PrefillFlags
from pillion.engine.scheduling.partial_blocks import PARTIAL_BLOCK_PERCENT
from pillion.gateway.gateway_limits import GatewayLimits
from pillion.settings.node_limits import NodeLimits
from tests.support.fixed_limits import split_limits
from tests.support.patient_calls import patient_calls
from tests.support.redis_nodes import patient

# By default every prompt is prefilled by the prefill worker.
DISAGGREGATED: dict[str, Any] = {"split_policy": "disaggregated"}


@dataclass(slots=True)
class Components:
    """Handles of running components; ``client`` is connected to ``gateway``."""

    kvnode: Any
    prefill: Any
    decode: Any
    gateway: Any
    client: AsyncClient
    folder: pathlib.Path
    common: dict[str, Any]
    model: dict[str, Any]

    async def proven(self) -> None:
        """Wait until nothing is leased or pinned and the node has all blocks of the workers, which may follow an
        answer's end; check the pool's integrity."""
        pool, gateway = self.kvnode.pool, self.gateway.gateway
        await until("tickets and requests to end", lambda: not (pool.ledger.tickets or gateway.active_requests))
        for component in (self.prefill, self.decode):
            await within("a worker's last blocks", component.worker.epoch.settled())
        pool.check_integrity()

    @contextlib.asynccontextmanager
    async def another_gateway(self, **flags: Any) -> AsyncIterator[AsyncClient]:
        """Run a second gateway before the same workers, with other flags; yield a client of it."""
        async with self.another_gateway_address(**flags) as address, AsyncClient(address) as client:
            yield client

    @contextlib.asynccontextmanager
    async def another_gateway_address(self, **flags: Any) -> AsyncIterator[str]:
        """Run a second gateway before the same workers, with other flags; yield its gRPC address."""
        from pillion.gateway.assemble import start_gateway

        edge, limits = split_limits(GatewayLimits, DISAGGREGATED | flags)
        gateway = GatewayFlags(**self.common, **self.model, http_port=0, grpc_port=0, **edge)
        component = await start_gateway(gateway, limits=limits)
        patient(component.gateway.cluster.index)
        try:
            yield component.grpc_address
        finally:
            await component.stop()


async def until_known(gateway: Any, names: set[str]) -> None:
    """Wait until a gateway has discovered all of these components: it is ready without a prefill worker."""
    from pillion.gateway.admission.tenants import OPEN

    def known() -> set[str]:
        return {one.component_id for one in gateway.status(OPEN).components}

    await until(f"the gateway to know {names}", lambda: names <= known())


@contextlib.asynccontextmanager
async def running_components(
    folder: pathlib.Path,
    *,
    model: dict[str, Any],
    node: dict[str, Any] | None = None,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    gateway: dict[str, Any] | None = None,
    partial_block_percent: int = PARTIAL_BLOCK_PERCENT,
) -> AsyncIterator[Components]:
    """Start Redis, one KV node, one prefill worker, one decode worker and one gateway under ``folder``.

    ``folder`` must be short: a Unix socket's path is limited to some hundred characters. Extra flags are per component.
    """
    from pillion.decode_service.assemble import start_decode
    from pillion.gateway.assemble import start_gateway
    from pillion.kvstore.assemble import start_kvnode
    from pillion.prefill_service.assemble import start_prefill

    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(patient_calls())
        url = stack.enter_context(running_redis()).url
        common = {"redis_url": url, "heartbeat_ms": 100, "heartbeat_timeout_ms": PATIENT_MS}
        socket = str(folder / "a.sock")
        own, limits = split_limits(NodeLimits, node or {})
        kvnode = await start_kvnode(
            KVNodeFlags(**common, node_listen=f"unix:{folder}/k.sock", attach_socket=socket, **own), limits
        )
        stack.push_async_callback(kvnode.stop)
        worker = {**common, **model, "attach_socket": socket, "cpu_threads": 1}
        first = await start_prefill(
            PrefillFlags(**worker, component_id="prefill-0", listen=f"unix:{folder}/p.sock", **(prefill or {}))
        )
        stack.push_async_callback(first.stop)
        second = await start_decode(
            DecodeFlags(**worker, component_id="decode-0", listen=f"unix:{folder}/d.sock", **(decode or {})),
            partial_block_percent=partial_block_percent,
        )
        stack.push_async_callback(second.stop)
        chosen, gateway_limits = split_limits(GatewayLimits, DISAGGREGATED | (gateway or {}))
        shown = GatewayFlags(**common, **model, http_port=0, grpc_port=0, **chosen)
        edge = await start_gateway(shown, limits=gateway_limits)
        stack.push_async_callback(edge.stop)
        patient(edge.gateway.cluster.index)
        await until_known(edge.gateway, {"prefill-0", "decode-0"})
        client = await stack.enter_async_context(AsyncClient(edge.grpc_address))
        yield Components(kvnode, first, second, edge, client, folder, common, model)
