"""Says how the SDK reaches gateways: addresses, TLS, API key, limits, and which calls gRPC may send again by itself.

gRPC itself retries ListModels and GetStatus, which only read, by a service config. It retries only the status
UNAVAILABLE: no gateway answered, or the gateway is stopping. A gateway that answers and has no worker forbids the retry
(see :mod:`pillion.wire.errors`). Generate is retried by :mod:`pillion.client.resume` instead: under a policy of gRPC's
(1.78), a stream whose server is killed before its first message never ends.
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
SERVICE = "pillion.v1.Gateway"
# The client makes this small call to see whether a gateway answers; what it answers does not matter.
HEALTH_METHOD = "/grpc.health.v1.Health/Check"
RETRY_ATTEMPTS = 4
RETRY_FIRST_BACKOFF_S = 0.1
RETRY_MAX_BACKOFF_S = 1.0
MAX_ADDRESSES = 64
# gRPC reads these variables, and goes by the proxy that the first of them names.
PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")

_STATES = {state.value[0]: state for state in grpc.ChannelConnectivity}

Pem = str | os.PathLike[str] | bytes


@dataclass(frozen=True, slots=True)
class GatewayConnection:
    """Holds the gateways' addresses and how to call them. With ``credentials`` None, calls are plain text."""

    targets: tuple[str, ...]
    credentials: grpc.ChannelCredentials | None
    api_key: str
    max_message_bytes: int
    # This says what the planner may not choose; "" leaves it free.
    plan: str = ""
    # Health checks ask a port itself, whatever proxy the environment names.
    by_proxy: bool = True

    def open(self, number: int = 0) -> grpc.Channel:
        """Open a blocking channel to one of the addresses. It connects with its first call, and again whenever the
        connection is lost."""
        if self.credentials is None:
            return grpc.insecure_channel(self.targets[number], options=self._options())
        return grpc.secure_channel(self.targets[number], self.credentials, options=self._options())

    def open_async(self, number: int = 0) -> grpc.aio.Channel:
        """Open an asyncio channel, which belongs to the running event loop. It connects as a blocking channel does."""
        if self.credentials is None:
            return grpc.aio.insecure_channel(self.targets[number], options=self._options())
        return grpc.aio.secure_channel(self.targets[number], self.credentials, options=self._options())

    def metadata(self) -> list[tuple[str, str]]:
        """Return the metadata of every call: the API key, the forced plan, and the trace context of the caller."""
        key = [("authorization", f"Bearer {self.api_key}")] if self.api_key else []
        return key + ([(PLAN_HEADER, self.plan)] if self.plan else []) + telemetry.inject()

    def explained(self, error: PillionError, found: PillionError, spoken: bool, number: int) -> PillionError:
        """Return ``error`` with a message that says what to do.

        Args:
            error: what the caller gets.
            found: the error of the last call, whose message ``error`` repeats.
            spoken: whether ``found`` came from a gateway and not from the connection.
            number: the number of the address.
        """
        advice = self._advice(found, spoken, number)
        if advice:
            error.message = error.message.replace(found.message, advice) if found.message else advice
            error.args = (error.message,)
        return error

    def state(self, channel: grpc.Channel) -> grpc.ChannelConnectivity:
        """Return the state of a blocking channel's connection now. gRPC's public API only watches it, by a thread that
        polls every 0.2 s."""
        return _STATES[channel._channel.check_connectivity_state(False)]  # type: ignore[attr-defined]

    def state_async(self, channel: grpc.aio.Channel) -> grpc.ChannelConnectivity:
        """Return the state of an asyncio channel's connection now."""
        return channel.get_state()

    def pause(self, channel: grpc.Channel, pause_s: float, over: threading.Event) -> None:
        """Wait until ``pause_s`` have passed or ``over`` is set, and let a channel whose connection was lost connect
        meanwhile. gRPC (1.78) tries to connect a blocking channel only every 5 s unless a call waits for it, and a call
        that does not wait for the connection fails at once."""
        if pause_s <= 0:
            return
        with contextlib.suppress(ValueError):  # A ValueError means that the channel was closed meanwhile.
            ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(HEALTH_METHOD)
            waiting = ask.future(b"", timeout=pause_s, wait_for_ready=True)
            over.wait(pause_s)
            waiting.cancel()

    async def pause_async(self, channel: grpc.aio.Channel, pause_s: float, over: threading.Event) -> None:
        """Wait as :meth:`pause` does, for an asyncio channel, which connects without help. Ending the stream cancels
        this wait."""
        await asyncio.sleep(pause_s)

    def _advice(self, found: PillionError, spoken: bool, number: int) -> str:
        target = self.targets[number]
        if isinstance(found, Unauthenticated):
            sent = "it does not know the one that was sent" if self.api_key else "none was sent"
            where = f"give it in the environment's {API_KEY_VARIABLE} or as api_key="
            return f"{found.message} ({target} wants an API key, and {sent}: {where})"
        if isinstance(found, Internal) and found.message == "Method not found!":
            return f"{target} speaks gRPC and is no gateway of Pillion: give the gateway's public gRPC port"
        if spoken or not isinstance(found, Unavailable | DeadlineExceeded):
            return ""
        return f"{found.message}; {connection_hint(target, self.credentials is not None)}"

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
        tls: encrypt, and check the server's certificate. Implied by ``grpcs://``, ``ca``, ``cert`` and ``key``.
        ca: PEM of the authorities that are trusted, as a path or as bytes; default: the system's.
        cert, key: PEM of the client's own certificate chain and private key, for a server that asks for them.
        api_key: sent as ``authorization: Bearer``; default: the environment's PILLION_API_KEY.
        max_message_bytes: largest message that is received or sent.
        plan: forced on every request, with an operator's key, such as ``policy=colocated``, ``split=1024`` or
            ``node=kv-1``; "" leaves the planner free.

    Raises:
        ConfigError: options that cannot work together, or files that cannot be read.
    """
    given = target.split(",") if isinstance(target, str) else list(target)
    targets = tuple(one.strip() for one in given)
    if not 1 <= len(targets) <= MAX_ADDRESSES or not all(targets):
        raise ConfigError(f"target: from 1 to {MAX_ADDRESSES} addresses are needed, none of them empty")
    for one in targets:
        _check_address(one)
    plain = [one for one in targets if one.startswith("grpc://")]
    encrypted = tls or any(one.startswith("grpcs://") for one in targets)
    encrypted = encrypted or any(file is not None for file in (ca, cert, key))
    if encrypted and plain:
        raise ConfigError(f"{plain[0]} is plain text, and TLS was asked for: write grpcs{plain[0][4:]}")
    targets = tuple(one.removeprefix("grpc://").removeprefix("grpcs://") for one in targets)
    if (cert is None) != (key is None):
        raise ConfigError("cert and key belong together: give both or none")
    key_text = api_key or os.environ.get(API_KEY_VARIABLE, "")
    if not (key_text.isascii() and key_text.isprintable()) or key_text != key_text.strip():
        raise ConfigError("the API key must be printable ASCII without spaces around it")
    credentials = None
    if encrypted:
        pems = _pem(ca, "ca"), _pem(key, "key"), _pem(cert, "cert")
        if isinstance(cert, str | os.PathLike) and isinstance(key, str | os.PathLike):
            # gRPC would only log that they do not fit, and then every connection would fail.
            load_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), os.fspath(cert), os.fspath(key))
        credentials = grpc.ssl_channel_credentials(*pems)
    return GatewayConnection(targets, credentials, key_text, max_message_bytes, plan)


def connection_hint(target: str, encrypted: bool) -> str:
    """Return what to look at where a connection to ``target`` fails, over TLS where it is ``encrypted``. What happened
    is told by gRPC's own words."""
    if encrypted:
        tls = (
            "This client speaks TLS: check --ca, --cert and --key, or leave out grpcs:// where the gateway has no TLS."
        )
    else:
        tls = "This client speaks no TLS: write grpcs:// where the gateway does."
    named = [name for name in PROXY_VARIABLES if os.environ.get(name)]
    proxy = f" gRPC goes by the proxy of {named[0]} unless no_proxy names the host." if named else ""
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
            f"{target} is an address of HTTP, and this client speaks gRPC: write {written}, with the gateway's "
            "gRPC port (50051 unless --grpc-port says otherwise)"
        )
    if "/" in rest and scheme in ("grpc", "grpcs"):
        raise ConfigError(f"{target}: an address is HOST:PORT, without a path")


def service_config() -> str:
    """Return gRPC's service config as JSON: which calls are retried, and how."""
    policy = {
        "maxAttempts": RETRY_ATTEMPTS,
        "initialBackoff": f"{RETRY_FIRST_BACKOFF_S}s",
        "maxBackoff": f"{RETRY_MAX_BACKOFF_S}s",
        "backoffMultiplier": 3,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    names = [{"service": SERVICE, "method": method} for method in ("ListModels", "GetStatus")]
    # Retries stop while fewer than half of the tokens are left, so that a lost gateway is not flooded with them.
    throttling = {"maxTokens": 100, "tokenRatio": 0.5}
    return json.dumps({"methodConfig": [{"name": names, "retryPolicy": policy}], "retryThrottling": throttling})


def _pem(source: Pem | None, name: str) -> bytes | None:
    """Return the PEM of a path or of bytes. Raises ConfigError for anything else: gRPC would accept it, and then every
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
