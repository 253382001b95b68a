"""Keeps the KV of conversations as long as their next turns are expected, by what was learned of each tenant's tools.

- `turn_gaps` learns, and decides: sans-IO.
- `kv_hints` reads what clients say of it themselves.
- `retentions` tells KV nodes, and fetches ahead.
"""
