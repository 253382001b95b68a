"""Says in one sentence what to do about a connection that failed, by what listens at its address."""

from __future__ import annotations

import re

from pillion.net.listener import GRPC_DEFAULT_PORT, Listener

START = "start a cluster with `pillion serve`, or give the address of one that runs"
# Versions of gRPC say in different words that a certificate is for other names.
_OTHER_NAMES = ("Hostname Verification", "is not in peer certificate")
_VERIFY_FAILED = re.compile(r"CERTIFICATE_VERIFY_FAILED:? ?([^;)\n]*)")


def grpc_advice(address: str, listener: Listener, encrypted: bool, said: str) -> str:
    """Says why a gRPC client does not reach a server, and what to do; returns "" where the server is as the client
    wants it.

    Args:
        address: the address that the client calls, without a scheme.
        encrypted: whether the client speaks TLS.
        said: gRPC's own words, which tell why a certificate was refused.
    """
    kind = listener.kind
    if kind in ("http", "https"):
        return (
            f"{address} is a port of HTTP, and this client speaks gRPC: give the gateway's gRPC port, which is 50051 "
            "unless --grpc-port says otherwise"
        )
    if kind == "grpc" and encrypted:
        return f"{address} speaks gRPC without TLS: leave out grpcs://, --ca, --cert and --key (ca=, cert=, key=, tls=)"
    if kind == "grpcs" and not encrypted:
        return (
            f"{address} speaks TLS: write grpcs://{address}, with --ca FILE (ca= in Python) where no authority "
            "that the system knows has signed its certificate"
        )
    if kind == "grpcs":
        return _certificate_advice(address, listener, said)
    return "" if kind == "grpc" else _silence_advice(address, listener, START)


def http_advice(address: str, listener: Listener, encrypted: bool) -> str:
    """Says why an HTTP client does not reach a server, as :func:`grpc_advice` does for gRPC."""
    kind = listener.kind
    if kind in ("grpc", "grpcs"):
        return (
            f"{address} is a port of gRPC: give the gateway's HTTP port, which is 8000 unless --http-port says "
            "otherwise"
        )
    if kind == "http" and encrypted:
        return f"{address} speaks HTTP without TLS: write http://"
    if kind == "https" and not encrypted:
        return f"{address} speaks TLS: write https://"
    return "" if kind in ("http", "https") else _silence_advice(address, listener, "is the server started?")


def _silence_advice(address: str, listener: Listener, start: str) -> str:
    kind = listener.kind
    if kind == "nothing":
        port = "" if ":" in address else f" (no port was given, so it is {GRPC_DEFAULT_PORT})"
        return f"no server listens at {address}{port}: {listener.reason}; {start}"
    if kind == "unknown host":
        return f"the host of {address} is not known: {listener.reason}"
    if kind == "unreachable":
        return f"{address} takes no connection in time: is the host up, and does a firewall let the port through?"
    if kind == "silent":
        return f"{address} takes connections and says nothing: is the process behind it stopped, or is it another one?"
    return f"what listens at {address} speaks neither gRPC nor HTTP"


def _certificate_advice(address: str, listener: Listener, said: str) -> str:
    if listener.wants_certificate:
        return f"{address} takes clients with a certificate that it trusts only: give --cert and --key (cert=, key=)"
    if any(words in said for words in _OTHER_NAMES):
        host = address.rpartition(":")[0] or address
        return f"the certificate of {address} is for other names than {host}: call it by a name that it has"
    if found := _VERIFY_FAILED.search(said):
        return (
            f"the certificate of {address} is not trusted ({found[1].strip()}): give the PEM of the authority that has "
            "signed it by --ca FILE (ca= in Python)"
        )
    return ""
