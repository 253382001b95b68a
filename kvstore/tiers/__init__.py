"""Lower tiers: blocks that leave the pool go to pinned host memory, to disk and to a bucket, and come back from there.

    tiers.py         Tier, BufferTier, FarTier: the contract; load_into: from a tier into slots. Start here.
    spill.py         Spiller: evicts ahead of need, between two watermarks, and copies victims to the tiers.
    write_through.py WriteThrough: copies blocks to a bucket while they are still in the pool.
    host_tier.py     HostTier: pinned host memory beside a pool on a GPU.
    disk.py          DiskTier: files, bounded, found again after a restart.
    object_tier.py   ObjectTier: objects in a bucket, which outlive the node; other clusters' too.
    tier_breaker.py  TierBreaker: when a medium that was late is asked again.
    disk_files.py    the format of a file, and the folder that one node owns.
    object_runs.py   the format of an object: a run of blocks, and its name.
    object_store.py  ObjectStore: the requests to an S3 service, and what --object-url says.

Which block leaves first is decided in kvstore/ledger; moves between nodes are in kvstore/transfer.
"""
