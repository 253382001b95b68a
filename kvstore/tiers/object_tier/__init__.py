"""Keeps a lower tier in a bucket, which nodes and clusters share and which outlives them (--object-url,
docs/tiers.md).

    object_tier.py    ObjectMedium, ObjectTier: what is in the bucket, as far as this node knows; reads and writes.
    write_through.py  WriteThrough: decides when a block is written: while it is still in the pool.
    object_runs.py    the format of an object: a run of blocks, and its name.
    object_store.py   ObjectStore: the requests to an S3 service, and what --object-url says.

Blocks come here in two ways: write_through.py copies each one some seconds after its commit, and
kvstore/tiers/spill.py offers those that it evicts, as to every tier.
"""
