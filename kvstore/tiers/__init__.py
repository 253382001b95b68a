"""Runs lower tiers: blocks that leave the pool go to pinned host memory, to disk and to a bucket, and come back.

    tiers.py         Tier, BufferTier, FarTier: the contract; load_into: from a tier into slots. Start here.
    spill.py         Spiller: evicts ahead of need, between two watermarks, and copies victims to all tiers.
    disk_tier/       files, bounded, found again after a restart.
    object_tier/     objects in a bucket, which outlive the node; blocks are written to it before they are evicted, too.
    tier_breaker.py  TierBreaker: when a medium that was late is asked again.

kvstore/ledger decides which block leaves first; moves between nodes are in kvstore/transfer.
"""
