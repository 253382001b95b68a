"""Prefix pins: prompts computed ahead and pinned for users, and breakpoints of the Messages API.

A pin is an entry in a KV node's table (kvstore/ledger/pin_table.py); gateways store none of it.
"""
