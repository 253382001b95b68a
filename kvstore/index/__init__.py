"""Index of blocks and registry of components, in Redis. The index is a hint, whose loss only costs prefix hits.

    index.py           Index: a gateway's look-ups. Start here; docs/redis.md has keys, costs and failures.
    registry.py        Registry: heartbeats of components, and the table of live KV nodes.
    announcer.py       Announcer: a KV node's task that sends heartbeats and updates.
    redis_writer.py    IndexWriter: a KV node's calls: announce, sweep.
    redis_keys.py      names and layout of the keys. Sans-IO.
    redis_link.py      RedisLink: scripts with deadlines, circuit breakers, Cluster shards.
    redis_url.py       --redis-url and its redis-py client.
    lua/               the scripts, through which all reads and writes go.
    shared_buckets.py  SharedBuckets: tenants' quotas, shared by all gateways.
    shared_loads.py    SharedLoads: the gateways' loads, for each other's plans.
    shared_names.py    SharedNames: names of adapters, shared by all gateways.
    advertise.py       the address that a component advertises in the registry.

Nothing here reads blocks' bytes or makes decisions about the pool.
"""
