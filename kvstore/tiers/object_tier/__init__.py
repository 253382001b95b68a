"""Lower tier in a bucket, which nodes and clusters share and which outlives them (--object-url, docs/tiers.md).

write_through.py copies each block some seconds after its commit, and kvstore/tiers/spill.py offers those that it
evicts, as to every tier.
"""
