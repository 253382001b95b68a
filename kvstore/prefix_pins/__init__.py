"""Keeps prefix pins: chains that tenants want to keep in the pool, which are evicted last. Open node_pins.py first.

node_pins.py    NodePrefixPins: the pins of kvstore/ledger/pin_table.py with real time, for callers of the KV node:
                how pins end, and their record
pin_records.py  PrefixPinRecords: the record in Redis that the node's next life reads
"""
