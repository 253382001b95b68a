"""Lower tiers: blocks that leave the pool go to pinned host memory and to disk, and come back from there.

    tiers.py         Tier, BufferTier: the contract; load_into: from a tier into slots. Start here.
    spill.py         Spiller: evicts ahead of need, between two watermarks, and copies victims to the tiers.
    host_tier.py     HostTier: pinned host memory beside a pool on a GPU.
    disk.py          DiskTier: files, bounded, found again after a restart.
    tier_breaker.py  TierBreaker: when a disk that was late is asked again.
    disk_files.py    the format of a file, and the folder that one node owns.

Which block leaves first is decided in kvstore/ledger; moves between nodes are in kvstore/transfer.
"""
