"""Reaches a KV node from other components.

    node_client.py     NodeClient: the gRPC calls of gateways, workers and other nodes. Start here.
    attachment.py      attach: maps the node's pool into this process.

Nothing of the node's own state comes in here.
"""
