"""Lays out Redis's keys. Sans-IO; docs/index.md has the table with owner, time to live and size of every key.

    block i of a chain --> its segment: the SEGMENT_BLOCKS blocks of the chain around it
    segment            --> bucket: 18 bits of the hash of the segment's first block
    bucket             --> group: the bucket's first 12 bits, written as hash tag: one slot in a Redis Cluster
    bucket[field]      --> entries of 8 bytes: number and boot epoch of each node that has the block

A key is known from the hashes alone, so clients name every key and a script touches no other. A segment is the unit
because of the two costs that it balances: a look-up names one key per segment, and all chains that share a segment's
first block keep their segment in one bucket and on one shard, however many they are.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterable
from dataclasses import dataclass, field

from pillion.kvstore.hashing import HASH_BYTES, SEGMENT_BLOCKS
from pillion.kvstore.ledger.records import IndexEvent

PREFIX = b"pillion:"
# The registry's keys share a hash tag, so that a heartbeat is one script.
COMPONENTS = PREFIX + b"{registry}:components"
EXPIRY = PREFIX + b"{registry}:expiry"
NUMBERS = PREFIX + b"{registry}:numbers"
NODES = PREFIX + b"{registry}:nodes"
# This key has the names of adapters, which all gateways share.
ADAPTERS = PREFIX + b"adapters"
# These hold the recorder's bundles, and their ids with the times (lua/record_keep.lua).
RECORDS = (PREFIX + b"{records}:bundles", PREFIX + b"{records}:times")

# Keys that begin like this hold token buckets of tenants.
_BUCKETS = PREFIX + b"q:{%b}"
# Keys like this hold what gateways have under way, under one hash tag, so that one script reads it all.
_LOADS = PREFIX + b"{load}:%b"
# A key like this holds a KV node's record of prefix pins.
_PREFIX_PINS = PREFIX + b"prefix_pins:%b"

FIELD_BYTES = 8
ENTRY_BYTES = 8
# The index keeps this many nodes for one block, the newest: more add nothing but time on the server.
MAX_ENTRIES_PER_BLOCK = 32

_ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
BUCKETS_PER_GROUP = len(_ALPHABET)
GROUPS = len(_ALPHABET) ** 2
_HEAD_BYTES = 3


def buckets_of(owner: str) -> bytes:
    """Returns the key of an owner's token buckets (shared_buckets.py). ``owner`` has no braces."""
    return _BUCKETS % owner.encode()


def load_of(gateway_id: str) -> bytes:
    """Returns the key of what a gateway has under way (shared_loads.py)."""
    return _LOADS % gateway_id.encode()


def prefix_pins_of(node_id: str) -> bytes:
    """Returns the key of a KV node's record of prefix pins (kvstore/prefix_pins/pin_records.py)."""
    return _PREFIX_PINS % node_id.encode()


def bucket(segment: bytes) -> bytes:
    """Returns the key of a segment's bucket. ``segment`` is the hash of its first block."""
    name = binascii.b2a_base64(segment[:_HEAD_BYTES], newline=False)
    return b"pillion:b:{%b}%b" % (name[:2], name[2:3])


def group_of(bucket_key: bytes) -> bytes:
    """Returns a bucket key's group: what is between its braces."""
    return bucket_key[11:13]


def generation(group: bytes) -> bytes:
    """Returns the key of a group's generation: Redis loses it together with the group's buckets, and so shows their
    loss. One server has one group, ``b""``."""
    return b"pillion:g:{%b}" % group


def group_name(number: int) -> bytes:
    """Returns the name of group 0 .. GROUPS - 1."""
    return bytes((_ALPHABET[number // BUCKETS_PER_GROUP], _ALPHABET[number % BUCKETS_PER_GROUP]))


def group_buckets(group: bytes, first: int) -> list[bytes]:
    """Returns the keys of a group's buckets, from the ``first`` on."""
    return [b"pillion:b:{%b}%c" % (group, letter) for letter in _ALPHABET[first:]]


def chain_buckets(block_hashes: bytes) -> list[bytes]:
    """Returns one bucket key per segment of a chain. ``block_hashes`` is the whole chain, 32 bytes each."""
    step = SEGMENT_BLOCKS * HASH_BYTES
    heads = b"".join([block_hashes[at : at + _HEAD_BYTES] for at in range(0, len(block_hashes), step)])
    names = binascii.b2a_base64(heads, newline=False)
    return [b"pillion:b:{%b}%b" % (names[at : at + 2], names[at + 2 : at + 3]) for at in range(0, len(names), 4)]


def chain_fields(block_hashes: bytes) -> bytes:
    """Returns the leading FIELD_BYTES of each hash of a chain, packed."""
    words = memoryview(block_hashes).cast("Q")
    return words[:: HASH_BYTES // FIELD_BYTES].tobytes()


@dataclass(slots=True)
class BucketUpdates:
    """Holds, packed, the fields of one bucket to which entries are added and from which they are removed."""

    came: bytearray = field(default_factory=bytearray)
    went: bytearray = field(default_factory=bytearray)


def updates_by_group(events: Iterable[IndexEvent], *, cluster: bool) -> dict[bytes, dict[bytes, BucketUpdates]]:
    """Sorts events by group, then by bucket key; on one server all are in the group ``b""``."""
    groups: dict[bytes, dict[bytes, BucketUpdates]] = {}
    for event in events:
        key = bucket(event.segment)
        updates = groups.setdefault(group_of(key) if cluster else b"", {}).setdefault(key, BucketUpdates())
        (updates.came if event.here else updates.went).extend(event.block_hash[:FIELD_BYTES])
    return groups
