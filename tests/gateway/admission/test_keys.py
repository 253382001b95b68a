"""The keys file: contents, errors, tenants of keys, reloads."""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import os
import pathlib
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pillion.errors import ConfigError, Unauthenticated
from pillion.gateway.admission import api_keys as keys
from pillion.gateway.admission.api_keys import KeyFile, hash_of, new_key, parse_keys, read_keys
from pillion.gateway.admission.tenants import OPEN, Tenant, cache_salt

KEY, OTHER = "plk-" + "a" * 43, "plk-" + "b" * 43
HASH = "sha256:" + hashlib.sha256(KEY.encode()).hexdigest()
ENTRY = f'[[key]]\nid = "one"\ntenant = "acme"\nhash = "{HASH}"\n'


def write(path: pathlib.Path, text: str) -> str:
    """Replace the file atomically, as `mv` does."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)
    return str(path)


def test_plain_keys_work_alone_and_with_a_keys_file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = KeyFile("", ("short", OTHER)).ring
    assert alone.tenant_of("Bearer short") == alone.tenant_of(f"Bearer {OTHER}") == Tenant(name="api-key")
    compared: list[bytes] = []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: bool(compared.append(a)) or compare(a, b))
    with pytest.raises(Unauthenticated, match="Incorrect API key") as caught:
        alone.tenant_of("Bearer shor")
    assert len(compared) == 2
    assert "shor" not in caught.value.message
    quota = "[tenant.api-key]\nrequests_per_minute = 5\n"
    both = KeyFile(write(tmp_path / "keys.toml", f"[tenant.acme]\n{quota}{ENTRY}"), (KEY, "short")).ring
    assert both.tenant_of(f"Bearer {KEY}").name == "acme"
    assert both.tenant_of("Bearer short").requests_per_minute == 5


def test_a_key_identifies_its_tenant() -> None:
    text = """[tenant.acme]
        weight = 2
        requests_per_minute = 60
        tokens_per_minute = 1000
        most_urgent_priority = -5
        max_inflight_requests = 4
        max_inflight_tokens = 100
        cache_group = "shared"
        operator = true
        [tenant.other]
        """
    other = f'[[key]]\ntenant = "other"\nhash = "{hash_of(OTHER)}"\n'
    ring = parse_keys(tomllib.loads(text + ENTRY + other))
    tenant = Tenant(
        name="acme",
        weight=2.0,
        requests_per_minute=60,
        tokens_per_minute=1000,
        most_urgent_priority=-5,
        max_inflight_requests=4,
        max_inflight_tokens=100,
        cache_group="shared",
        operator=True,
    )
    assert ring.tenant_of(f"Bearer {KEY}") == tenant
    assert ring.tenant_of(f"bearer  {KEY} ") == tenant
    assert ring.tenant_of(f"Bearer {OTHER}") == Tenant(name="other")
    assert (tenant.capped(-9), tenant.capped(3)) == (-5, 3)
    assert Tenant(name="other").capped(-1) == 0, "who is not allowed to go before others does not"
    assert OPEN.capped(-100) == -100


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", KEY, f"Basic {KEY}", f"Bearer {KEY}x", "Bearer \xff", "Bearer " + "x" * 10**6]
)
def test_an_unknown_key_has_no_tenant(header: str) -> None:
    ring = parse_keys(tomllib.loads("[tenant.acme]\n" + ENTRY))
    with pytest.raises(Unauthenticated) as caught:
        ring.tenant_of(header)
    assert KEY not in caught.value.message
    assert len(caught.value.message) < 200


def test_a_key_with_a_suffix_is_rejected() -> None:
    longest = "k" * keys.MAX_API_KEY_CHARS
    ring = parse_keys(tomllib.loads("[tenant.acme]\n" + ENTRY.replace(HASH, hash_of(longest))))
    assert ring.tenant_of(f"Bearer {longest}").name == "acme"
    with pytest.raises(Unauthenticated):
        ring.tenant_of(f"Bearer {longest}k")


def test_every_entry_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, real = [], hmac.compare_digest

    def compare(one: bytes, two: bytes) -> bool:
        compared.append((one, two))
        return real(one, two)

    text = "[tenant.acme]\n" + ENTRY + ENTRY.replace(HASH, hash_of(OTHER)) + ENTRY.replace(HASH, "sha256:" + "0" * 64)
    ring = parse_keys(tomllib.loads(text))
    monkeypatch.setattr(keys.hmac, "compare_digest", compare)
    ring.tenant_of(f"Bearer {KEY}")
    assert len(compared) == 3
    assert {two for _, two in compared} == {hashlib.sha256(KEY.encode()).digest()}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("x = 1", "unknown table 'x'"),
        ("[tenant]\nacme = 1", "write a tenant as"),
        ("[tenant.'a b']", "a name has up to 64"),
        ("[tenant.acme]\nwheight = 1", "unknown field 'wheight'"),
        ("[tenant.acme]\nname = 'x'", "unknown field 'name'"),
        ("[tenant.acme]\nweight = 0", "weight must be a number above 0"),
        ("[tenant.acme]\nweight = inf", "weight must be"),
        ("[tenant.acme]\nweight = true", "weight must be"),
        ("[tenant.acme]\nweight = nan", "weight must be"),
        ("[tenant.acme]\nweight = 1" + "0" * 400, "weight must be"),
        ("[tenant.acme]\ntokens_per_minute = 1" + "0" * 400, "must be a whole number"),
        ("", "it has no tenant"),
        ("[tenant.acme]\ntokens_per_minute = -1", "tokens_per_minute must be a whole number"),
        ("[tenant.acme]\nrequests_per_minute = 1.5", "must be a whole number"),
        ("[tenant.acme]\nmost_urgent_priority = 101", "from -100 to 100"),
        ("[tenant.acme]\noperator = 1", "operator must be true or false"),
        ("[tenant.acme]\nkeep_content = 0", "keep_content must be true or false"),
        ("[tenant.acme]\ncache_group = ''", "cache_group must be a name"),
        ("[key]\ntenant = 'acme'", "write a key as"),
        (ENTRY, "there is no [tenant.acme]"),
        ("[tenant.acme]\n" + ENTRY + ENTRY, "two entries have the same key"),
        ("[tenant.acme]\n" + ENTRY.replace("sha256:", "md5:"), "hash must be sha256:"),
        ("[tenant.acme]\n" + ENTRY.replace(HASH, KEY), "hash must be sha256:"),
        ("[tenant.acme]\n" + ENTRY + "secret = 'x'", "unknown field 'secret'"),
        ("[tenant.acme]\n" + ENTRY.replace('"one"', "1"), "are texts"),
        ("[tenant", "keys file"),
        ("x = " + "9" * 5000, "keys file"),
    ],
)
def test_an_invalid_keys_file_is_a_one_line_error(tmp_path: pathlib.Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_keys(write(tmp_path / "keys.toml", text))
    assert complaint in caught.value.message
    assert caught.value.message.startswith(f"keys file {tmp_path}")
    assert "\n" not in caught.value.message


def test_a_missing_binary_or_oversized_keys_file_is_rejected(tmp_path: pathlib.Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="keys file"):
            read_keys(str(path))
    (tmp_path / "raw").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="keys file"):
        read_keys(str(tmp_path / "raw"))
    (tmp_path / "big").write_bytes(b"#" * (keys.MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than"):
        read_keys(str(tmp_path / "big"))


def test_a_bad_change_keeps_the_last_good_file(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pillion.net.watched.AT_REST_S", math.inf)
    path = tmp_path / "keys.toml"
    file = KeyFile(write(path, "[tenant.acme]\n" + ENTRY))
    assert not file.refresh()
    write(path, "[tenant.acme]\n" + ENTRY.replace(HASH, hash_of(OTHER)))
    assert not file.refresh()
    assert file.refresh()
    assert file.ring.tenant_of(f"Bearer {OTHER}").name == "acme"
    with pytest.raises(Unauthenticated):
        file.ring.tenant_of(f"Bearer {KEY}")
    with caplog.at_level(logging.WARNING):
        for text in ("[tenant.acme", "[tenant.acme]\nweight = -1", ""):
            caplog.clear()
            write(path, text)
            for _ in range(4):
                assert not file.refresh()
            assert len(caplog.records) == 1
            assert "the previous content stays in use" in caplog.text
        path.unlink()
        for _ in range(3):
            assert not file.refresh()
    assert file.ring.tenant_of(f"Bearer {OTHER}").name == "acme"


def test_keys_are_long_and_random() -> None:
    made = {new_key() for _ in range(100)}
    assert len(made) == 100
    assert all(len(key) >= 43 and hash_of(key) for key in made)
    for bad in ("short", "x" * 31, "x" * 513, "ä" * 40, "x" * 40 + " y"):
        with pytest.raises(ConfigError):
            hash_of(bad)


NAMES = st.from_regex(r"[a-z0-9][a-z0-9:._-]{0,8}", fullmatch=True)
TENANTS = st.builds(Tenant, name=NAMES, cache_group=st.just("") | NAMES) | st.just(OPEN)
SALTS = st.text(max_size=12) | st.from_regex(r"(tenant|group|open)?:?[0-9]?:?[a-z:]{0,6}", fullmatch=True)


@given(TENANTS, SALTS, TENANTS, SALTS)
def test_distinct_tenant_and_salt_pairs_have_distinct_cache_salts(
    one: Tenant, mine: str, two: Tenant, theirs: str
) -> None:
    def apart(tenant: Tenant, salt: str) -> tuple[str, str, str]:
        return ("group", tenant.cache_group, salt) if tenant.cache_group else ("tenant", tenant.name, salt)

    assert (cache_salt(one, mine) == cache_salt(two, theirs)) == (apart(one, mine) == apart(two, theirs))


def test_a_client_salt_cannot_forge_another_tenants_cache_salt() -> None:
    acme = Tenant(name="acme")
    for given_salt in ("tenant:4:acme:", "4:acme:", ":4:acme:x", "group:1:g:"):
        for other in (OPEN, Tenant(name="a"), Tenant(name="b", cache_group="g"), Tenant(name="tenant")):
            assert cache_salt(other, given_salt) not in (cache_salt(acme, ""), cache_salt(acme, "x"))
    assert cache_salt(OPEN, "") == ""
    assert cache_salt(Tenant(name="a"), "b:c") != cache_salt(Tenant(name="a:b"), "c")
    assert cache_salt(Tenant(name="x", cache_group="a"), "b:c") != cache_salt(Tenant(name="x", cache_group="a:b"), "c")
