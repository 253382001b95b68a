"""Exchange of blocks with other nodes: fetching and serving. Open node_exchange.py first.

The gateway chooses the source for a prompt; a failure here means fewer blocks, never wrong ones.
"""
