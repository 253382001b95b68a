"""Keeps prefixes that users want to have warm: prompts computed ahead, pins, and breakpoints of the Messages API.

prefix_pins.py   PrefixPins: warms a prompt, pins it at the KV node that has it, lists and drops pins
breakpoints.py   how many tokens of a prompt stand before a breakpoint
prefixes_api.py  handlers of /v1/cache/prefixes at the HTTP port
prefix_servicer.py  the same over gRPC

A pin is an entry in the table of a KV node (kvstore/ledger/pin_table.py); a gateway keeps nothing of it.
"""
