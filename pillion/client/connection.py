"""Connections of the SDK to gateways: addresses, TLS, API key, limits, and which calls gRPC retries by itself.

By a service config, gRPC retries ListModels and GetStatus, which only read, on the status UNAVAILABLE: no gateway
answered, or it is stopping. A gateway that has no worker forbids the retry (see
:mod:`pillion.wire.errors`). :mod:`pillion.client.resume` retries Generate instead: under a retry policy of gRPC (1.78),
a stream whose server is killed before its first message never ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from pillion.errors import ConfigError, DeadlineExceeded, Internal, PillionError, Unauthenticated, Unavailable
from pillion.net import rpc
from pillion.net.tls import load_pair
from pillion.observability import telemetry
from pillion.wire.public import PLAN_HEADER

API_KEY_VARIABLE = "PILLION_API_KEY"
RETRY_ATTEMPTS = 4
RETRY_FIRST_BACKOFF_S = 0.1
RETRY_MAX_BACKOFF_S = 1.0
MAX_ADDRESSES = 64

_STATES = {state.value[0]: state for state in grpc.ChannelConnectivity}

Pem = str | os.PathLike[str] | bytes


@dataclass(frozen=True, slots=True)
class GatewayConnection:
    """Addresses of the gateways and call options. Plain text if ``credentials`` is None."""

    targets: tuple[str, ...]
    credentials: grpc.ChannelCredentials | None
    api_key: str
    max_message_bytes: int
    # Overrides the planner's choices; "" for none.
    plan: str = ""
    # False for health checks, which must not go through a proxy.
    by_proxy: bool = True

    def open(self, number: int = 0) -> grpc.Channel:
        """Open a blocking channel to one of the addresses. It connects at its first call, and reconnects."""
        if self.credentials is None:
            return grpc.insecure_channel(self.targets[number], options=self._options())
        return grpc.secure_channel(self.targets[number], self.credentials, options=self._options())

    def open_async(self, number: int = 0) -> grpc.aio.Channel:
        """Open an asyncio channel of the running event loop. It connects like a blocking channel."""
        if self.credentials is None:
            return grpc.aio.insecure_channel(self.targets[number], options=self._options())
        return grpc.aio.secure_channel(self.targets[number], self.credentials, options=self._options())

    def metadata(self) -> list[tuple[str, str]]:
        """Return the metadata of every call: API key, forced plan, and the caller's trace context."""
        key = [("authorization", f"Bearer {self.api_key}")] if self.api_key else []
        return key + ([(PLAN_HEADER, self.plan)] if self.plan else []) + telemetry.inject()

    def explained(self, error: PillionError, last: PillionError, by_gateway: bool, number: int) -> PillionError:
        """Return ``error`` with advice in its message.

        Args:
            error: the caller's error.
            last: the last call's error, whose message ``error`` contains.
            by_gateway: True if ``last`` came from a gateway, False if from the connection.
            number: index of the address.
        """
        advice = self._advice(last, by_gateway, number)
        if advice:
            error.message = error.message.replace(last.message, advice) if last.message else advice
            error.args = (error.message,)
        return error

    def state(self, channel: grpc.Channel) -> grpc.ChannelConnectivity:
        """Return the current connection state of a blocking channel. gRPC's public API only watches it, by a thread
        that polls every 0.2 s."""
        return _STATES[channel._channel.check_connectivity_state(False)]  # type: ignore[attr-defined]

    def state_async(self, channel: grpc.aio.Channel) -> grpc.ChannelConnectivity:
        """Return the current connection state of an asyncio channel."""
        return channel.get_state()

    def pause(self, channel: grpc.Channel, pause_s: float, over: threading.Event) -> None:
        """Wait for ``pause_s`` or until ``over`` is set, letting a disconnected channel reconnect meanwhile. gRPC
        (1.78) reconnects a blocking channel only every 5 s unless a call waits for it, and a call that does not wait
        fails at once."""
        if pause_s <= 0:
            return
        with contextlib.suppress(ValueError):  # The channel was closed meanwhile.
            ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/grpc.health.v1.Health/Check")
            waiting = ask.future(b"", timeout=pause_s, wait_for_ready=True)
            over.wait(pause_s)
            waiting.cancel()

    async def pause_async(self, channel: grpc.aio.Channel, pause_s: float, over: threading.Event) -> None:
        """Like :meth:`pause`, for an asyncio channel, which reconnects by itself. Ending the stream cancels this."""
        await asyncio.sleep(pause_s)

    def _advice(self, last: PillionError, by_gateway: bool, number: int) -> str:
        target = self.targets[number]
        if isinstance(last, Unauthenticated):
            fault = "the one sent is unknown" if self.api_key else "none was sent"
            where = f"set {API_KEY_VARIABLE} in the environment, or pass api_key="
            return f"{last.message} ({target} requires an API key, and {fault}: {where})"
        if isinstance(last, Internal) and last.message == "Method not found!":
            return f"{target} speaks gRPC but is not a Pillion gateway: give the gateway's public gRPC port"
        if by_gateway or not isinstance(last, Unavailable | DeadlineExceeded):
            return ""
        return f"{last.message}; {connection_hint(target, self.credentials is not None)}"

    def _options(self) -> rpc.Options:
        direct = [] if self.by_proxy else [("grpc.enable_http_proxy", 0)]
        return [*rpc.client_options(self.max_message_bytes), ("grpc.service_config", service_config()), *direct]


def connect(
    target: str | Sequence[str],
    *,
    tls: bool = False,
    ca: Pem | None = None,
    cert: Pem | None = None,
    key: Pem | None = None,
    api_key: str = "",
    max_message_bytes: int = rpc.MAX_MESSAGE_BYTES,
    plan: str = "",
) -> GatewayConnection:
    """Check the options and read the files; the first call connects.

    Args:
        target: ``host:port`` or ``unix:path``; ``grpcs://host:port`` for TLS, ``grpc://host:port`` for none. Several
            gateways of one cluster as a list, or separated by commas; at most MAX_ADDRESSES.
        tls: encrypt, and verify the server's certificate. Implied by ``grpcs://``, ``ca``, ``cert`` and ``key``.
        ca: PEM of the trusted authorities, as a path or as bytes; default: the system's.
        cert, key: PEM of the client's certificate chain and private key, for a server that requires them.
        api_key: sent as ``authorization: Bearer``; default: the environment's PILLION_API_KEY.
        max_message_bytes: limit of sent and received messages.
        plan: forced on every request, with an operator's key, e.g. ``policy=colocated``, ``split=1024`` or
            ``node=kv-1``; "" for none.

    Raises:
        ConfigError: incompatible options, or unreadable files.
    """
    addresses = target.split(",") if isinstance(target, str) else list(target)
    targets = tuple(one.strip() for one in addresses)
    if not 1 <= len(targets) <= MAX_ADDRESSES or not all(targets):
        raise ConfigError(f"target: from 1 to {MAX_ADDRESSES} addresses are needed, none of them empty")
    for one in targets:
        _check_address(one)
    plain = [one for one in targets if one.startswith("grpc://")]
    encrypted = tls or any(one.startswith("grpcs://") for one in targets)
    encrypted = encrypted or any(file is not None for file in (ca, cert, key))
    if encrypted and plain:
        raise ConfigError(f"{plain[0]} is plain text, but TLS was requested: write grpcs{plain[0][4:]}")
    targets = tuple(one.removeprefix("grpc://").removeprefix("grpcs://") for one in targets)
    if (cert is None) != (key is None):
        raise ConfigError("cert and key belong together: pass both or none")
    key_text = api_key or os.environ.get(API_KEY_VARIABLE, "")
    if not (key_text.isascii() and key_text.isprintable()) or key_text != key_text.strip():
        raise ConfigError("the API key must be printable ASCII without spaces around it")
    credentials = None
    if encrypted:
        pem_files = _pem(ca, "ca"), _pem(key, "key"), _pem(cert, "cert")
        if isinstance(cert, str | os.PathLike) and isinstance(key, str | os.PathLike):
            # gRPC would only log a mismatch, and every connection would fail.
            load_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), os.fspath(cert), os.fspath(key))
        credentials = grpc.ssl_channel_credentials(*pem_files)
    return GatewayConnection(targets, credentials, key_text, max_message_bytes, plan)


def connection_hint(target: str, encrypted: bool) -> str:
    """Return what to check if a connection to ``target`` fails, over TLS if ``encrypted``. gRPC's own error describes
    what happened."""
    if encrypted:
        tls = "This client uses TLS: check --ca, --cert and --key, or omit grpcs:// if the gateway has no TLS."
    else:
        tls = "This client does not use TLS: write grpcs:// if the gateway does."
    named = [name for name in ("grpc_proxy", "https_proxy", "http_proxy") if os.environ.get(name)]
    proxy = f" gRPC uses the proxy of {named[0]} unless no_proxy has the host." if named else ""
    return (
        f"does a gateway listen at {target} (`pillion serve` starts one), and is this its gRPC port (50051 unless "
        f"--grpc-port says otherwise)? {tls}{proxy}"
    )


def _check_address(target: str) -> None:
    """Raise ConfigError for an address of another protocol."""
    scheme, separator, rest = target.partition("://")
    if separator and scheme in ("http", "https"):
        place = rest.partition("/")[0]
        written = f"grpcs://{place}" if scheme == "https" else place
        raise ConfigError(
            f"{target} is an HTTP address, and this client uses gRPC: write {written}, with the gateway's "
            "gRPC port (50051 unless --grpc-port says otherwise)"
        )
    if "/" in rest and scheme in ("grpc", "grpcs"):
        raise ConfigError(f"{target}: an address is HOST:PORT, without a path")


def service_config() -> str:
    """Return gRPC's service config as JSON: which calls to retry, and how."""
    policy = {
        "maxAttempts": RETRY_ATTEMPTS,
        "initialBackoff": f"{RETRY_FIRST_BACKOFF_S}s",
        "maxBackoff": f"{RETRY_MAX_BACKOFF_S}s",
        "backoffMultiplier": 3,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    names = [{"service": "pillion.v1.Gateway", "method": method} for method in ("ListModels", "GetStatus")]
    # gRPC stops retrying while fewer than half of these tokens are left, so that retries do not flood a lost gateway.
    throttling = {"maxTokens": 100, "tokenRatio": 0.5}
    return json.dumps({"methodConfig": [{"name": names, "retryPolicy": policy}], "retryThrottling": throttling})


def _pem(source: Pem | None, name: str) -> bytes | None:
    """Return the PEM of a path or of bytes. Raises ConfigError for anything else: gRPC would accept it, and every
    connection would fail."""
    if source is None:
        return None
    try:
        pem = source if isinstance(source, bytes) else Path(source).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: {source!s}: {error.strerror}") from None
    if b"-----BEGIN " not in pem:
        raise ConfigError(f"{name}: {'these bytes are' if isinstance(source, bytes) else f'{source!s} is'} no PEM")
    return pem
