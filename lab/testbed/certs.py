"""Certificates for development and tests, made by openssl: ``python -m lab.testbed.certs FOLDER``.

Two authorities: one signs gateways (and clients, where the edge requires certificates), the other signs only components
of a cluster.
"""

from __future__ import annotations

import ipaddress
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from pillion.cli.app import run_command
from pillion.errors import ConfigError
from pillion.net.tls import INTERNAL_NAME

DAYS = 365
MAX_DAYS = 3650
OPENSSL_TIMEOUT_S = 60.0
NAMES = ("ca", "server", "client", "internal-ca", "internal")
# A gateway's certificate is a client's as well: `pillion serve` probes its own gateway.
BOTH = "serverAuth,clientAuth"
DEFAULT_HOSTS = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A certificate to make: its issuer, names and uses."""

    name: str
    authority: str
    names: tuple[str, ...]
    usage: str


def make_certs(folder: Path, hosts: Sequence[str] = (), days: int = DAYS) -> list[Path]:
    """Write ``NAME.pem`` and ``NAME.key`` for each of NAMES into ``folder`` (mode 0700, keys 0600).

    Args:
        folder: created if missing; existing files are not overwritten.
        hosts: names and addresses of the gateway, besides this machine's own.
        days: validity.

    Raises:
        ConfigError: openssl is missing or failed, or a file exists.
    """
    openssl = shutil.which("openssl")
    if openssl is None:
        raise ConfigError("certificates need the openssl command, and there is none on the PATH: install openssl")
    if not 1 <= days <= MAX_DAYS:
        raise ConfigError(f"--days {days} is not in [1, {MAX_DAYS}]")
    made = [folder / f"{name}.{kind}" for name in NAMES for kind in ("pem", "key")]
    there = [path for path in made if path.exists()]
    if there:
        raise ConfigError(f"{there[0]} is there already; certificates are never overwritten")
    leaves = (
        _Leaf("server", "ca", tuple(_alternative(host) for host in (*DEFAULT_HOSTS, *hosts)), BOTH),
        _Leaf("client", "ca", (), "clientAuth"),
        _Leaf("internal", "internal-ca", (f"DNS:{INTERNAL_NAME}",), BOTH),
    )
    with tempfile.TemporaryDirectory(prefix="pillion-certs-") as name:
        work = Path(name)
        (work / "config").write_text(_config(leaves))
        for authority in ("ca", "internal-ca"):
            _authority(openssl, work, authority, days)
        for leaf in leaves:
            _issue(openssl, work, leaf, days)
        _place(work, folder, made)
    return made


def _authority(openssl: str, work: Path, name: str, days: int) -> None:
    _run(
        work,
        *(openssl, "req", "-x509", *_new_key(name), "-out", f"{name}.pem"),
        *("-subj", f"/CN=Pillion development {name}", "-extensions", "authority", "-days", str(days)),
    )


def _issue(openssl: str, work: Path, leaf: _Leaf, days: int) -> None:
    name, authority = leaf.name, leaf.authority
    _run(work, openssl, "req", "-new", *_new_key(name), "-out", f"{name}.csr", "-subj", f"/CN=pillion {name}")
    _run(
        work,
        *(openssl, "x509", "-req", "-in", f"{name}.csr", "-CA", f"{authority}.pem", "-CAkey", f"{authority}.key"),
        *("-CAcreateserial", "-out", f"{name}.pem", "-days", str(days), "-extfile", "config", "-extensions", name),
    )


def _new_key(name: str) -> tuple[str, ...]:
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    return (*curve, "-keyout", f"{name}.key", "-config", "config")


def _config(leaves: Sequence[_Leaf]) -> str:
    lines = [
        *("[req]", "distinguished_name = name", "[name]"),
        *("[authority]", "basicConstraints = critical,CA:true", "keyUsage = critical,keyCertSign,cRLSign"),
        "subjectKeyIdentifier = hash",
    ]
    for leaf in leaves:
        lines += [f"[{leaf.name}]", "basicConstraints = CA:false", f"extendedKeyUsage = {leaf.usage}"]
        if leaf.names:
            lines.append(f"subjectAltName = {','.join(dict.fromkeys(leaf.names))}")
    return "\n".join(lines) + "\n"


def _alternative(host: str) -> str:
    try:
        return f"IP:{ipaddress.ip_address(host)}"
    except ValueError:
        pass
    labels = host.removeprefix("*.").split(".")
    if not all(label.replace("-", "").isalnum() and label.isascii() for label in labels):
        raise ConfigError(f"{host!r} is neither a host name nor an address")
    return f"DNS:{host}"


def _run(work: Path, *argv: str) -> None:
    try:
        done = subprocess.run(argv, cwd=work, capture_output=True, text=True, timeout=OPENSSL_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"openssl could not be run: {error}") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ConfigError(f"openssl {argv[1]}: {lines[-1]}")


def _place(work: Path, folder: Path, made: Sequence[Path]) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in made:
            mode = 0o600 if path.suffix == ".key" else 0o644
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with os.fdopen(os.open(path, flags, mode), "wb") as file:
                file.write((work / path.name).read_bytes())
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: {error.strerror}") from None


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--host", "hosts", multiple=True, help="Name or address that clients use, besides localhost's.")
@click.option("--days", default=DAYS, help="How long the certificates are valid.")
def main(folder: Path, hosts: tuple[str, ...], days: int) -> None:
    """Make certificates for development in FOLDER: for the edge, for a client, and between components."""
    for path in make_certs(folder, hosts, days):
        click.echo(path)
    click.echo(f"edge: --tls-cert={folder}/server.pem --tls-key={folder}/server.key; clients: --ca {folder}/ca.pem")
    between = " ".join(
        f"--internal-tls-{kind}={folder}/internal.{suffix}" for kind, suffix in (("cert", "pem"), ("key", "key"))
    )
    click.echo(f"components: {between} --internal-tls-ca={folder}/internal-ca.pem")


if __name__ == "__main__":
    run_command(main, None, "python -m lab.testbed.certs")
