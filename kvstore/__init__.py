"""The prefix-hashed KV store: a KV node owns one memory domain's block pool; Redis holds an index of hints.

    hashing.py  block hashes: what makes KV content-addressed (I2). Start here, then node/pool.py.
    ledger/     who owns which slot; commits, pins, eviction, waiting for memory. Sans-IO.
    node/       the KV node's process: pool, gRPC service, attach socket, shared regions, storage.
    client/     what workers and gateways use to reach a node: gRPC client, attachment, shared regions.
    index/      the index of blocks and the registry of components, in Redis.
    memory/     the pool's bytes, on the host or on a GPU.
    tiers/      lower tiers (pinned host memory, disk) and eviction ahead of need.
    transfer/   blocks between nodes: data planes (NIXL, gRPC), peers, fetches.

Nothing of the gateway, of the engine or of a model comes in here; a block is bytes under a hash.
"""
