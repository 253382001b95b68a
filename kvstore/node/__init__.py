"""Runs the KV node's process, which owns one memory domain's pool and alone leases, commits, pins and evicts (I3, I4).

kvstore/ledger decides which slot may be given to whom; no model and no request's text comes in here.

Open pool.py first.
"""
