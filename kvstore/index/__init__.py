"""Keeps the index of blocks and the registry of components in Redis: hints, whose loss costs prefix hits alone.

    index.py           Index: a gateway's look-ups. Start here; docs/index.md has keys, costs and failures.
    registry.py        Registry: heartbeats of components, and the table of live KV nodes.
    announcer.py       Announcer: a KV node's task that sends heartbeats and updates.
    redis_writer.py    IndexWriter: a KV node's calls: announce, sweep.
    redis_keys.py      the keys' names and layout. Sans-IO.
    redis_link.py      RedisLink: scripts with deadlines, circuit breakers, Cluster shards.
    redis_url.py       --redis-url and redis-py's client for it.
    lua/               the scripts: every change and every question.
    shared_buckets.py  SharedBuckets: tenants' quotas that all gateways share.
    shared_loads.py    SharedLoads: what gateways have under way, for each other.
    shared_names.py    SharedNames: names of adapters that all gateways share.
    advertise.py       the address that a component advertises in the registry.

No block's bytes and no decision about the pool come in here.
"""
