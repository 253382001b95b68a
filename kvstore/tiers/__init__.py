"""Lower tiers: blocks that leave the pool go to pinned host memory and to disk, and come back from there.

    tiers.py       Tier, BufferTier: the contract; load_into: from a tier into slots. Start here.
    spill.py       Spiller: evicts ahead of need and copies victims to the tiers.
    spill_plan.py  watermarks, victims and updates of the index for it. Sans-IO.
    host_tier.py   HostTier: pinned host memory beside a pool on a GPU.
    disk.py        DiskTier: files, bounded, found again after a restart.
    disk_files.py  the format of a file, and the folder that one node owns.

Which block leaves first is decided in kvstore/ledger; moves between nodes are in kvstore/transfer.
"""
