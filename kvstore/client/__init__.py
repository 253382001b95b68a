"""What other components use to reach a KV node.

    node_client.py  NodeClient: the gRPC calls of gateways, workers and other nodes. Start here.
    attachment.py   attach, share_region: map the node's pool, or a shared region, into this process.

Nothing of the node's own state comes in here.
"""
