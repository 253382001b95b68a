"""Defines how components reach each other.

No service's logic comes in here: messages are in `pillion.wire`, servicers with their services.

Open rpc.py first.
"""
