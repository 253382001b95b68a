"""The KV node's process, which owns one memory domain's pool: it alone leases, commits, pins and evicts (I3, I4).

kvstore/ledger makes the decisions; nothing here depends on a model or a request's text. Open pool.py first.
"""
