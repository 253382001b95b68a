"""TLS at the edge and between components, from PEM files that may be replaced while a process runs.

    files --match--> in use --files change (pillion.net.watched)--> reread --match--> in use from the next handshake
      | no: ConfigError                                            | no: a warning, the old ones stay in use

At the edge a server shows its certificate, and requires clients' certificates if a flag names their authorities.
Between components both sides show a certificate, which must be signed by the cluster's own authority, whatever its
holder's address: every such certificate has the name INTERNAL_NAME, the only one that is checked. So this authority
must sign nothing else. Unix sockets are never encrypted: the permissions of their folder protect them.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from pillion.errors import ConfigError
from pillion.net.watched import WATCH_INTERVAL_S, Watched

log = logging.getLogger("pillion.net.tls")

INTERNAL_NAME = "pillion.internal"
Options = list[tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files: a certificate chain, its private key, and the authorities of accepted peers ("" requires no
    certificate)."""

    cert: str
    key: str
    ca: str = ""

    def paths(self) -> tuple[str, ...]:
        """Return the nonempty paths."""
        return tuple(filter(None, (self.cert, self.key, self.ca)))


@dataclass(frozen=True, slots=True)
class _Loaded:
    """One version of the files. ``context`` is for HTTP; creating it proves that the files match."""

    cert: bytes
    key: bytes
    ca: bytes | None
    context: ssl.SSLContext


class Identity:
    """This process's certificate and trusted authorities. Thread-safe: gRPC calls it from its own threads.

    Raises ConfigError for files that are unreadable or do not match.
    """

    def __init__(self, files: TlsFiles, interval_s: float = WATCH_INTERVAL_S) -> None:
        self._files = files
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._watched = Watched(files.paths())
        self._checked_s = time.monotonic()
        self._loaded = _load(files)

    def current(self) -> _Loaded:
        """Return the current version of the files, checking for changes once per interval."""
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._checked_s >= self._interval_s:
                self._checked_s = now_s
                newer = self._watched.newer(lambda: _load(self._files))
                if newer is not None:
                    self._loaded = newer
                    log.info("read %s again", self._files.cert)
            return self._loaded


def identity_of(cert: str, key: str, ca: str) -> Identity | None:
    """Return the TLS identity of a certificate, key and CA file; None if all paths are empty. Raises ConfigError."""
    return Identity(TlsFiles(cert, key, ca)) if cert or key or ca else None


def server_credentials(identity: Identity) -> grpc.ServerCredentials:
    """Return credentials for a gRPC server; each handshake uses the current certificate."""
    first = used = identity.current()

    def fetch() -> Any:
        nonlocal used
        before, used = used, identity.current()
        return None if used is before else _configuration(used)

    mutual = first.ca is not None
    return grpc.dynamic_ssl_server_credentials(_configuration(first), fetch, require_client_authentication=mutual)


def http_context(identity: Identity) -> ssl.SSLContext:
    """Return the TLS context of an HTTP server. Each handshake switches to the current version."""

    def choose(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = identity.current().context

    first = identity.current().context
    first.sni_callback = choose
    return first


def client_context(
    ca: str | os.PathLike[str] | bytes | None,
    cert: str | os.PathLike[str] | None = None,
    key: str | os.PathLike[str] | None = None,
) -> ssl.SSLContext:
    """Return the TLS context of a public port's client, which verifies the server's certificate.

    Args:
        ca: PEM of the trusted authorities, as a path or as bytes; None: the system's.
        cert, key: paths of the client's certificate chain and private key, if any.

    Raises ConfigError that names the file and its problem.
    """
    if ca is None:
        context = ssl.create_default_context()
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        _load_authorities(context, ca)
    if cert is not None:
        load_pair(context, os.fspath(cert), os.fspath(key or cert))
    return context


def load_pair(context: ssl.SSLContext, cert: str, key: str) -> None:
    """Load a certificate chain and its private key into a context. Raises ConfigError that names the bad file."""
    if b"-----BEGIN CERTIFICATE-----" not in _read(cert):
        raise ConfigError(f"TLS: {cert} has no certificate in PEM")
    if b"PRIVATE KEY-----" not in _read(key):
        raise ConfigError(f"TLS: {key} has no private key in PEM")
    try:
        # With a password OpenSSL fails on an encrypted key instead of prompting on the terminal.
        context.load_cert_chain(cert, key, password="-")  # noqa: S106
    except (ssl.SSLError, OSError) as error:
        if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"TLS: the private key {key} does not match the certificate {cert}") from None
        raise ConfigError(f"TLS: {cert} and {key}: {_reason(error)}; one of them is damaged, or encrypted") from None


def _load_authorities(context: ssl.SSLContext, ca: str | os.PathLike[str] | bytes) -> None:
    """Make a context trust authorities, given as a path or as PEM. Raises ConfigError for a file without certificates,
    or if all of them have expired."""
    shown = "ca" if isinstance(ca, bytes) else os.fspath(ca)
    try:
        # Comments between the certificates may have non-ASCII letters.
        pem = ca if isinstance(ca, bytes) else _read(shown)
        context.load_verify_locations(cadata=pem.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError):
        raise ConfigError(f"TLS: {shown} has no certificate in PEM") from None
    ends = [str(certificate["notAfter"]) for certificate in context.get_ca_certs()]
    if ends and all(ssl.cert_time_to_seconds(end) < time.time() for end in ends):
        raise ConfigError(f"TLS: {shown} has expired: its last certificate was valid until {ends[-1]}")


def _refuse_expired(context: ssl.SSLContext, cert: str) -> None:
    """Raise ConfigError if the certificate of a server's context has expired or is not valid yet.

    Only a handshake checks the dates, so run one in memory, with a client that only trusts this certificate.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cadata=_read(cert).decode("ascii", "ignore"))
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (client.wrap_bio(to_client, to_server), context.wrap_bio(to_server, to_client, server_side=True))
    for side in (*sides, *sides):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED.
            if error.verify_code in (9, 10):
                raise ConfigError(f"TLS: {cert}: {error.verify_message}") from None
            return
        except ssl.SSLError:
            return


class ComponentChannel:
    """Channel to another component over mutual TLS, with the part of grpc.aio.Channel that stubs use. Calls that begin
    after a change of the certificate use the new one.

    gRPC fixes a channel's certificate at creation, so there is a new channel per version. Calls in flight stay on their
    channel. The last two channels are kept.
    """

    def __init__(self, target: str, identity: Identity, options: Options) -> None:
        self._target = target
        self._identity = identity
        self._options = [*options, ("grpc.ssl_target_name_override", INTERNAL_NAME)]
        self._loaded: _Loaded | None = None
        self._channels: list[grpc.aio.Channel] = []
        self._current_channel()

    async def close(self) -> None:
        """End all calls on the channel."""
        for channel in self._channels:
            await channel.close()

    async def __aenter__(self) -> ComponentChannel:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    def _current_channel(self) -> grpc.aio.Channel:
        loaded = self._identity.current()
        if loaded is not self._loaded:
            self._loaded = loaded
            credentials = grpc.ssl_channel_credentials(loaded.ca, loaded.key, loaded.cert)
            self._channels.append(grpc.aio.secure_channel(self._target, credentials, self._options))
            if len(self._channels) > 2:
                # It is closed when garbage-collected; its calls have outlived two certificates.
                self._channels.pop(0)
        return self._channels[-1]

    def _multicallable(self, kind: str, *args: Any, **more: Any) -> Callable[..., Any]:
        """Return a multicallable of this ``kind`` that always uses the current channel."""
        cached: tuple[grpc.aio.Channel, Any] | None = None

        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal cached
            channel = self._current_channel()
            if cached is None or cached[0] is not channel:
                cached = (channel, getattr(channel, kind)(*args, **more))
            return cached[1](*arguments, **options)

        return call

    unary_unary = partialmethod(_multicallable, "unary_unary")
    unary_stream = partialmethod(_multicallable, "unary_stream")
    stream_unary = partialmethod(_multicallable, "stream_unary")
    stream_stream = partialmethod(_multicallable, "stream_stream")


def _configuration(loaded: _Loaded) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(loaded.key, loaded.cert)], root_certificates=loaded.ca)


def _load(files: TlsFiles) -> _Loaded:
    if not files.cert or not files.key:
        raise ConfigError("TLS needs a certificate and its key, both")
    ca = _read(files.ca) if files.ca else None
    return _Loaded(_read(files.cert), _read(files.key), ca, _context(files))


def _context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    load_pair(context, files.cert, files.key)
    _refuse_expired(context, files.cert)
    if files.ca:
        _load_authorities(context, files.ca)
        context.verify_mode = ssl.CERT_REQUIRED
        # Resuming a session skips the client's certificate, even if its authority is no longer accepted. Without
        # tickets nothing can be resumed; before TLS 1.3 servers cache sessions by themselves.
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0
    return context


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"TLS: {path}: {error.strerror}") from error


def _reason(error: OSError) -> str:
    text = getattr(error, "reason", "") or error.strerror or str(error)
    return str(text).replace("_", " ").lower()
