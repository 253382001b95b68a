"""The prefix-hashed KV store: chain hashes, the index in Redis, and the KV node that owns the pool."""
