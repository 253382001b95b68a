"""Pools in host memory, without torch. Open memory.py first.

kvstore/ledger decides who may use a slot; here a slot is an offset.
"""
