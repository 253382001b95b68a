"""Reaches a KV node from other components.

Nothing of the node's own state comes in here.

Open node_client.py first.
"""
