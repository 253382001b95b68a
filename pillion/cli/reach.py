"""Defines the options by which a command reaches a gateway, and turns them into arguments of the SDK."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from pillion.cli.flags import CA, CERT, KEY, flag_option, option, options
from pillion.config import CommonFlags

DEFAULT_TARGET = "127.0.0.1:50051"

# These are the options of client commands. The API key has no option and is read from the environment's
# PILLION_API_KEY, because everybody can read a process's arguments.
talks_to_gateway = options(
    option("--target", "Address of the gateway; grpcs://HOST:PORT for TLS.", DEFAULT_TARGET, envvar="PILLION_TARGET"),
    *(CA, CERT, KEY),
)
# By these options a command that talks to a component, and not to a gateway, shows its certificate.
as_component = options(*(flag_option(field) for field in fields(CommonFlags) if field.name.startswith("internal_tls_")))


def pop_reach(values: dict[str, Any]) -> dict[str, Any]:
    """Take :class:`pillion.Client`'s arguments out of ``values``: where the gateway is, and which certificates are
    used."""
    reach = {name: values.pop(name) for name in ("target", "ca", "cert", "key")}
    return {name: value for name, value in reach.items() if value}
