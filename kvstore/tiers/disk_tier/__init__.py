"""Keeps a lower tier on a disk, whose blocks are found again after a restart (--disk-path, docs/tiers.md).

Blocks come here as the pool evicts them (kvstore/tiers/spill.py).
"""
