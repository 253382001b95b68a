"""`pillion keys`: entries for the gateway's `--api-keys` file."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from pillion.errors import ConfigError
from pillion.supervisor.component_process import require_server_packages

TITLE = "# Tenants and their API keys, for pillion gateway --api-keys. Keys are hashed."


def add_key(path: Path, tenant: str, operator: bool = False) -> str:
    """Adds a new key for ``tenant``, and the tenant where it is new. Returns the key; the file keeps only its hash.

    The file is replaced in one step, so a gateway reads either the old or the new one. Raises ConfigError for a file
    that is no keys file, and for a tenant's name with other characters than letters, digits and . _ -

    Args:
        operator: makes the tenant an operator, who may see the whole cluster, where it is not one yet.
    """
    require_server_packages()
    from pillion.gateway.admission.api_keys import hash_of, new_key, read_keys

    if not re.fullmatch(r"[\w.-]+", tenant, re.ASCII):
        raise ConfigError(f"{tenant[:80]!r} is no tenant: a name has letters, digits and . _ -")
    there, key = path.exists(), new_key()
    known = read_keys(str(path)).tenants if there else {}
    text = path.read_text().rstrip() if there else TITLE
    if tenant not in known:
        text += f'\n\n[tenant."{tenant}"]' + "\noperator = true" * operator
    elif operator and not known[tenant].operator:
        text = _as_operator(text, tenant)
    text += f'\n\n[[key]]\nid = "k-{secrets.token_hex(4)}"\ntenant = "{tenant}"\nhash = "{hash_of(key)}"\n'
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        # A file that a gateway would refuse must not replace the old one.
        ring = read_keys(str(new))
        if operator and not ring.tenants[tenant].operator:
            raise ConfigError(f"{path}: write operator = true into [tenant.{tenant}] by hand; its table is not found")
        os.replace(new, path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    finally:
        new.unlink(missing_ok=True)
    return key


def _as_operator(text: str, tenant: str) -> str:
    """The file's text with ``operator = true`` in the tenant's table; everything else stays as somebody wrote it."""
    header = rf"""(?m)^[ \t]*\[[ \t]*tenant[ \t]*\.[ \t]*(["']?){re.escape(tenant)}\1[ \t]*\].*$"""
    if (found := re.search(header, text)) is None:
        return text
    rest = text[found.end() :]
    table, bracket, behind = rest.partition("\n[")
    table = re.sub(r"^[ \t]*operator[ \t]*=.*\n?", "", table, flags=re.MULTILINE)
    return f"{text[: found.end()]}\noperator = true{table}{bracket}{behind}"


def hash_key(key: str) -> str:
    """The ``hash`` field of an existing key. Raises ConfigError for one that is too short to be a secret."""
    require_server_packages()
    from pillion.gateway.admission.api_keys import hash_of

    return hash_of(key.strip())
