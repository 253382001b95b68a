"""Defines ``pillion keeper``, which keeps the pools of a host's KV nodes. What it needs is imported when it runs."""

from __future__ import annotations

import click

from pillion.cli.flags import FlagCommand


@click.command(cls=FlagCommand)
@click.argument("socket")
def keeper(socket: str) -> None:
    """Keep the pools of this host's KV nodes when a node dies.

    It listens at the Unix socket SOCKET, which the nodes name with --keeper-socket. It does nothing but hold the pools'
    memory, and ends by a signal.
    """
    from pillion.kvstore.pool_survival.keeper_process import run_keeper

    run_keeper(socket)
