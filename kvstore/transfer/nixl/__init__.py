"""Transfer of blocks between nodes by NIXL and UCX, in one-sided reads (--kv-transport nixl, and auto where it works).

kvstore/exchange/exchanged_pool.py chooses between it and gRPC.
"""
