"""Streams of a KV node's pool changes for external readers (docs/events.md).

No change of the pool waits for a follower.
"""
