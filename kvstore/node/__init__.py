"""The KV node's process: it owns one memory domain's pool, alone leases, commits, pins and evicts (I3, I4).

    pool.py           Pool: ledger and waiting queue with real time and callers. Start here.
    node_servicer.py  the gRPC service (protos/pillion/v1/kvnode.proto): messages in, calls on the pool, messages out.
    kv_node.py        KVNode, start_kvnode: starts and stops everything; status, metrics, heartbeat record.
    followers.py      Followers: streams of the pool's changes to those outside who follow them.
    attach_server.py  the attach socket: workers get the pool's memory; proof that a worker's process is gone.
    regions.py        memory beside the pool that workers share, such as weights. Sans-IO.
    region_server.py  the attach socket's connections that want a region.
    adapter_files.py  adapters' files, for workers whose machine lacks them.
    keeping.py        Keeping: what outlives this process, and what an earlier life of the node has left.
    retaining.py      Retaining: the retentions of a pool, their end, and their record.
    storage.py        Storage: the pool's memory, lower tiers, fetches and reads, once the pool has a shape.

Which slot may be given to whom is decided in kvstore/ledger; no model and no request's text comes in here.
"""
