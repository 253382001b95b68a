"""Runs lower tiers: blocks that leave the pool go to pinned host memory, to disk and to a bucket, and come back.

kvstore/ledger decides which block leaves first; moves between nodes are in kvstore/transfer.

Open tiers.py first.
"""
