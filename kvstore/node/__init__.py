"""Runs the KV node's process, which owns one memory domain's pool and alone leases, commits, pins and evicts (I3, I4).

    pool.py           Pool: ledger and waiting queue with real time and callers. Start here.
    node_servicer.py  the gRPC service (protos/pillion/v1/kvnode.proto): messages in, calls on the pool, messages out.
    kv_node.py        KVNode, start_kvnode: starts and stops everything; status, metrics, heartbeat record.
    block_watch.py    BlockWatch: what a pool tells of its changes; a seam.
    pool_pins.py      PoolPins: what callers ask of prefixes that are to stay; a seam.
    pool_retentions.py  retentions_of: what keeps chains until their next use is expected; a seam.
    pool_states.py    states_of: what decides which states of hybrid models stay; a seam.
    attach_server.py  the attach socket: workers get the pool's memory; proof that a worker's process is gone.
    storage.py        Storage: the pool's memory, lower tiers, fetches and reads, once the pool has a shape.

kvstore/ledger decides which slot may be given to whom; no model and no request's text comes in here.
"""
