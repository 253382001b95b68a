"""Watches streams while components of a live cluster are lost.

streams.py     a load of streams, and their pauses
"""
