"""Moves blocks between nodes by NIXL and UCX, in one-sided reads (--kv-transport nixl, and auto where it works).

    nixl_plane.py  NixlPlane: the data plane.
    nixl_agent.py  the few calls of NIXL that it needs.

Its seam is kvstore/exchange/plane_factory.py; without it blocks move by gRPC.
"""
