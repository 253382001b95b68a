"""Keeps a lower tier on a disk, whose blocks are found again after a restart (--disk-path, docs/tiers.md).

    disk.py        DiskMedium, DiskTier: files, bounded, least recently used first.
    disk_files.py  the format of a file, and the folder that one node owns.

Blocks come here as the pool evicts them (kvstore/tiers/spill.py).
"""
