"""Options for reaching a gateway, and their conversion to arguments of the SDK."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from pillion.cli.flags import CA, CERT, KEY, flag_option, option, options
from pillion.config import CommonFlags

DEFAULT_TARGET = "127.0.0.1:50051"

# Options of client commands. The API key is only read from PILLION_API_KEY, because arguments are visible to all users.
talks_to_gateway = options(
    option("--target", "Address of the gateway; grpcs://HOST:PORT for TLS.", DEFAULT_TARGET, envvar="PILLION_TARGET"),
    *(CA, CERT, KEY),
)
as_component = options(*(flag_option(field) for field in fields(CommonFlags) if field.name.startswith("internal_tls_")))


def pop_reach(values: dict[str, Any]) -> dict[str, Any]:
    """Remove and return :class:`pillion.Client`'s arguments in ``values``: address and certificates."""
    reach = {name: values.pop(name) for name in ("target", "ca", "cert", "key")}
    return {name: value for name, value in reach.items() if value}
