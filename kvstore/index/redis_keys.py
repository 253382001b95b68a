"""Layout of Redis's keys. Sans-IO; docs/redis.md lists owner, time to live and size of every key.

    block of a chain --> segment: the SEGMENT_BLOCKS blocks, aligned, that include it
    segment          --> bucket: 18 bits of the hash of the segment's first block
    bucket           --> group: the bucket's first 12 bits, written as hash tag: one slot in a Redis Cluster
    bucket[field]    --> entries of 8 bytes: number and boot epoch of each node that has the block

Keys are derived from hashes, so clients pass all keys that a script uses. Segments balance two costs: a look-up has one
key per segment, and all chains that share a segment's first block store this segment in the same bucket, on one shard.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterable
from dataclasses import dataclass, field

from pillion.kvstore.hashing import HASH_BYTES, SEGMENT_BLOCKS
from pillion.kvstore.ledger.records import IndexEvent

PREFIX = b"pillion:"
COMPONENTS = PREFIX + b"{registry}:components"
EXPIRY = PREFIX + b"{registry}:expiry"
NUMBERS = PREFIX + b"{registry}:numbers"
NODES = PREFIX + b"{registry}:nodes"
ADAPTERS = PREFIX + b"adapters"
# The recorder's bundles by id, and their ids by time (lua/record_keep.lua).
RECORDS = (PREFIX + b"{records}:bundles", PREFIX + b"{records}:times")

FIELD_BYTES = 8
ENTRY_BYTES = 8
# Max nodes stored per block, the newest ones: more would only cost time on the server.
MAX_ENTRIES_PER_BLOCK = 32

# Base64. Two letters name a group, and a third the bucket in it.
_ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
BUCKETS_PER_GROUP = len(_ALPHABET)
GROUPS = len(_ALPHABET) ** 2
_HEAD_BYTES = 3


def buckets_key(owner: str) -> bytes:
    """Return the key of an owner's token buckets (shared_buckets.py). ``owner`` must not contain braces."""
    return b"pillion:q:{%b}" % owner.encode()


def load_key(gateway_id: str) -> bytes:
    """Return the key of a gateway's load (shared_loads.py)."""
    # The same hash tag for all gateways, so that one script can read all loads.
    return b"pillion:{load}:%b" % gateway_id.encode()


def prefix_pins_key(node_id: str) -> bytes:
    """Return the key of a KV node's record of prefix pins (kvstore/prefix_pins/pin_records.py)."""
    return b"pillion:prefix_pins:%b" % node_id.encode()


def bucket(segment: bytes) -> bytes:
    """Return the key of a segment's bucket. ``segment`` is the hash of the segment's first block."""
    name = binascii.b2a_base64(segment[:_HEAD_BYTES], newline=False)
    return b"pillion:b:{%b}%b" % (name[:2], name[2:3])


def group_of(bucket_key: bytes) -> bytes:
    """Return the group in a bucket key, between its braces."""
    return bucket_key[11:13]


def generation(group: bytes) -> bytes:
    """Return the key of a group's generation: a random value by whose loss the loss of the group's buckets is detected.
    A single server has one group, ``b""``."""
    return b"pillion:g:{%b}" % group


def group_name(number: int) -> bytes:
    """Return the name of group 0 .. GROUPS - 1."""
    return bytes((_ALPHABET[number // BUCKETS_PER_GROUP], _ALPHABET[number % BUCKETS_PER_GROUP]))


def group_buckets(group: bytes, first: int) -> list[bytes]:
    """Return the keys of a group's buckets ``first`` .. BUCKETS_PER_GROUP - 1."""
    return [b"pillion:b:{%b}%c" % (group, letter) for letter in _ALPHABET[first:]]


def chain_buckets(block_hashes: bytes) -> list[bytes]:
    """Return the Redis key of the bucket of each SEGMENT_BLOCKS-block segment of a chain. ``block_hashes``: 32 bytes
    per block, from the first block on."""
    step = SEGMENT_BLOCKS * HASH_BYTES
    heads = b"".join([block_hashes[at : at + _HEAD_BYTES] for at in range(0, len(block_hashes), step)])
    names = binascii.b2a_base64(heads, newline=False)
    return [b"pillion:b:{%b}%b" % (names[at : at + 2], names[at + 2 : at + 3]) for at in range(0, len(names), 4)]


def chain_fields(block_hashes: bytes) -> bytes:
    """Return the leading FIELD_BYTES of each hash of a chain, concatenated."""
    words = memoryview(block_hashes).cast("Q")
    return words[:: HASH_BYTES // FIELD_BYTES].tobytes()


@dataclass(slots=True)
class BucketUpdates:
    """Updates of one bucket: concatenated fields of blocks that arrived, and of blocks that were evicted."""

    arrived: bytearray = field(default_factory=bytearray)
    evicted: bytearray = field(default_factory=bytearray)


def updates_by_group(events: Iterable[IndexEvent], *, cluster: bool) -> dict[bytes, dict[bytes, BucketUpdates]]:
    """Return the updates of events by group, then by bucket key; on a single server, all are in the group ``b""``."""
    groups: dict[bytes, dict[bytes, BucketUpdates]] = {}
    for event in events:
        key = bucket(event.segment)
        updates = groups.setdefault(group_of(key) if cluster else b"", {}).setdefault(key, BucketUpdates())
        (updates.arrived if event.here else updates.evicted).extend(event.block_hash[:FIELD_BYTES])
    return groups
