"""Transfer of blocks from elsewhere, under a ticket: pinning, reading, committing. Open fetch.py first.

A failure here means fewer blocks, never wrong ones.
"""
