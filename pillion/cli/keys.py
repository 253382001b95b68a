"""`pillion keys` makes entries for the gateway's `--api-keys` file."""

from __future__ import annotations

import json
import os
import re
import secrets
from pathlib import Path

from pillion.errors import ConfigError

TITLE = "# Tenants and their API keys, for pillion gateway --api-keys. Keys are hashed."


def add_key(path: Path, tenant: str, operator: bool = False, models: tuple[str, ...] = ()) -> str:
    """Adds a new key for ``tenant``, and the tenant where it is new. Returns the key; the file keeps only its hash.

    The file is replaced in one step, so a gateway reads either the old or the new one. Raises ConfigError for a file
    that is no keys file, and for a tenant's name with other characters than letters, digits and . _ -

    Args:
        operator: makes the tenant an operator, who may see the whole cluster, where it is not one yet.
        models: the models and adapters that the tenant may use from now on; () leaves that as it is.
    """
    from pillion.gateway.admission.api_keys import hash_of, new_key, read_keys

    if not re.fullmatch(r"[\w.-]+", tenant, re.ASCII):
        raise ConfigError(f"{tenant[:80]!r} is no tenant: a name has letters, digits and . _ -")
    there, key = path.exists(), new_key()
    known = read_keys(str(path)).tenants if there else {}
    text = path.read_text().rstrip() if there else TITLE
    if tenant not in known:
        text += f'\n\n[tenant."{tenant}"]'
    told = {"operator": "true"} if operator and not (tenant in known and known[tenant].operator) else {}
    if models:
        told["models"] = json.dumps(models, ensure_ascii=False)
    for field, value in told.items():
        text = _with(text, tenant, field, value)
    text += f'\n\n[[key]]\nid = "k-{secrets.token_hex(4)}"\ntenant = "{tenant}"\nhash = "{hash_of(key)}"\n'
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        # A file that a gateway would refuse must not replace the old one.
        ring = read_keys(str(new))
        own = ring.tenants[tenant]
        if (operator and not own.operator) or (models and own.models != models):
            lines = " and ".join(f"{field} = {value}" for field, value in told.items())
            raise ConfigError(f"{path}: write {lines} into [tenant.{tenant}] by hand; its table is not found")
        os.replace(new, path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    finally:
        new.unlink(missing_ok=True)
    return key


def _with(text: str, tenant: str, field: str, value: str) -> str:
    """Returns the text of a keys file with a field set in the tenant's table; everything else stays as somebody wrote
    it."""
    header = rf"""(?m)^[ \t]*\[[ \t]*tenant[ \t]*\.[ \t]*(["']?){re.escape(tenant)}\1[ \t]*\].*$"""
    if (found := re.search(header, text)) is None:
        return text
    rest = text[found.end() :]
    table, bracket, behind = rest.partition("\n[")
    table = re.sub(rf"^[ \t]*{field}[ \t]*=[ \t]*(\[[^\]]*\]|.)*\n?", "", table, flags=re.MULTILINE)
    return f"{text[: found.end()]}\n{field} = {value}{table}{bracket}{behind}"


def hash_key(key: str) -> str:
    """Returns an existing key's hash, as the ``hash`` field of a keys file holds it. Raises ConfigError for a key that
    is too short to be a secret."""
    from pillion.gateway.admission.api_keys import hash_of

    return hash_of(key.strip())
