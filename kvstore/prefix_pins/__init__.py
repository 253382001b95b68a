"""Keeps prefix pins: chains that tenants want to keep in the pool, which are evicted last. Open node_pins.py first."""
