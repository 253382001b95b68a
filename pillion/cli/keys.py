"""`pillion keys`: entries for the gateway's `--api-keys` file."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from pillion.errors import ConfigError
from pillion.supervisor.component_process import require_server_packages


def add_key(path: Path, tenant: str) -> str:
    """Adds a new key for ``tenant``, and the tenant where it is new. Returns the key; the file keeps only its hash.

    The file is replaced in one step, so a gateway reads either the old or the new one. Raises ConfigError for a file
    that is no keys file, and for a tenant's name with other characters than letters, digits and . _ -
    """
    require_server_packages()
    from pillion.gateway.admission.api_keys import hash_of, new_key, read_keys

    there = path.exists()
    text = (
        path.read_text()
        if there
        else "# Tenants and their API keys, for pillion gateway --api-keys. Keys are hashed.\n"
    )
    known = read_keys(str(path)).tenants if there else {}
    key = new_key()
    if tenant not in known:
        text = f"{text.rstrip()}\n\n[tenant.{_quoted(tenant)}]\n"
    entry = f'[[key]]\nid = "k-{secrets.token_hex(4)}"\ntenant = {_quoted(tenant)}\nhash = "{hash_of(key)}"\n'
    _replace(path, f"{text.rstrip()}\n\n{entry}")
    return key


def hash_key(key: str) -> str:
    """The ``hash`` field of an existing key. Raises ConfigError for one that is too short to be a secret."""
    require_server_packages()
    from pillion.gateway.admission.api_keys import hash_of

    return hash_of(key.strip())


def _quoted(name: str) -> str:
    if not name or not all(char.isascii() and (char.isalnum() or char in "._-") for char in name):
        raise ConfigError(f"{name[:80]!r} is no tenant: a name has letters, digits and . _ -")
    return f'"{name}"'


def _replace(path: Path, text: str) -> None:
    from pillion.gateway.admission.api_keys import read_keys

    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        # A file that a gateway would refuse must not replace the old one.
        read_keys(str(new))
        os.replace(new, path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    finally:
        new.unlink(missing_ok=True)
