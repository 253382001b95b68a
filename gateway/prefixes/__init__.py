"""Prefixes that users want to have warm: prompts computed ahead, pins, and the breakpoints of the Messages API.

prefix_pins.py   PrefixPins: warms a prompt, pins it at the KV node that has it, lists and drops pins
breakpoints.py   how many tokens of a prompt stand before a breakpoint

A pin is a retention in the ledger of a KV node (kvstore/ledger/retentions.py); a gateway keeps nothing of it.
"""
