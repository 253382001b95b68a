"""Prefix pins: chains that tenants have pinned, which are evicted last. Open node_pins.py first."""
