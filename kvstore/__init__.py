"""Is the prefix-hashed KV store: a KV node owns one memory domain's block pool; Redis holds an index of hints.

    assemble.py     what a KV node has, and which flags turn it on. Start here, then node/pool.py.
    hashing.py      block hashes: what makes KV content-addressed (I2).
    ledger/         who owns which slot; commits, pins, eviction, waiting for memory. Sans-IO.
    node/           the KV node's process: pool, gRPC service, attach socket, storage.
    client/         what workers and gateways use to reach a node: gRPC client, attachment.
    events/         streams of a pool's changes to readers outside.
    index/          the index of blocks and the registry of components, in Redis.
    prefix_pins/    chains that tenants want to keep, which are evicted last.
    adapters/       the files of adapters, for workers whose machine lacks them.
    gpu/            the pool's bytes on GPUs, and memory of GPUs that processes share.
    memory/         the pool's bytes on the host.
    pool_survival/  what a pool needs to outlive its KV node.
    tiers/          lower tiers (pinned host memory, disk, a bucket) and eviction ahead of need.
    transfer/       fetches: blocks that come under a ticket, from lower tiers and other nodes.
    exchange/       the other nodes: connections, data planes, what they read here.

Nothing of the gateway, of the engine or of a model comes in here; a block is bytes under a hash.
"""
