"""Keeps chains of blocks in a pool until the time at which their next turn is expected.

- `node_retentions` serves the call of gateways. `kvstore/ledger/retention_eviction.py` decides in which order blocks
  leave.
"""
