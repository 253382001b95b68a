"""A foreign page cannot change anything through a browser: requests without preflight are refused at every API."""

from __future__ import annotations

import pathlib

import pytest

from pillion.gateway.http_api.http_call import host_name, is_cross_origin_write
from tests.support.fake_components import running_fake_cluster
from tests.support.http import call

FORM = "multipart/form-data; boundary=b"
FILE = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n{}\n\r\n--b--\r\n'
)
EVIL, FRIEND = "https://evil.example", "https://chat.example.org"


@pytest.mark.parametrize(
    ("method", "headers", "foreign"),
    [
        # Not a browser: only others omit both headers.
        ("POST", {"content-type": FORM}, False),
        ("POST", {}, False),
        # A browser, for its user or for a page of this port.
        ("POST", {"sec-fetch-site": "none"}, False),
        ("POST", {"sec-fetch-site": "same-origin", "origin": "http://x:8000"}, False),
        ("POST", {"origin": "http://x:8000", "host": "X:8000"}, False),
        # A browser, for a foreign page.
        ("POST", {"content-type": FORM, "sec-fetch-site": "cross-site", "origin": EVIL}, True),
        ("POST", {"content-type": "text/plain; x=application/json", "origin": EVIL, "host": "x"}, True),
        ("POST", {"sec-fetch-site": "same-site", "origin": "http://x:9000", "host": "x:8000"}, True),
        ("POST", {"sec-fetch-site": "cross-site"}, True),
        ("POST", {"origin": "null", "host": "x"}, True),
        ("POST", {"origin": "http://x:9000", "host": "x:8000"}, True),
        ("POST", {"origin": "http://[", "host": "x"}, True),
        ("POST", {"origin": "", "host": "", "sec-fetch-site": "?"}, True),
        ("POST", {"content-type": FORM, "sec-fetch-site": "cross-site", "origin": FRIEND}, False),
        ("POST", {"content-type": "Application/JSON; charset=utf-8", "sec-fetch-site": "cross-site"}, False),
        ("DELETE", {"sec-fetch-site": "cross-site", "origin": EVIL}, False),
        ("GET", {"sec-fetch-site": "cross-site", "origin": EVIL}, False),
    ],
)
def test_cross_origin_writes_are_detected(method: str, headers: dict[str, str], foreign: bool) -> None:
    raw = {name.encode(): value.encode() for name, value in headers.items()}
    assert is_cross_origin_write(method, raw, {FRIEND}) is foreign
    assert not is_cross_origin_write(method, raw, {"*"}) or "origin" not in headers


def kept(path: pathlib.Path) -> list[pathlib.Path]:
    return list(path.glob("files/*.json"))


async def test_foreign_pages_cannot_write_at_any_api(tmp_path: pathlib.Path) -> None:
    flags = {"batch_path": str(tmp_path), "allowed_origins": (FRIEND,), "ui": True}
    async with running_fake_cluster(**flags) as fakes:
        address = fakes.gateway.http_address
        pages = (await call(address, "/openapi.json")).json["paths"]
        posts = [path.replace("{id}", "batch_" + "0" * 24) for path, methods in pages.items() if "post" in methods]
        assert {"/v1/files", "/v1/chat/completions", "/v1/load_lora_adapter"} <= set(posts)
        for path in posts:
            for kind in (FORM, "text/plain", "application/x-www-form-urlencoded"):
                headers = {"Content-Type": kind, "Origin": EVIL}
                reply = await call(address, path, FILE, headers)
                assert (reply.status, reply.error["code"]) == (403, "cross_origin"), path
                assert "--allowed-origins" in reply.error["message"]
                assert reply.headers["connection"] == "close"
            assert (await call(address, path, headers={"Sec-Fetch-Site": "cross-site"}, method="POST")).status == 403
            asked = {"Origin": EVIL, "Access-Control-Request-Method": "POST"}
            asked["Access-Control-Request-Headers"] = "content-type"
            assert (
                "access-control-allow-origin"
                not in (await call(address, path, headers=asked, method="OPTIONS")).headers
            )
        assert kept(tmp_path) == []
        for origin in (FRIEND, f"http://{address}"):
            headers = {"Content-Type": FORM, "Origin": origin, "Host": address}
            assert (await call(address, "/v1/files", FILE, headers)).status == 200
        assert (await call(address, "/v1/files", FILE, {"Content-Type": FORM})).status == 200
        assert len(kept(tmp_path)) == 3


@pytest.mark.parametrize(
    ("allowed", "origin", "status", "is_private"),
    [
        ((FRIEND,), FRIEND, 200, True),
        (("*",), FRIEND, 200, False),
        (("*", FRIEND), FRIEND, 200, True),
        (("*", FRIEND), EVIL, 200, False),
        ((FRIEND,), EVIL, 400, False),
    ],
)
async def test_an_allowed_page_may_access_a_private_network(
    allowed: tuple[str, ...], origin: str, status: int, is_private: bool
) -> None:
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    asked["Access-Control-Request-Headers"] = "content-type"
    async with running_fake_cluster(allowed_origins=allowed) as fakes:
        address = fakes.gateway.http_address
        for private in ({}, {"Access-Control-Request-Private-Network": "true"}):
            reply = await call(address, "/v1/completions", headers=asked | private, method="OPTIONS")
            assert reply.status == status
            said = reply.headers.get("access-control-allow-private-network")
            assert said == ("true" if is_private and private else None)


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("Evil.example:8000", "evil.example"), ("evil.example.", "evil.example"), ("localhost", "localhost"),
        ("127.0.0.1:8000", ""), ("[::1]:8000", ""), ("[::1]", ""), ("::1", ""), ("10.1.2.3", ""), ("", ""),
        ("127.0.0.1.evil.example", "127.0.0.1.evil.example"), ("evil.example:", "evil.example"),
        ("2130706433", "2130706433"), ("[evil]:1", "[evil]"),
    ],
)  # fmt: skip
def test_the_host_name_is_parsed_from_the_host_header(host: str, name: str) -> None:
    assert host_name(host) == name


async def test_dns_rebinding_is_refused() -> None:
    """DNS rebinding: the page's own name is Host and Origin, and the browser sees a same-origin request."""
    chat = {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}
    async with running_fake_cluster(allowed_hosts=("llm.example.org",), ui=True) as fakes:
        address = fakes.gateway.http_address
        port = address.rpartition(":")[2]
        for evil in (
            *("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "localhost.evil.example"),
            *("host.docker.internal.evil.example", "evil.docker.internal", "internal"),
        ):
            said = {"Host": evil, "Origin": f"http://{evil}", "Sec-Fetch-Site": "same-origin"}
            for path, body in (
                *((page, None) for page in ("/v1/models", "/metrics", "/health", "/ui", "/v1/files", "/nothing")),
                *(("/v1/chat/completions", chat), ("/v1/messages", chat | {"max_tokens": 5}), ("/v1/files", FILE)),
            ):
                refused = await call(address, path, body, said)
                assert (refused.status, refused.error["code"]) == (421, "misdirected_request"), (evil, path)
                assert "--allowed-hosts" in refused.error["message"]
        assert not fakes.decode.submits
        for own in (
            "localhost",
            "LOCALHOST:1",
            "a.localhost",
            address,
            "[::1]:8000",
            "10.0.0.7",
            "llm.example.org:443",
            f"host.docker.internal:{port}",
            "host.containers.internal",
        ):
            assert (await call(address, "/v1/chat/completions", chat, {"Host": own})).status == 200, own


async def test_any_host_is_allowed_with_keys_or_a_public_address() -> None:
    """A container listens on all addresses, and its proxy chooses the name."""
    for flags in ({"host": "0.0.0.0"}, {"allowed_hosts": ("*",)}, {"api_key": ("sk-" + "a" * 40,)}):
        async with running_fake_cluster(**flags) as fakes:
            address = "127.0.0.1:" + fakes.gateway.http_address.rpartition(":")[2]
            assert (await call(address, "/health", headers={"Host": "pillion.models.svc:8000"})).status == 200, flags
    async with running_fake_cluster(host="0.0.0.0", allowed_hosts=("llm.example.org",)) as fakes:
        address = "127.0.0.1:" + fakes.gateway.http_address.rpartition(":")[2]
        assert (await call(address, "/health", headers={"Host": "evil.example"})).status == 421
        assert (await call(address, "/health", headers={"Host": "llm.example.org"})).status == 200
