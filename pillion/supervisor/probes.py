"""Probes, over gRPC or at a Unix socket, whether a process is ready or alive; every call returns within a second."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import grpc.aio

PROBE_TIMEOUT_S = 1.0


def reachable_host(host: str) -> str:
    """Return the host by which a client on this machine reaches a server that listens on ``host``."""
    if host in ("", "0.0.0.0", "::"):  # noqa: S104
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


async def is_serving(target: str, service: str = "") -> bool:
    """Return whether the component at its internal address ``target`` (:func:`pillion.net.rpc.open_channel`) reports
    SERVING, for all services or one ``service``."""
    from pillion.net.rpc import open_channel

    return bool(await health_behind(open_channel(target), service))


async def answers(target: str) -> bool:
    """Return whether the component at ``target`` answers health checks at all, SERVING or not."""
    from pillion.net.rpc import open_channel

    return await health_behind(open_channel(target)) is not None


async def accepts(path: Path, question: bytes = b"", answer: bytes = b"") -> bool:
    """Return True if a process accepts connections at the Unix socket ``path`` and, if ``question`` is not empty,
    answers it with a line that begins with ``answer``."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(path)
            with contextlib.closing(writer):
                writer.write(question)
                return not question or (await reader.readline()).startswith(answer)
    except (OSError, TimeoutError):
        return False


async def health_behind(channel: grpc.aio.Channel, service: str = "") -> bool | None:
    """Return whether the standard health service of a server is SERVING; None if it does not answer. Closes the
    channel."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    async with channel:
        try:
            stub = health_pb2_grpc.HealthStub(channel)
            reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return None
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
