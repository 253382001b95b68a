"""Blocks between nodes: who pins, reads and commits them, and what moves their bytes.

    fetch.py           Fetcher: brings a prompt's blocks here, from lower tiers and other nodes. Open it first.
    peers.py           Peers: this node's connections to the nodes that it reads from.
    plane_servicer.py  the source's side: the gRPC service of protos/pillion/v1/kvplane.proto.
    plane.py           DataPlane: the contract of what moves the bytes.
    grpc_plane.py      the portable plane: the source streams the bytes.
    nixl_plane.py      the plane with NIXL and UCX: one-sided reads.
    nixl_agent.py      the few calls of NIXL that it needs.
    plane_factory.py   chooses the plane by --kv-transport.
    adapter_pieces.py  beside the blocks: the files of adapters, from machine to machine.

Which node is asked for a prompt is the gateway's decision; a failure here brings fewer blocks, never wrong ones.
"""
