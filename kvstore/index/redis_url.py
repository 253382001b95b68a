"""Syntax of --redis-url, and the redis-py client for such a URL.

    redis://[user:password@]host[:port][/db]                        one server; rediss:// for TLS
    unix://[user:password@]/path[?db=n]                             one server on this machine
    redis+sentinel://[user:password@]host[:port],.../service[/db]   the master of a service; rediss+sentinel:// for TLS
    redis+cluster://[user:password@]host[:port],...                 a Redis Cluster; rediss+cluster:// for TLS

Options are passed as a query: ?ssl_ca_certs=ca.pem&ssl_certfile=... for TLS, and sentinel_username and
sentinel_password for Sentinels that require them. User and password are percent-encoded if necessary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import parse_qsl, unquote, urlencode

import redis.asyncio
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from pillion.errors import ConfigError

CONNECT_TIMEOUT_MS = 1000
# Max connections per link and server; RedisLink limits concurrent calls to it.
MAX_CONNECTIONS = 16
MAX_HOSTS = 64

# Values of RedisPlace.mode.
SINGLE: Final = "one server"
SENTINEL: Final = "sentinel"
CLUSTER: Final = "cluster"

_TLS_OPTIONS = frozenset(
    f"ssl_{name}" for name in ("ca_certs", "ca_data", "cert_reqs", "certfile", "check_hostname", "ciphers", "keyfile")
)
_SENTINEL_OPTIONS = frozenset({"sentinel_username", "sentinel_password"})

Client = redis.asyncio.Redis | redis.asyncio.RedisCluster


# The value of --redis-url or, in the simulator, a replacement for the client.
RedisServerAt = str | Client


@dataclass(frozen=True, slots=True)
class RedisPlace:
    """A parsed --redis-url.

    Attributes:
        mode: ``SINGLE``, ``SENTINEL`` or ``CLUSTER``.
        hosts: hosts and ports of the server, the Sentinels or some Cluster nodes; empty for a Unix socket.
        service: name of the Sentinels' service; "" for other modes.
        settings: keyword arguments of redis-py's connections: credentials, db, path, TLS.
        sentinel_settings: keyword arguments of connections to the Sentinels themselves.
    """

    mode: str
    hosts: tuple[tuple[str, int], ...]
    service: str
    settings: Mapping[str, Any]
    sentinel_settings: Mapping[str, Any]


def parse(url: str) -> RedisPlace:
    """Parse a --redis-url. Raises ConfigError, whose message contains no password, for an invalid one."""
    try:
        return _parse(url)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"--redis-url {without_password(url)}: {error}") from None


def connect(place: RedisPlace) -> Client:
    """Create a client, which connects on first use. Raises ConfigError for settings that redis-py refuses."""
    # RedisLink limits a call's time; retries by redis-py would only use it up.
    limits: dict[str, Any] = {
        "socket_connect_timeout": CONNECT_TIMEOUT_MS / 1000,
        "socket_timeout": None,
        "max_connections": MAX_CONNECTIONS,
        "retry": Retry(NoBackoff(), 0),
    }
    settings = {**place.settings, **limits}
    for option in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
        if option in settings and not Path(settings[option]).is_file():
            raise ConfigError(f"--redis-url: {option}: no file {settings[option]}")
    try:
        if place.mode == CLUSTER:
            # The client asks one node after another for the slot map, so limit the time for each.
            settings["socket_timeout"] = CONNECT_TIMEOUT_MS / 1000
            nodes = [ClusterNode(host, port) for host, port in place.hosts]
            return redis.asyncio.RedisCluster(startup_nodes=nodes, require_full_coverage=False, **settings)
        if place.mode == SENTINEL:
            asking = {**place.sentinel_settings, **limits, "socket_timeout": CONNECT_TIMEOUT_MS / 1000}
            sentinels = cast(Any, Sentinel)(place.hosts, sentinel_kwargs=asking, **settings)
            return cast(Client, sentinels.master_for(place.service))
        if place.hosts:
            settings["host"], settings["port"] = place.hosts[0]
        settings["unix_socket_path"] = settings.pop("path", None)
        return redis.asyncio.Redis(**settings)
    except (RedisError, OSError, ValueError, TypeError) as error:
        raise ConfigError(f"--redis-url: {error}") from None


def without_password(url: str) -> str:
    """Return a URL without credentials and options."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.partition('?')[0].rpartition('@')[2]}"


def _parse(url: str) -> RedisPlace:
    scheme, separator, rest = url.partition("://")
    base, plus, kind = scheme.partition("+")
    mode = {"": SINGLE, "sentinel": SENTINEL, "cluster": CLUSTER}.get(kind)
    if not separator or mode is None or (plus and not kind) or base not in ("redis", "rediss", "unix"):
        raise ValueError("choose redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://")
    if base == "unix" and mode != SINGLE:
        raise ValueError("a Unix socket leads to one server")
    body, _, query = rest.partition("?")
    credentials, at, place = body.rpartition("@")
    own, others = _options(query, base, mode)
    if base == "unix":
        settings = dict(parse_url(f"unix://{credentials}{at}{place}?{urlencode(own)}"))
        if not settings.get("path"):
            raise ValueError("a path is missing")
        hosts: tuple[tuple[str, int], ...] = ()
        service = ""
    else:
        named, _, path = place.partition("/")
        hosts = _hosts(named, {SINGLE: 6379, SENTINEL: 26379, CLUSTER: 6379}[mode])
        if mode == SINGLE and len(hosts) > 1:
            raise ValueError("several hosts: choose redis+sentinel:// or redis+cluster://")
        service, db = _path(path, mode)
        # Let redis-py parse credentials and options, in a URL with a dummy host.
        settings = dict(parse_url(f"{base}://{credentials}{at}host/{db}?{urlencode(own)}"))
        settings.pop("host", None)
    if settings.pop("connection_class", None) is SSLConnection:
        settings["ssl"] = True
    tls = {name: value for name, value in settings.items() if name.startswith("ssl")}
    if tls.get("ssl_cert_reqs", "required") not in ("none", "optional", "required"):
        raise ValueError("ssl_cert_reqs: choose none, optional or required")
    return RedisPlace(mode, hosts, service, settings, {**tls, **others})


def _hosts(named: str, default_port: int) -> tuple[tuple[str, int], ...]:
    hosts = []
    for one in named.split(","):
        host, colon, port = one.rpartition(":")
        if not colon or one.endswith("]"):
            host, port = one, str(default_port)
        host = host.removeprefix("[").removesuffix("]") or "localhost"
        if not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"{port!r} is not a port")
        hosts.append((host, int(port)))
    if len(hosts) > MAX_HOSTS:
        raise ValueError(f"more than {MAX_HOSTS} hosts")
    return tuple(hosts)


def _path(path: str, mode: str) -> tuple[str, int]:
    """Return the Sentinels' service and the database number in a URL's path. Raises ValueError."""
    service = ""
    if mode == SENTINEL:
        service, _, path = path.partition("/")
        if not service:
            raise ValueError("the service's name is missing: redis+sentinel://host,host/service")
    if path and not path.isdecimal():
        raise ValueError(f"{path!r} is not a database number")
    if mode == CLUSTER and int(path or 0):
        raise ValueError("a Cluster has database 0 alone")
    return unquote(service), int(path or 0)


def _options(query: str, base: str, mode: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the options for all connections, and those for Sentinels only, by redis-py's names. Raises ValueError."""
    allowed = (_TLS_OPTIONS if base == "rediss" else frozenset()) | (_SENTINEL_OPTIONS if mode == SENTINEL else set())
    allowed |= {"db"} if base == "unix" else set()
    options = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
    if unknown := sorted(options.keys() - allowed):
        known = f"; known: {', '.join(sorted(allowed))}" if allowed else ""
        raise ValueError(f"unknown option {unknown[0]!r}{known}")
    sentinel = {name.removeprefix("sentinel_"): options.pop(name) for name in _SENTINEL_OPTIONS & options.keys()}
    return options, sentinel
