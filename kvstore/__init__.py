"""Prefix-hashed KV store: each KV node owns the block pool of one memory domain; Redis holds an index of hints.

    assemble.py     the parts of a KV node and the flags that enable them. Start here, then node/pool.py.
    hashing.py      block hashes: what makes KV content-addressed (I2).
    ledger/         slot ownership: commits, pins, eviction, waiting for memory. Sans-IO.
    node/           the KV node's process: pool, gRPC service, attach socket.
    client/         how workers and gateways reach a node: gRPC client, attachment.
    events/         streams of a pool's changes for external routers.
    index/          the index of blocks and the registry of components, in Redis.
    prefix_pins/    chains that tenants have pinned; evicted last.
    adapters/       adapter files, for workers on other machines.
    gpu/            pools in GPU memory, and GPU memory shared between processes.
    memory/         pools in host memory.
    pool_survival/  pools that outlive their KV node.
    tiers/          lower tiers (pinned host memory, disk, a bucket) and eviction ahead of need.
    transfer/       fetches: blocks copied from lower tiers and other nodes, under a ticket.
    exchange/       other nodes: connections, data planes, and reads from this pool.

Nothing here depends on the gateway, the engine or a model; a block is bytes under a hash.
"""
