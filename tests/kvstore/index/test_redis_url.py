"""Valid and invalid values of --redis-url."""

from __future__ import annotations

import pytest
import redis.asyncio

from pillion.errors import ConfigError
from pillion.kvstore.index.index import Index
from pillion.kvstore.index.redis_url import CLUSTER, SENTINEL, SINGLE, connect, parse, without_password


def test_a_single_server_url_is_parsed() -> None:
    place = parse("redis://bob:p%40ss%2Fw@h:7000/3")
    assert (place.mode, place.hosts) == (SINGLE, (("h", 7000),))
    assert place.settings == {"username": "bob", "password": "p@ss/w", "db": 3}
    assert parse("redis://h").hosts == (("h", 6379),)
    assert parse("redis://[::1]:7000").hosts == (("::1", 7000),)
    assert parse("redis://[::1]").hosts == (("::1", 6379),)
    assert parse("redis://:secret@h").settings["password"] == "secret"
    unix = parse("unix://bob:x@/run/redis.sock?db=2")
    assert (unix.hosts, unix.settings["path"], unix.settings["db"]) == ((), "/run/redis.sock", 2)
    assert unix.settings["username"] == "bob"


def test_a_sentinel_url_is_parsed() -> None:
    place = parse("redis+sentinel://bob:x@s1,s2:7001/my%20index/4?sentinel_username=u&sentinel_password=w")
    assert (place.mode, place.service) == (SENTINEL, "my index")
    assert place.hosts == (("s1", 26379), ("s2", 7001))
    assert place.settings == {"username": "bob", "password": "x", "db": 4}
    assert place.sentinel_settings == {"username": "u", "password": "w"}


def test_a_tls_cluster_url_is_parsed() -> None:
    options = "ssl_ca_certs=/etc/ca.pem&ssl_check_hostname=false&ssl_certfile=c&ssl_keyfile=k"
    place = parse(f"rediss+cluster://bob:x@c1:7000,c2?{options}")
    assert (place.mode, place.hosts) == (CLUSTER, (("c1", 7000), ("c2", 6379)))
    tls = {"ssl_ca_certs": "/etc/ca.pem", "ssl_check_hostname": False, "ssl_certfile": "c", "ssl_keyfile": "k"}
    assert place.settings == {"username": "bob", "password": "x", "db": 0, "ssl": True, **tls}
    assert place.sentinel_settings == {"ssl": True, **tls}


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("redis://127.0.0.1:1/2", redis.asyncio.Redis),
        ("rediss://127.0.0.1:1?ssl_cert_reqs=none&ssl_check_hostname=no", redis.asyncio.Redis),
        ("unix:///nowhere.sock", redis.asyncio.Redis),
        ("redis+sentinel://127.0.0.1:1/main", redis.asyncio.Redis),
        (f"rediss+sentinel://127.0.0.1:1/main?ssl_ca_certs={__file__}", redis.asyncio.Redis),
        ("redis+cluster://127.0.0.1:1", redis.asyncio.RedisCluster),
        (f"rediss+cluster://127.0.0.1:1?ssl_ca_certs={__file__}", redis.asyncio.RedisCluster),
    ],
)
async def test_each_form_makes_a_client(url: str, kind: type) -> None:
    client = connect(parse(url))
    assert isinstance(client, kind)
    await client.aclose()


@pytest.mark.parametrize(
    "url",
    [
        "nonsense",
        "",
        "http://x",
        "redis://user:secret@host:notaport",
        "redis://user:secret@host:70000",
        "redis://user:secret@host/notadb",
        "redis://user:secret@host?ssl_ca_certs=x",
        "redis://user:secret@host?socket_timeout=1",
        "rediss://user:secret@host?password=secret",
        "rediss://user:secret@host?ssl_cert_reqs=perhaps",
        "rediss://user:secret@host?ssl_ca_certs=/nowhere.pem",
        "unix://",
        "unix+cluster:///x",
        "redis+://host",
        "redis+ring://host",
        "redis+sentinel://user:secret@host",
        "redis+sentinel://user:secret@host/main/x",
        "redis+cluster://user:secret@host/1",
        "redis://" + ",".join(f"h{number}" for number in range(65)),
        "redis://h1,h2",
    ],
)
def test_urls_are_checked_at_start(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Index(url)
    assert "secret" not in caught.value.message


def test_messages_show_no_credentials() -> None:
    url = "redis+sentinel://bob:a@b@s1,s2/main?sentinel_password=x"
    assert without_password(url) == "redis+sentinel://s1,s2/main"
