"""Lower tiers: blocks evicted from the pool go to pinned host memory, disk and a bucket, and come back.

kvstore/ledger decides the eviction order; transfers between nodes are in kvstore/transfer. Open tiers.py
first; storage.py assembles the tiers of a pool with its fetches and spills.
"""
