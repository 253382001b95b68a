"""Holds the pool's bytes on the host, without torch.

kvstore/ledger decides which slot holds what, and who may use it; here a slot is a place.

Open memory.py first.
"""
