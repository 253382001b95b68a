"""`pillion keys`: entries of the gateway's `--api-keys` file."""

from __future__ import annotations

import json
import os
import re
import secrets
from pathlib import Path

from pillion.errors import ConfigError


def add_key(path: Path, tenant: str, operator: bool = False, models: tuple[str, ...] = ()) -> str:
    """Add a new key for ``tenant``, and the tenant if it is new. Return the key; the file only has its hash.

    The file is replaced atomically. Raises ConfigError for an invalid keys file, for a tenant's name with characters
    other than letters, digits and . _ - and for an existing tenant that lacks the requested settings.

    Args:
        operator: make a new tenant an operator, who may see the whole cluster.
        models: models and adapters that a new tenant may use; () for all.
    """
    from pillion.gateway.admission.api_keys import hash_of, new_key, read_keys

    if not re.fullmatch(r"[\w.-]+", tenant, re.ASCII):
        raise ConfigError(f"{tenant[:80]!r} is not a valid tenant name: use letters, digits and . _ -")
    existing, key = None, new_key()
    text = "# Tenants and their API keys, for pillion gateway --api-keys. Keys are hashed."
    if path.exists():
        existing, text = read_keys(str(path)).tenants.get(tenant), path.read_text().rstrip()
    settings = ["operator = true"] if operator and not (existing and existing.operator) else []
    if models and not (existing and existing.models == models):
        settings.append(f"models = {json.dumps(models, ensure_ascii=False)}")
    if existing and settings:
        raise ConfigError(f"{path} already has [tenant.{tenant}]: add {' and '.join(settings)} to it by hand")
    if not existing:
        text += "\n".join((f'\n\n[tenant."{tenant}"]', *settings))
    text += f'\n\n[[key]]\nid = "k-{secrets.token_hex(4)}"\ntenant = "{tenant}"\nhash = "{hash_of(key)}"\n'
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        # Check it first: a file that a gateway would refuse must not replace the old one.
        read_keys(str(new))
        os.replace(new, path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    finally:
        new.unlink(missing_ok=True)
    return key


def hash_key(key: str) -> str:
    """Return an existing key's hash for a keys file. Raises ConfigError for a key that is too short to be secret."""
    from pillion.gateway.admission.api_keys import hash_of

    return hash_of(key.strip())
