"""Moves blocks between nodes by NIXL and UCX, in one-sided reads (--kv-transport nixl, and auto where it works).

Its seam is kvstore/exchange/plane_factory.py; without it blocks move by gRPC.
"""
