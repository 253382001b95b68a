"""Brings blocks from elsewhere, under a ticket, and says who pins, reads and commits them.

    fetch.py           Fetcher: brings a prompt's blocks here, from lower tiers and other nodes. Open it first.
    hand_over.py       HandOver: what a node that leaves gives to others, in which order, to whom, how fast.
    nixl/              what moves blocks between nodes with NIXL and UCX: one-sided reads.

A failure here brings fewer blocks, never wrong ones.
"""
