"""Keeps prefix pins: chains that tenants want to keep in the pool, which are evicted last. Open pin_table.py first.

pin_table.py    PrefixPinTable: the pins of one pool and their quotas, and that they leave last, for the ledger (no I/O)
node_pins.py    NodePrefixPins: the same with real time, for callers of the KV node: how pins end, and their record
pin_records.py  PrefixPinRecords: the record in Redis that the node's next life reads
"""
