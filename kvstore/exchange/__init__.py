"""Lets a node fetch blocks from other nodes, and serves blocks to them. Open node_exchange.py first.

    node_exchange.py   NodeExchange: both sides, from a node's start to its end.
    peers.py           Peers: this node's connections to the nodes that it reads from.
    plane_servicer.py  the source's side: the gRPC service of protos/pillion/v1/kvplane.proto.
    plane.py           DataPlane: what moves the bytes, by gRPC where nothing better is there.
    plane_factory.py   chooses the plane by --kv-transport.

Which node is asked for a prompt is the gateway's decision; a failure here brings fewer blocks, never wrong ones.
"""
