"""Probes, over gRPC or at a Unix socket, whether a process is ready or alive; every call returns within a second."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

PROBE_TIMEOUT_S = 1.0


def reachable_host(host: str) -> str:
    """Return the host by which a client on this machine reaches a server that listens on ``host``."""
    known = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "127.0.0.1"}  # noqa: S104
    if host in known:
        return known[host]
    return f"[{host}]" if ":" in host else host


async def is_serving(target: str, ca: str | None = None, service: str = "") -> bool:
    """Return whether the standard health service at ``target`` reports SERVING, for all services or one ``service``.

    ``grpcs://`` is a public port with TLS, whose authority is in the file ``ca`` or known to the system; any other
    target is a component's internal address (:func:`pillion.net.rpc.open_channel`).
    """
    return bool(await _health(target, ca, service))


async def answers(target: str) -> bool:
    """Return whether the component at ``target`` answers health checks at all, SERVING or not."""
    return await _health(target) is not None


async def accepts(path: Path, question: bytes = b"", answer: bytes = b"") -> bool:
    """Return whether a process accepts connections at the Unix socket ``path`` and, if there is a ``question``,
    replies with a line that begins with ``answer``."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(path)
            with contextlib.closing(writer):
                writer.write(question)
                return not question or (await reader.readline()).startswith(answer)
    except (OSError, TimeoutError):
        return False


async def _health(target: str, ca: str | None = None, service: str = "") -> bool | None:
    """Return whether a server's health is SERVING; None if it does not answer."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from pillion.client.connection import connect
    from pillion.net.rpc import open_channel

    public = target.startswith("grpcs://")
    direct = replace(connect(target, ca=ca), by_proxy=False) if public else None
    async with direct.open_async() if direct is not None else open_channel(target) as channel:
        try:
            stub = health_pb2_grpc.HealthStub(channel)
            reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return None
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
