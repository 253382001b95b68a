"""Lower tier on a disk, which survives restarts (--disk-path, docs/tiers.md).

Blocks arrive here as the pool evicts them (kvstore/tiers/spill.py).
"""
