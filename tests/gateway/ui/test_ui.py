"""The web page over HTTP: access, and the headers that restrict it. For its look see test_ui.py of tests/cluster."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import re

import pytest
from click.testing import CliRunner

from pillion.cli.checks import check_flags
from pillion.cli.explain_command import explain
from pillion.config import GatewayFlags
from pillion.errors import ConfigError
from pillion.gateway.admission.api_keys import hash_of
from pillion.gateway.recorder.record_folder import make_key, write
from pillion.gateway.ui import ui_api
from pillion.gateway.ui.ui_api import FOLDER, read_files
from pillion.records import bundle as bundles
from tests.gateway.recorder.test_recorder import recorded
from tests.pillion.records.test_bundle import bundle_of
from tests.support.fake_components import running_fake_cluster
from tests.support.http import call

LIBRARY = "markdown-it.js"
LIBRARY_SHA256 = "d5432491790141da046b1197353705db03264f40b5727f3b4b591f5aba193e30"
KEY, TENANTS_KEY = "plk-" + "o" * 43, "plk-" + "a" * 43
TWO_TENANTS = (
    f'[tenant.ops]\noperator = true\n[[key]]\ntenant = "ops"\nhash = "{hash_of(KEY)}"\n'
    f'[tenant.acme]\n[[key]]\ntenant = "acme"\nhash = "{hash_of(TENANTS_KEY)}"\n'
)
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


async def test_the_ui_is_not_served_without_the_flag() -> None:
    async with running_fake_cluster() as fakes:
        for path in ("/ui", "/ui/page.js", "/ui/cluster"):
            assert (await call(fakes.gateway.http_address, path)).status == 404


async def test_the_ui_page_is_public_but_its_data_need_a_key(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys.toml").write_text(TWO_TENANTS)
    monkeypatch.setenv("PILLION_API_KEY", KEY)
    async with running_fake_cluster(ui=True, api_keys=str(tmp_path / "keys.toml")) as fakes:
        address = fakes.gateway.http_address
        page = await call(address, "/ui")
        assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        files = re.findall(rb'(?:src|href)="(ui/[^"]+)"', page.body)
        assert sorted(files) == [b"ui/page.css", b"ui/page.js"]
        for name in (*read_files(), "../ui"):
            file = await call(address, f"/ui/{name}")
            assert file.status == (200 if name != "../ui" else 404)
        for name in ("__init__.py", "%2e%2e%2fui_api.py", "nothing.js"):
            assert (await call(address, f"/ui/{name}")).status == 404
        for reply in (page, await call(address, "/ui/page.js")):
            policy = reply.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; ")
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
            assert (reply.headers["cache-control"], reply.headers["x-content-type-options"]) == ("no-store", "nosniff")
        asked = {"": 401, "plk-wrong": 401, TENANTS_KEY: 403, KEY: 200}
        for key, status in asked.items():
            picture = await call(address, "/ui/cluster", headers=bearer(key))
            assert picture.status == status
            # Even after an operator's request, which leaves a cached picture.
            assert (b"decode-0" in picture.body) == (status == 200)
        assert (await call(address, "/ui/records", headers=bearer(KEY))).status == 404
        again = await call(address, "/ui/cluster", headers=bearer(TENANTS_KEY))
        assert (again.status, again.error["code"]) == (403, "permission_denied")


async def test_operators_see_the_output_of_explain(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, folder = tmp_path / "keys.toml", tmp_path / "records"
    keys.write_text(TWO_TENANTS)
    monkeypatch.setenv("PILLION_API_KEY", KEY)
    asked = {"": 401, "plk-wrong": 401, TENANTS_KEY: 403, KEY: 200}
    flags = {"record_path": str(folder), "record_share": 1.0, "record_content": "full"}
    async with running_fake_cluster(ui=True, api_keys=str(keys), **flags) as fakes:
        address = fakes.gateway.http_address
        for key in (KEY, TENANTS_KEY):
            assert (await call(address, "/v1/chat/completions", CHAT, headers=bearer(key))).status == 200
        await recorded(folder, 2)
        replies = {key: await call(address, "/ui/records", headers=bearer(key)) for key in asked}
    assert {key: reply.status for key, reply in replies.items()} == asked
    assert not [key for key, reply in replies.items() if key != KEY and b"toy" in reply.body]
    stories = replies[KEY].json["stories"]
    assert [story["title"].split(" of ")[1] for story in stories] == [
        "tenant acme, toy: share",
        "tenant ops, toy: share",
    ]
    for story in stories:
        told = CliRunner().invoke(explain, [story["id"], "--record-path", str(folder), "--json"])
        assert json.loads(told.output) == story
    assert b'"hi"' not in replies[KEY].body


def test_stories_are_bounded_and_name_missing_parts(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, names = make_key(tmp_path), [f"{number:024x}" for number in range(4)]
    for number, name in enumerate(names):
        write(tmp_path, name, bundles.encode(bundle_of(id=name), b"k" * 32 if number == 1 else key))
        os.utime(tmp_path / f"{name}.json", (number, number))
    (tmp_path / f"{names[2]}.json").write_bytes(b" " * 2**19)
    os.utime(tmp_path / f"{names[2]}.json", (2, 2))

    def told() -> list[str]:
        stories = json.loads(ui_api.newest_stories(str(tmp_path), ""))["stories"]
        return [f"{story['title'][-8:]}: {story['sentences'][0]}" for story in stories]

    first, large, changed, last = told()
    assert "The first token came after" in first
    assert "too large for this page" in large
    assert "its HMAC is wrong" in changed
    assert "The first token came after" in last
    monkeypatch.setattr(ui_api, "NEWEST_STORIES", 2)
    assert told() == [first, large]
    monkeypatch.setattr(ui_api, "NEWEST_STORIES", 1)
    size = len(ui_api.newest_stories(str(tmp_path), ""))
    monkeypatch.setattr(ui_api, "NEWEST_STORIES", 2)
    monkeypatch.setattr(ui_api, "MAX_STORIES_BYTES", size)
    assert told() == [first]


def test_the_page_has_no_inline_scripts_or_styles() -> None:
    """The CSP would block them, and inline handlers as well."""
    page = (FOLDER / "page.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son[a-z]+=", page)
    library = (FOLDER / LIBRARY).read_text()
    own = [path.read_text() for path in sorted(FOLDER.iterdir()) if not path.name.startswith("markdown-it")]
    for text in (*own, library):
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text)
    # A Markdown renderer could create HTML, but the page uses its tokens alone.
    every = "".join(own)
    assert not re.search(r"\.render(Inline)?\(", every)
    assert set(re.findall(r"https?://[^\s\"'%)]+", every)) == {"http://www.w3.org/2000/svg"}


def test_the_library_is_unmodified() -> None:
    """Same file as in ``npm pack markdown-it@15.0.3``; its licence and those of its parts are included."""
    assert hashlib.sha256((FOLDER / LIBRARY).read_bytes()).hexdigest() == LIBRARY_SHA256
    licences = (FOLDER / "markdown-it.LICENSE").read_text()
    parts = ("markdown-it", "entities", "linkify-it", "mdurl", "punycode.js", "uc.micro")
    assert all(f"---- {name} ----" in licences for name in parts)


def test_a_public_page_needs_keys() -> None:
    flags = GatewayFlags(model="toy", redis_url="redis://127.0.0.1:1", host="0.0.0.0", ui=True)
    with pytest.raises(ConfigError, match=r"--ui at 0\.0\.0\.0 needs --api-keys"):
        check_flags(flags)


async def test_timings_equal_the_sdks() -> None:
    async with running_fake_cluster() as fakes:
        address = fakes.gateway.http_address
        whole = (await call(address, "/v1/chat/completions", CHAT | {"timings": True})).json
        told = [delta async for delta in fakes.client.generate("hi")][-1].timings
        assert told is not None
        assert set(whole["timings"]) == set(told.__dataclass_fields__)
        assert whole["timings"]["decode_worker"] == told.decode_worker == "decode-0"
        spent = sum(whole["timings"][f"{kind}_tokens"] for kind in ("cached", "prefilled", "tail"))
        assert spent == whole["usage"]["prompt_tokens"]
        assert "timings" not in (await call(address, "/v1/chat/completions", CHAT)).json
        streamed = CHAT | {"stream": True, "timings": True}
        *events, last = (await call(address, "/v1/chat/completions", streamed)).events
        assert not any("timings" in event for event in events)
        assert (last["choices"], "usage" in last, last["timings"]["tail_tokens"] > 0) == ([], False, True)
        both = streamed | {"stream_options": {"include_usage": True}}
        last = (await call(address, "/v1/chat/completions", both)).events[-1]
        assert last["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
        several = await call(address, "/v1/completions", {"model": "toy", "prompt": ["a", "b"], "timings": True})
        assert (several.status, several.error["param"]) == (400, "timings")
