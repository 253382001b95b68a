"""Pools in host memory, without torch. Open memory.py first.

kvstore/ledger decides which process may use a slot; here a slot is an offset.
"""
