"""`pillion certs` and `pillion keys`: what they write, what they refuse."""

from __future__ import annotations

import pathlib
import shutil
import ssl
import stat
import subprocess

import pytest
from click.testing import CliRunner

from pillion.cli import certs
from pillion.cli.app import cli
from pillion.cli.certs import NAMES, make_certs
from pillion.cli.keys import add_key
from pillion.errors import ConfigError
from pillion.gateway.admission.api_keys import hash_of, read_keys

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")


def text_of(path: pathlib.Path) -> str:
    done = subprocess.run(
        ["openssl", "x509", "-in", path, "-noout", "-text"], capture_output=True, text=True, check=True
    )
    return done.stdout


@needs_openssl
def test_a_set_of_certificates(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "certs"
    result = CliRunner().invoke(cli, ["certs", str(folder), "--host", "llm.example.org", "--host", "10.0.0.7"])
    assert result.exit_code == 0, result.output
    assert "--internal-tls-ca=" in result.output
    assert {path.name for path in folder.iterdir()} == {f"{name}.{kind}" for name in NAMES for kind in ("pem", "key")}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in folder.glob("*.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    server, internal, client = (text_of(folder / f"{name}.pem") for name in ("server", "internal", "client"))
    for name in ("DNS:localhost", "IP Address:127.0.0.1", "DNS:llm.example.org", "IP Address:10.0.0.7"):
        assert name in server
    assert "DNS:pillion.internal" in internal
    assert "TLS Web Client Authentication" in internal
    assert "TLS Web Server Authentication" not in client
    for name, authority in (("server", "ca"), ("client", "ca"), ("internal", "internal-ca")):
        verify = ["openssl", "verify", "-CAfile", folder / f"{authority}.pem", folder / f"{name}.pem"]
        subprocess.run(verify, check=True, capture_output=True)
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")


@needs_openssl
def test_nothing_is_overwritten(tmp_path: pathlib.Path) -> None:
    (tmp_path / "internal.key").write_text("mine")
    with pytest.raises(ConfigError, match="there already"):
        make_certs(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["internal.key"]
    assert (tmp_path / "internal.key").read_text() == "mine"


@needs_openssl
@pytest.mark.parametrize("host", ["a b", "x,DNS:evil", "", "[section]", "ä.org"])
def test_a_host_is_a_name_or_an_address(tmp_path: pathlib.Path, host: str) -> None:
    with pytest.raises(ConfigError, match="neither a host name nor an address"):
        make_certs(tmp_path / "c", [host])
    assert not (tmp_path / "c").exists()


@needs_openssl
@pytest.mark.parametrize("days", [0, 100_000])
def test_days_are_bounded(tmp_path: pathlib.Path, days: int) -> None:
    with pytest.raises(ConfigError, match="--days"):
        make_certs(tmp_path / "c", days=days)


def test_without_openssl_it_says_so(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certs.shutil, "which", lambda _: None)
    with pytest.raises(ConfigError, match="install openssl"):
        make_certs(tmp_path)


def test_openssls_own_complaint_is_one_line(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certs.shutil, "which", lambda _: "/bin/false")
    with pytest.raises(ConfigError, match="openssl req: exit status 1"):
        make_certs(tmp_path / "c")


def test_keys_are_added_to_a_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "keys.toml"
    result = CliRunner().invoke(cli, ["keys", "add", str(path), "--tenant", "acme"])
    assert result.exit_code == 0, result.output
    keys = [result.output.strip(), add_key(path, "acme"), add_key(path, "new.one")]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not any(key in path.read_text() for key in keys)
    ring = read_keys(str(path))
    assert [ring.tenant_of(f"Bearer {key}").name for key in keys] == ["acme", "acme", "new.one"]
    assert [path.name for path in tmp_path.iterdir()] == ["keys.toml"]


def test_what_was_there_stays(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("# ours\n[tenant.acme]\nweight = 3 # much\n")
    key = add_key(path, "acme")
    assert "# ours" in path.read_text()
    assert read_keys(str(path)).tenant_of(f"Bearer {key}").weight == 3.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[tenant.ops]\n",
        "[ tenant . 'ops' ] # us\nweight = 3\noperator = false\n[tenant.opsy]\noperator = false\n",
        '[[key]]\ntenant = "ops"\nid = "x"\nhash = "sha256:'
        + "0" * 64
        + '"\n[tenant."ops"]\nweight=3\n# no operator\n',
        "[tenant.ops]\noperator = true\n",
    ],
)
def test_a_key_of_an_operator(tmp_path: pathlib.Path, text: str) -> None:
    path = tmp_path / "keys.toml"
    if text:
        path.write_text(text)
    result = CliRunner().invoke(cli, ["keys", "add", str(path), "--tenant", "ops", "--operator"])
    assert result.exit_code == 0, result.output
    ring = read_keys(str(path))
    assert ring.tenant_of(f"Bearer {result.output.strip()}").operator
    assert [name for name, tenant in ring.tenants.items() if tenant.operator] == ["ops"]
    assert {line for line in text.splitlines() if "operator" not in line} <= set(path.read_text().splitlines())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[tenant.acme]\nweight = 3\n",
        '[tenant.acme]\nmodels = ["demo"] # theirs\nweight = 3\n[tenant.other]\nmodels = ["demo"]\n',
        '[tenant.acme]\nmodels = [\n  "demo",\n  "sql",\n]\nweight = 3\n',
    ],
)
def test_a_tenant_is_limited_to_models(tmp_path: pathlib.Path, text: str) -> None:
    path = tmp_path / "keys.toml"
    if text:
        path.write_text(text)
    add = ["keys", "add", str(path), "--tenant", "acme"]
    result = CliRunner().invoke(cli, [*add, "--models", "sql", "--models", "größe"])
    assert result.exit_code == 0, result.output
    ring = read_keys(str(path))
    tenant = ring.tenant_of(f"Bearer {result.output.strip()}")
    assert (tenant.models, tenant.weight) == (("sql", "größe"), 3.0 if text else 1.0)
    assert [other.models for name, other in ring.tenants.items() if name != "acme"] in ([], [("demo",)])
    # Another key leaves that as it is.
    assert CliRunner().invoke(cli, add).exit_code == 0
    assert read_keys(str(path)).tenants["acme"].models == ("sql", "größe")


def test_a_table_that_is_not_found_is_named(tmp_path: pathlib.Path) -> None:
    path, text = tmp_path / "keys.toml", "tenant = {ops = {weight = 2}}\n"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"write operator = true into \[tenant.ops\] by hand"):
        add_key(path, "ops", operator=True)
    assert path.read_text() == text


@pytest.mark.parametrize(("text", "tenant"), [("[tenant", "acme"), ("", "a b"), ("", 'x"]'), ("", ""), ("", "-x")])
def test_a_bad_file_or_name_changes_nothing(tmp_path: pathlib.Path, text: str, tenant: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        add_key(path, tenant)
    assert path.read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["keys.toml"]


def test_the_hash_of_a_key_that_exists() -> None:
    key = "k" * 40
    result = CliRunner().invoke(cli, ["keys", "hash"], input=f"{key}\n")
    assert result.output.strip() == hash_of(key)
    assert CliRunner().invoke(cli, ["keys", "hash"], input="short\n").exit_code != 0
