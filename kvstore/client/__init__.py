"""What other components use to reach a KV node.

    node_client.py     NodeClient: the gRPC calls of gateways, workers and other nodes. Start here.
    attachment.py      attach, share_region: map the node's pool, or a shared region, into this process.
    block_mirror.py    BlockMirror: the blocks of a node's pool, as a follower knows them. Sans-IO.
    block_follower.py  BlockFollower: keeps a mirror over lost connections and the node's restarts.

Nothing of the node's own state comes in here.
"""
