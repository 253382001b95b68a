"""The KV node's process: it owns the pool of one memory domain, and alone leases, commits, pins and evicts (I3, I4).

kvstore/ledger makes the decisions. Nothing here depends on the model or on requests' text. Open pool.py first.
"""
