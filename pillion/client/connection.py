"""How the SDK reaches gateways: addresses, TLS, API key, limits, and which calls gRPC may send again by itself.

gRPC itself retries, by a service config: ListModels and GetStatus, which only read, and Generate as long as nothing of
the answer has come. It retries only the status UNAVAILABLE: no gateway answered, or the gateway is stopping. A gateway
that answers and has no worker forbids the retry (see :mod:`pillion.wire.errors`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from pillion.errors import ConfigError
from pillion.net import rpc
from pillion.observability import telemetry

API_KEY_VARIABLE = "PILLION_API_KEY"
SERVICE = "pillion.v1.Gateway"
RETRY_ATTEMPTS = 4
RETRY_FIRST_BACKOFF_S = 0.1
RETRY_MAX_BACKOFF_S = 1.0
MAX_ADDRESSES = 64

Pem = str | os.PathLike[str] | bytes


@dataclass(frozen=True, slots=True)
class GatewayConnection:
    """The gateways' addresses and how to call them. ``credentials`` None: plain text."""

    targets: tuple[str, ...]
    credentials: grpc.ChannelCredentials | None
    api_key: str
    max_message_bytes: int

    def open(self, number: int = 0) -> grpc.Channel:
        """A blocking channel to one of the addresses. It connects with its first call, and again whenever the
        connection is lost."""
        if self.credentials is None:
            return grpc.insecure_channel(self.targets[number], options=self._options())
        return grpc.secure_channel(self.targets[number], self.credentials, options=self._options())

    def open_async(self, number: int = 0) -> grpc.aio.Channel:
        """An asyncio channel, which belongs to the running event loop. It connects as a blocking one does."""
        if self.credentials is None:
            return grpc.aio.insecure_channel(self.targets[number], options=self._options())
        return grpc.aio.secure_channel(self.targets[number], self.credentials, options=self._options())

    def metadata(self) -> list[tuple[str, str]]:
        """Metadata of every call: the API key, and the trace context of the caller."""
        key = [("authorization", f"Bearer {self.api_key}")] if self.api_key else []
        return key + telemetry.inject()

    def _options(self) -> rpc.Options:
        return [*rpc.client_options(self.max_message_bytes), ("grpc.service_config", service_config())]


def connect(
    target: str | Sequence[str],
    *,
    tls: bool = False,
    ca: Pem | None = None,
    cert: Pem | None = None,
    key: Pem | None = None,
    api_key: str = "",
    max_message_bytes: int = rpc.MAX_MESSAGE_BYTES,
) -> GatewayConnection:
    """Checks the options and reads the files; the first call connects.

    Args:
        target: ``host:port`` or ``unix:path``; ``grpcs://host:port`` for TLS, ``grpc://host:port`` for none. Several
            gateways of one cluster as a list, or separated by commas; at most MAX_ADDRESSES.
        tls: encrypt, and check the server's certificate. Implied by ``grpcs://``, ``ca``, ``cert`` and ``key``.
        ca: PEM of the authorities that are trusted, as a path or as bytes; default: the system's.
        cert, key: PEM of the client's own certificate chain and private key, for a server that asks for them.
        api_key: sent as ``authorization: Bearer``; default: the environment's PILLION_API_KEY.
        max_message_bytes: largest message that is received or sent.

    Raises:
        ConfigError: options that cannot work together, or files that cannot be read.
    """
    given = target.split(",") if isinstance(target, str) else list(target)
    targets = tuple(one.strip() for one in given)
    if not 1 <= len(targets) <= MAX_ADDRESSES or not all(targets):
        raise ConfigError(f"target: from 1 to {MAX_ADDRESSES} addresses are needed, none of them empty")
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
        credentials = grpc.ssl_channel_credentials(_pem(ca, "ca"), _pem(key, "key"), _pem(cert, "cert"))
    return GatewayConnection(targets, credentials, key_text, max_message_bytes)


def service_config() -> str:
    """gRPC's service config as JSON: which calls are retried, and how."""
    policy = {
        "maxAttempts": RETRY_ATTEMPTS,
        "initialBackoff": f"{RETRY_FIRST_BACKOFF_S}s",
        "maxBackoff": f"{RETRY_MAX_BACKOFF_S}s",
        "backoffMultiplier": 3,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    names = [{"service": SERVICE, "method": method} for method in ("ListModels", "GetStatus", "Generate")]
    # Retries stop while fewer than half of the tokens are left, so that a lost gateway is not flooded with them.
    throttling = {"maxTokens": 100, "tokenRatio": 0.5}
    return json.dumps({"methodConfig": [{"name": names, "retryPolicy": policy}], "retryThrottling": throttling})


def _pem(source: Pem | None, name: str) -> bytes | None:
    if source is None or isinstance(source, bytes):
        return source
    try:
        return Path(source).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: {source}: {error.strerror}") from None
