"""Certificates for development: the files written, and refusals."""

from __future__ import annotations

import pathlib
import shutil
import ssl
import stat
import subprocess

import pytest
from click.testing import CliRunner

from lab.testbed import certs
from lab.testbed.certs import NAMES, main, make_certs
from pillion.errors import ConfigError

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")


def text_of(path: pathlib.Path) -> str:
    done = subprocess.run(
        ["openssl", "x509", "-in", path, "-noout", "-text"], capture_output=True, text=True, check=True
    )
    return done.stdout


@needs_openssl
def test_a_set_of_certificates(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "certs"
    result = CliRunner().invoke(main, [str(folder), "--host", "llm.example.org", "--host", "10.0.0.7"])
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
def test_existing_certificates_are_not_overwritten(tmp_path: pathlib.Path) -> None:
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


def test_a_missing_openssl_is_reported(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certs.shutil, "which", lambda _: None)
    with pytest.raises(ConfigError, match="install openssl"):
        make_certs(tmp_path)


def test_an_openssl_error_is_one_line(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certs.shutil, "which", lambda _: "/bin/false")
    with pytest.raises(ConfigError, match="openssl req: exit status 1"):
        make_certs(tmp_path / "c")
