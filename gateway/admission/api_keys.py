"""API keys: a TOML file of tenants and hashed keys, and the tenant of a call.

    file --read and validated--> keyring --file changed (pillion.net.watched)--> new keyring
             | invalid at start: ConfigError     | invalid: a warning, and the old keyring stays

A tenant is a table, and a key is an entry that names its tenant; `pillion keys add` writes both:

    [tenant.acme]
    weight = 2
    tokens_per_minute = 200_000

    [[key]]
    id = "k-5f0c"
    tenant = "acme"
    hash = "sha256:9f86d0..."

Only hashes are stored. They are plain SHA-256: keys are 256 random bits, which cannot be guessed, so a slow hash
(scrypt) would only slow down every call and make wrong keys a denial of service. Therefore a user-chosen key must be
long. A key is compared with all entries, each in constant time, without stopping at a match.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from pillion.config import MAX_API_KEY_CHARS
from pillion.errors import ConfigError, Unauthenticated
from pillion.gateway.admission.tenants import Tenant
from pillion.net.watched import Watched
from pillion.rules.priority import MAX_PRIORITY, MAX_WEIGHT

log = logging.getLogger("pillion.gateway")

# For user-chosen keys, which are easier to guess than their length suggests; a generated key has 47 characters.
MIN_KEY_CHARS = 32
# Tenant of the keys of --api-key.
PLAIN_TENANT = "api-key"
MAX_FILE_BYTES = 2**20
MAX_KEYS = 1024
MAX_TENANTS = 1024
MAX_MODELS = 1024

_HASH = "sha256:"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_COUNTS = (
    "requests_per_minute",
    "tokens_per_minute",
    "max_inflight_requests",
    "max_inflight_tokens",
    "max_pinned_tokens",
)


@dataclass(frozen=True, slots=True)
class Key:
    """An API key as in the keys file: a label, the tenant's name, and the key's SHA-256 (32 bytes)."""

    id: str
    tenant: str
    digest: bytes


class Keyring:
    """All API keys, with their tenants."""

    def __init__(self, tenants: Mapping[str, Tenant], keys: tuple[Key, ...]) -> None:
        self.tenants = dict(tenants)
        self.keys = keys

    def tenant_of(self, authorization: str) -> Tenant:
        """Return the tenant of an Authorization header, ``Bearer KEY``. Raises Unauthenticated; the message never
        contains the key."""
        scheme, _, credentials = authorization.strip().partition(" ")
        if scheme.lower() != "bearer" or not credentials.strip():
            raise Unauthenticated(
                "Incorrect API key provided: an API key is needed, send it as 'Authorization: Bearer KEY'"
            )
        key = credentials.strip()
        digest = hashlib.sha256(key[:MAX_API_KEY_CHARS].encode("utf-8", "surrogatepass")).digest()
        matched: Key | None = None
        for entry in self.keys:
            if hmac.compare_digest(entry.digest, digest):
                matched = entry
        if matched is None or len(key) > MAX_API_KEY_CHARS:
            raise Unauthenticated("Incorrect API key provided: unknown key")
        return self.tenants[matched.tenant]


class KeyFile:
    """Keyring of a keys file, which is reloaded when it changes, and of --api-key. The constructor raises ConfigError
    for an invalid file.

    Args:
        path: the keys file; "" for none.
        plain: keys of --api-key. Their tenant is PLAIN_TENANT, with its quotas in the file, if any. The file takes
            precedence for a key in both.
    """

    def __init__(self, path: str, plain: Sequence[str] = ()) -> None:
        self._path = path
        digests = dict.fromkeys(hashlib.sha256(key.encode()).digest() for key in plain)
        self._plain = tuple(Key("--api-key", PLAIN_TENANT, digest) for digest in digests)
        self._watched = Watched([path] if path else [])
        self.ring = self._read()

    def _read(self) -> Keyring:
        ring = read_keys(self._path) if self._path else Keyring({}, ())
        if not self._plain:
            return ring
        # A keyring returns a key's last entry, so the file takes precedence.
        return Keyring({PLAIN_TENANT: Tenant(name=PLAIN_TENANT)} | ring.tenants, self._plain + ring.keys)

    def refresh(self) -> bool:
        """Reload the keys file if it has changed; return whether there is a new keyring. An invalid file is logged once
        and ignored."""
        ring = self._watched.newer(self._read)
        if ring is None:
            return False
        self.ring = ring
        log.info("reloaded %s: %d tenants", self._path, len(self.ring.tenants))
        return True


def new_key() -> str:
    """Generate a random key."""
    return "plk-" + secrets.token_urlsafe(32)


def hash_of(key: str) -> str:
    """Return an API key's hash as written in the keys file. Raises ConfigError for a key that is too short or too long,
    or not printable ASCII without spaces."""
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError("an API key is printable ASCII without spaces")
    if not MIN_KEY_CHARS <= len(key) <= MAX_API_KEY_CHARS:
        raise ConfigError(f"an API key has from {MIN_KEY_CHARS} to {MAX_API_KEY_CHARS} characters, this one {len(key)}")
    return _HASH + hashlib.sha256(key.encode()).hexdigest()


def read_keys(path: str) -> Keyring:
    """Read a keys file. Raises ConfigError, with a single-line message."""
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        if len(raw) > MAX_FILE_BYTES:
            raise ConfigError(f"larger than {MAX_FILE_BYTES} bytes")
        return parse_keys(tomllib.loads(raw.decode()))
    except OSError as error:
        raise ConfigError(f"keys file {path}: {error.strerror}") from error
    except (ConfigError, ValueError, RecursionError) as error:
        raise ConfigError(f"keys file {path}: {error}") from None


def parse_keys(parsed: Mapping[str, Any]) -> Keyring:
    """Validate a parsed keys file. Raises ConfigError for the first error."""
    for name in parsed:
        if name not in ("tenant", "key"):
            raise ConfigError(f"unknown table {name!r}; there are [tenant.NAME] and [[key]]")
    tables, entries = parsed.get("tenant", {}), parsed.get("key", [])
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ConfigError("write a tenant as [tenant.NAME]")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError("write a key as [[key]]")
    if len(tables) > MAX_TENANTS or len(entries) > MAX_KEYS:
        raise ConfigError(f"at most {MAX_TENANTS} tenants and {MAX_KEYS} keys")
    tenants = {name: _tenant(name, table) for name, table in tables.items()}
    keys = tuple(_key(number, entry, tenants) for number, entry in enumerate(entries, 1))
    if not tenants:
        # Probably a write that ran out of disk space. To reject every client, remove the keys and leave a tenant.
        raise ConfigError("it has no tenant")
    if len({key.digest for key in keys}) < len(keys):
        raise ConfigError("two entries have the same key")
    return Keyring(tenants, keys)


def _tenant(name: str, table: Mapping[str, Any]) -> Tenant:
    where = f"[tenant.{name[:80]}]"
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: a name has up to 64 letters, digits and . _ -")
    known = {field.name for field in fields(Tenant)} - {"name"}
    for field, value in table.items():
        if field not in known:
            raise ConfigError(f"{where}: unknown field {field!r}")
        _check_field(where, field, value)
    values = dict(table)
    if "weight" in values:
        values["weight"] = float(values["weight"])
    if "models" in values:
        values["models"] = tuple(values["models"])
    return Tenant(name=name, **values)


def _check_field(where: str, field: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if field in ("operator", "keep_content"):
        good, wanted = isinstance(value, bool), "true or false"
    elif field == "models":
        good = isinstance(value, list) and 0 < len(value) <= MAX_MODELS
        good = good and all(isinstance(name, str) and name for name in value)
        wanted = f"a list of names, from 1 to {MAX_MODELS}"
    elif field == "cache_group":
        good, wanted = isinstance(value, str) and bool(_NAME.fullmatch(value)), "a name"
    elif field == "weight":
        good = is_number and 0 < value <= MAX_WEIGHT
        wanted = f"a number above 0, up to {MAX_WEIGHT:g}"
    elif field in _COUNTS:
        good, wanted = is_number and isinstance(value, int) and 0 <= value <= 10**12, "a whole number, 0 for none"
    else:
        good = is_number and isinstance(value, int) and -MAX_PRIORITY <= value <= MAX_PRIORITY
        wanted = f"a whole number from {-MAX_PRIORITY} to {MAX_PRIORITY}"
    if not good:
        raise ConfigError(f"{where}: {field} must be {wanted}")


def _key(number: int, entry: Mapping[str, Any], tenants: Mapping[str, Tenant]) -> Key:
    where = f"[[key]] {number}"
    unknown = set(entry) - {"id", "tenant", "hash"}
    if unknown:
        raise ConfigError(f"{where}: unknown field {min(unknown)!r}")
    texts = [entry.get(name, "") for name in ("id", "tenant", "hash")]
    if not all(isinstance(value, str) for value in texts):
        raise ConfigError(f"{where}: id, tenant and hash are texts")
    label, tenant, hashed = texts
    if tenant not in tenants:
        raise ConfigError(f"{where}: there is no [tenant.{tenant[:80]}]")
    digits = hashed.removeprefix(_HASH)
    if not hashed.startswith(_HASH) or not re.fullmatch(r"[0-9a-f]{64}", digits):
        raise ConfigError(f"{where}: hash must be {_HASH} and 64 hexadecimal digits, as 'pillion keys hash' prints it")
    return Key(label, tenant, bytes.fromhex(digits))
