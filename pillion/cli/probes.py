"""Whether a part is ready, asked over gRPC; every question is answered within a second."""

from __future__ import annotations

PROBE_TIMEOUT_S = 1.0


def reachable_host(host: str) -> str:
    """Where a client on this machine reaches a server that listens on ``host``."""
    known = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "[::1]"}  # noqa: S104
    if host in known:
        return known[host]
    return f"[{host}]" if ":" in host else host


async def is_serving(target: str) -> bool:
    """Whether the standard health service at ``target`` says SERVING."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from pillion.rpc import open_channel

    async with open_channel(target) as channel:
        try:
            stub = health_pb2_grpc.HealthStub(channel)
            reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


async def serves_a_model(target: str) -> bool:
    """Whether the gateway at ``target`` is serving and knows workers: only then is a request answered."""
    if not await is_serving(target):
        return False
    from pillion.client import AsyncClient
    from pillion.errors import PillionError

    async with AsyncClient(target) as client:
        try:
            return bool(await client.models())
        except PillionError:
            return False
