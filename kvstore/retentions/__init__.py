"""Keeps chains of blocks in a pool until the time at which their next turn is expected.

- `retention_eviction` decides in which order blocks leave.
- `node_retentions` serves the call of gateways.
"""
