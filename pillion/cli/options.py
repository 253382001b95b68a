"""Click options that several commands share: how a client reaches a server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

CA = click.option("--ca", envvar="PILLION_CA", help="PEM of the trusted authorities. Default: the system's.")
CERT = click.option(
    "--cert", envvar="PILLION_CERT", help="PEM of a client certificate, for a server that asks for one."
)
KEY = click.option("--key", envvar="PILLION_KEY", help="PEM of the client certificate's private key.")


def options(*made: Callable[[F], F]) -> Callable[[F], F]:
    """One decorator of several; the help lists them in this order."""

    def add(function: F) -> F:
        for option in reversed(made):
            function = option(function)
        return function

    return add
