"""Moves blocks between nodes by NIXL and UCX, in one-sided reads (--kv-transport nixl, and auto where it works).

kvstore/exchange/node_exchange.py chooses between it and gRPC.
"""
