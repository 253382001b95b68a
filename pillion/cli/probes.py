"""Whether a part is ready, asked over gRPC; every question is answered within a second."""

from __future__ import annotations

import asyncio
import ssl

PROBE_TIMEOUT_S = 1.0


def reachable_host(host: str) -> str:
    """Where a client on this machine reaches a server that listens on ``host``."""
    known = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "[::1]"}  # noqa: S104
    if host in known:
        return known[host]
    return f"[{host}]" if ":" in host else host


async def is_serving(target: str, ca: str | None = None) -> bool:
    """Whether the standard health service at ``target`` says SERVING. ``grpcs://`` is a public port with TLS, whose
    authority is in the file ``ca`` or known to the system; everything else is a part, see :func:`rpc.open_channel`."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from pillion.connection import connect
    from pillion.rpc import open_channel

    public = target.startswith("grpcs://")
    async with connect(target, ca=ca).open_async() if public else open_channel(target) as channel:
        try:
            stub = health_pb2_grpc.HealthStub(channel)
            reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


async def gateway_ready(host: str, port: int, *, own: tuple[str, str] | None = None, mutual: bool = False) -> bool:
    """Whether the gateway at the HTTP port serves a model: its page /health, which needs no key, says 200.

    Args:
        host, port: where it listens, on this machine.
        own: files of its certificate and key, where it has TLS. It is this machine's own process that is asked for a
            yes or no, so its certificate, which names the addresses of clients, is not checked.
        mutual: it asks for a certificate; it is shown its own.
    """
    context: ssl.SSLContext | None = None
    if own is not None:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        if mutual:
            context.load_cert_chain(*own)
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host.strip("[]"), port, ssl=context)
            try:
                writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                return (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False
