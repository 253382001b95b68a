"""Lets a node fetch blocks from other nodes, and serves blocks to them. Open node_exchange.py first.

Which node is asked for a prompt is the gateway's decision; a failure here brings fewer blocks, never wrong ones.
"""
