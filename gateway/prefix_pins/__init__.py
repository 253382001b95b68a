"""Keeps prefixes that users want to have warm: prompts computed ahead, pins, and breakpoints of the Messages API.

A pin is an entry in the table of a KV node (kvstore/ledger/pin_table.py); a gateway keeps nothing of it.
"""
