"""`pillion events`, which prints the changes of a KV node's pool. Imports what it needs when it runs."""

from __future__ import annotations

from typing import Any

import click

from pillion.cli.flags import FlagCommand, option
from pillion.cli.reach import as_component, pop_reach, talks_to_gateway
from pillion.errors import ConfigError


@click.command(cls=FlagCommand)
@click.argument("node", required=False, default="")
@option("--once", "Print the node's current blocks, and exit.", False, is_flag=True)
@talks_to_gateway
@as_component
def events(
    node: str, once: bool, internal_tls_cert: str, internal_tls_key: str, internal_tls_ca: str, **values: Any
) -> None:
    """Print the blocks that a KV node has, stores and removes.

    Each event is a line of JSON. NODE is the node's --node-listen (host:port or unix:path) or its name. Default: the
    cluster's only node, as reported by the gateway, so `pillion events` is enough with `pillion serve`. The command
    survives lost connections and restarts of the node; Ctrl-C ends it.
    """
    from pillion.kvstore.events.event_lines import run_events
    from pillion.net import rpc, tls

    address = node if ":" in node else find_node(node, pop_reach(values))
    rpc.use_identity(tls.identity_of(internal_tls_cert, internal_tls_key, internal_tls_ca))
    run_events(address, once, click.echo)


def find_node(name: str, reach: dict[str, Any]) -> str:
    """Return the address of the KV node ``name``; "" is the cluster's only node. ``reach`` has the arguments of
    :class:`pillion.Client`. Raises ConfigError for an unknown name, or for "" with several nodes; PillionError."""
    from pillion.client.client import Client

    with Client(**reach) as client:
        nodes = {one.component_id: one.address for one in client.status().components if one.role == "kvnode"}
    known = ", ".join(f"{one} ({address})" for one, address in sorted(nodes.items())) or "none"
    if name and name not in nodes:
        raise ConfigError(f"{name!r} is not a KV node of this cluster; its KV nodes: {known}")
    if not name and len(nodes) != 1:
        raise ConfigError(f"name the KV node to follow; this cluster has: {known}")
    return nodes[name] if name else next(iter(nodes.values()))
