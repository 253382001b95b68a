"""The address that a component advertises without a flag."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

from pillion.config import DecodeFlags, KVNodeFlags
from pillion.errors import ConfigError
from pillion.kvstore.index import advertise
from pillion.kvstore.index.advertise import advertised
from pillion.supervisor.component_process import name_of

REDIS = "redis://127.0.0.1:6379/0"


@pytest.mark.parametrize(
    ("flag", "listening", "redis_url", "expected"),
    [
        ("decode:50063", "0.0.0.0:50063", REDIS, "decode:50063"),
        ("", "10.1.2.3:50063", REDIS, "10.1.2.3:50063"),
        ("", "unix:/run/x.sock", REDIS, "unix:/run/x.sock"),
        ("", "worker-3:50063", REDIS, "worker-3:50063"),
        # All parts that share a Redis on loopback, or a Unix socket, are on this machine.
        ("", "0.0.0.0:50063", REDIS, "127.0.0.1:50063"),
        ("", "0.0.0.0:50063", "redis://:secret@localhost", "127.0.0.1:50063"),
        ("", "0.0.0.0:50063", "unix:///run/redis.sock", "127.0.0.1:50063"),
        ("", "[::]:50063", REDIS, "127.0.0.1:50063"),
        ("", "[::]:50063", "unix:///run/redis.sock", "[::1]:50063"),
        ("", "0.0.0.0:50063", "redis+sentinel://nowhere.invalid,127.0.0.1/main", "127.0.0.1:50063"),
    ],
)
def test_addresses_to_advertise(flag: str, listening: str, redis_url: str, expected: str) -> None:
    assert advertised(flag, listening, redis_url) == expected


def test_the_default_route_is_advertised_without_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advertise, "DEFAULT_ROUTE_PROBES", (("127.0.0.1", 9),))
    assert advertised("", "0.0.0.0:1", "redis://nowhere.invalid") == "127.0.0.1:1"
    assert advertised("", "0.0.0.0:1", "") == "127.0.0.1:1"
    monkeypatch.setattr(advertise, "DEFAULT_ROUTE_PROBES", ())
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0:1 has no address"):
        advertised("", "0.0.0.0:1", "redis://nowhere.invalid")


def test_the_advertised_address_has_the_wildcards_ip_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """An IPv4 wildcard is not reachable at an IPv6 address, nor a link-local address by anyone else."""

    def found(*_: Any, **__: Any) -> list[tuple[Any, ...]]:
        return [
            (socket.AF_INET6, socket.SOCK_DGRAM, 0, "", ("::1", 6379, 0, 0)),
            (socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.0.1", 6379)),
        ]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    assert advertised("", "0.0.0.0:1", "redis://redis") == "127.0.0.1:1"
    if socket.has_ipv6:
        assert advertised("", "[::]:1", "redis://redis") in ("[::1]:1", "127.0.0.1:1")


def test_default_component_ids_differ_between_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    """In two containers the process ids are equal, but the host names are not."""
    monkeypatch.setattr(os, "getpid", lambda: 7)
    names = set()
    for host in ("0e0d7e8d3d96", "9dc46c291b8a"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        names.add(name_of("decode", DecodeFlags()))
    assert names == {"decode-0e0d7e8d3d96-7", "decode-9dc46c291b8a-7"}
    assert name_of("decode", DecodeFlags(component_id="me")) == "me"
    assert name_of("kvnode", KVNodeFlags(node_id="pod-3")) == "pod-3"
