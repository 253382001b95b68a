"""Runs the KV node's process, which owns one memory domain's pool and alone leases, commits, pins and evicts (I3, I4).

    pool.py           Pool: ledger and waiting queue with real time and callers. Start here.
    node_servicer.py  the gRPC service (protos/pillion/v1/kvnode.proto): messages in, calls on the pool, messages out.
    kv_node.py        KVNode: starts and stops everything; status, metrics, heartbeat record.
    node_directory.py NodeDirectory: the other nodes, and what Redis is told of this one.
    attach_server.py  the attach socket: workers get the pool's memory; proof that a worker's process is gone.
    storage.py        Storage: the pool's memory, lower tiers, fetches and reads, once the pool has a shape.

kvstore/ledger decides which slot may be given to whom; no model and no request's text comes in here.
"""
