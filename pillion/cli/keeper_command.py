"""Defines ``pillion keeper``, which keeps the pools of a host's KV nodes. What it needs is imported when it runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pillion.cli.flags import FlagCommand

if TYPE_CHECKING:
    from pillion.supervisor.supervisor import ProcessSpec


@click.command(cls=FlagCommand)
@click.argument("socket")
def keeper(socket: str) -> None:
    """Keep the pools of this host's KV nodes when a node dies.

    It listens at the Unix socket SOCKET, which the nodes name with --keeper-socket. It does nothing but hold the pools'
    memory, and ends by a signal.
    """
    from pillion.kvstore.pool_survival.keeper_process import run_keeper

    run_keeper(socket)


def keeper_spec(socket: Path, environ: Mapping[str, str]) -> ProcessSpec:
    """Returns the keeper among the processes of a cluster on one machine."""
    from pillion.supervisor import probes
    from pillion.supervisor.supervisor import ProcessSpec

    argv = (sys.executable, "-m", "pillion", "keeper", str(socket))
    probe = partial(probes.accepts, socket)
    return ProcessSpec(component_id="keeper", level=0, argv=argv, environ=environ, probe=probe, spare=True)
