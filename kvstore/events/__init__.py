"""Streams what comes into a KV node's pool and leaves it to readers outside (docs/events.md).

Nothing that changes the pool waits for a follower.
"""
