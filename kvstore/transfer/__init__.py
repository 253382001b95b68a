"""Brings blocks from elsewhere, under a ticket, and says who pins, reads and commits them.

A failure here brings fewer blocks, never wrong ones.

Open fetch.py first.
"""
