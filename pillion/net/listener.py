"""Finds what listens at an address by asking it, so that the error of a connection can say what to do.

    connect --> HTTP/2's first words, in plain text --> a SETTINGS frame: gRPC | "HTTP/1": HTTP
       |                                             '-> the connection ends --> TLS handshake --> h2: gRPC | else HTTP
       '-> refused, unknown name, no answer                                          '-> refused: neither

The address is asked only after a call has failed; each answer takes PROBE_TIMEOUT_MS at most, and is kept for KEPT_MS.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from typing import Literal
from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]

PROBE_TIMEOUT_MS = 2000
# Many streams may fail together; within this time they share one answer.
KEPT_MS = 1000
# These bytes are HTTP/2's connection preface (RFC 9113, 3.4), and a SETTINGS frame without settings.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"
_SETTINGS_TYPE, _FRAME_HEAD_BYTES = 4, 9
# gRPC calls this port where an address has none.
GRPC_DEFAULT_PORT = 443

Kind = Literal["nothing", "unknown host", "unreachable", "silent", "grpc", "http", "grpcs", "https", "other"]


@dataclass(frozen=True, slots=True)
class Listener:
    """Describes what listens at an address.

    Attributes:
        kind: "grpcs" and "https" are gRPC and HTTP over TLS; "silent" takes connections and says nothing.
        reason: the system's words where there is no connection.
        wants_certificate: the server refused a client without a certificate.
    """

    kind: Kind
    reason: str = ""
    wants_certificate: bool = False


def find_listener(address: str) -> Listener | None:
    """Finds what listens at ``host:port`` or ``unix:path``; returns None for an address of another kind. Blocks for up
    to PROBE_TIMEOUT_MS for each of the two connections that it may make."""
    place = place_of(address)
    if place is None:
        return None
    try:
        with _connect(place) as connection:
            kind = _plain(connection)
        if kind is not None:
            return Listener(kind)
        with _connect(place) as connection:
            return _encrypted(connection, place[0] if place[1] else "")
    except socket.gaierror as error:
        return Listener("unknown host", error.strerror or str(error))
    except TimeoutError:
        return Listener("unreachable")
    except OSError as error:
        return Listener("nothing", error.strerror or str(error))


def place_of(address: str) -> tuple[str, int] | None:
    """Returns host and port of a gRPC address; for a Unix socket, its path and 0; None for an address of another
    kind."""
    if address.startswith("unix:"):
        return address.removeprefix("unix:").removeprefix("//"), 0
    address = address.removeprefix("dns:///")
    host, separator, port = address.rpartition(":")
    if not separator or address.endswith("]"):
        host, port = address, str(GRPC_DEFAULT_PORT)
    if "/" in address or not port.isdecimal() or (":" in host and not host.startswith("[")):
        return None
    return host.strip("[]"), int(port)


def proxy_variable(address: str) -> str:
    """Returns the environment variable that sends gRPC's calls of ``address`` through a proxy; "" where none does."""
    place = place_of(address)
    if place is None or not place[1]:
        return ""
    # gRPC reads these variables in small letters only.
    without = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy") or ""  # noqa: SIM112
    if proxy_bypass_environment(place[0], {"no": without}):
        return ""
    return next((name for name in ("grpc_proxy", "https_proxy", "http_proxy") if os.environ.get(name)), "")


def _connect(place: tuple[str, int]) -> socket.socket:
    host, port = place
    if port:
        return socket.create_connection(place, PROBE_TIMEOUT_MS / 1000)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(PROBE_TIMEOUT_MS / 1000)
        connection.connect(host)
    except OSError:
        connection.close()
        raise
    return connection


def _plain(connection: socket.socket) -> Kind | None:
    """Returns what kind of server answers in plain text; None where the connection ends as a TLS server ends it."""
    try:
        connection.sendall(_PREFACE)
        said = _first_words(connection)
    except TimeoutError:
        return "silent"
    except OSError:
        return None
    return _speaks(said) if said else None


def _speaks(said: bytes) -> Kind | None:
    # Some servers of HTTP/1 answer a version that they do not know with a bare page.
    if said.startswith((b"HTTP/1", b"<")):
        return "http"
    if len(said) >= _FRAME_HEAD_BYTES and said[3] == _SETTINGS_TYPE and said[:1] == b"\0":
        return "grpc"
    # This byte begins an alert of TLS.
    return None if said[:1] == b"\x15" else "other"


def _encrypted(connection: socket.socket, host: str) -> Listener:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # Nothing secret is sent and nothing is believed: the probe only asks what the server speaks.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    try:
        with context.wrap_socket(connection, server_hostname=host or None) as encrypted:
            kind: Kind = "grpcs" if encrypted.selected_alpn_protocol() == "h2" else "https"
            if kind == "https":
                return Listener(kind)
            encrypted.sendall(_PREFACE)
            # From TLS 1.3 on a server refuses a client without a certificate after the handshake.
            return Listener(kind, wants_certificate=not _first_words(encrypted))
    except TimeoutError:
        return Listener("silent")
    except ssl.SSLError as error:
        wants = "CERTIFICATE_REQUIRED" in str(error) or "HANDSHAKE_FAILURE" in str(error)
        return Listener("grpcs", wants_certificate=True) if wants else Listener("other")
    except OSError:
        return Listener("other")


def _first_words(connection: socket.socket) -> bytes:
    """Returns the first bytes that arrive, enough to know the protocol; fewer where the connection ends earlier."""
    said = b""
    while len(said) < _FRAME_HEAD_BYTES and (more := connection.recv(512)):
        said += more
    return said


class KnownListener:
    """Finds what listens at one address, and asks again after KEPT_MS. Thread-safe: callers wait for one probe
    together."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._found: Listener | None = None
        self._found_s = -KEPT_MS / 1000

    def find(self) -> Listener | None:
        """Returns what :func:`find_listener` found not longer than KEPT_MS ago."""
        with self._lock:
            if time.monotonic() - self._found_s >= KEPT_MS / 1000:
                self._found = find_listener(self._address)
                self._found_s = time.monotonic()
            return self._found
