"""How other components reach a KV node. Independent of the node's own state. Open node_client.py first."""
