"""Clients of a KV node, for other components. Open node_client.py first."""
