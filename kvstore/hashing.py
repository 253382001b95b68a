"""Block hashes, which make KV blocks content-addressed (I2).

    namespace base   everything that changes the meaning of a block's bytes: weights, dtype, layout, block size
    request root     the base, narrowed by the adapter, the tenant's ``cache_salt``, and rotary frequencies by length
    block hash       SHA-256 over the parent's hash and the block's token ids; the first block's parent is the root
    state page       SHA-256 over the hash of the block that the state follows, and the page's number

A hash thus names a whole prefix, and two requests share a block exactly if they share model, layout, adapter, salt and
every token up to the block's end. Nothing here is secret or depends on the process (never Python's ``hash``).
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence

from pillion.errors import InvalidRequest

HASH_BYTES = 32
# Blocks of a chain per index segment. A segment lives on one shard of a Redis Cluster, so that one shard answers for
# many blocks of a chain, but no shard for a whole chain.
SEGMENT_BLOCKS = 32

# Token ids are hashed as four bytes each. array's "I" is the C compiler's unsigned int, which has four bytes on every
# platform that Python supports today.
if array("I").itemsize != 4:
    raise ImportError("this platform's unsigned int is not four bytes")


def namespace_base(*, fingerprint: str, dtype: str, layout: str, block_size: int) -> bytes:
    """Return the digest (32 bytes) of the properties shared by all requests to one served model.

    Args:
        fingerprint: SHA-256 of weights and configuration, hexadecimal.
        dtype: type of the cached values, e.g. "bfloat16".
        layout: version of the attention backend's layout inside a block.
        block_size: tokens per block.
    """
    # "1": formerly the number of shards, kept so that blocks of earlier releases match.
    return _digest(b"pillion.namespace.1", fingerprint, dtype, layout, str(block_size), "1")


def request_root(base: bytes, adapter: str = "", cache_salt: str = "", *, short_text: bool = False) -> bytes:
    """Return the parent hash (32 bytes) of a request's first block. Requests with different adapters or salts share no
    block.

    ``short_text`` selects the rotary frequencies for texts within the model's original length, on models that have
    separate ones for longer texts; requests of the two kinds share no block.
    """
    return _digest(b"pillion.root.1", base.hex(), adapter, cache_salt, *(("short text",) if short_text else ()))


def chain_hashes(parent: bytes, token_ids: Sequence[int], block_size: int) -> bytes:
    """Return the hashes of the whole blocks of ``token_ids``, 32 bytes each, concatenated. Ignores a partial block.

    Args:
        parent: hash of the block before, or the request's root (32 bytes).
        token_ids: ids in 0 .. 2**32 - 1. Raises OverflowError outside that range, TypeError for non-integers.
        block_size: tokens per block, at least 1.
    """
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    tokens = packed.tobytes()
    width = block_size * packed.itemsize
    blocks = memoryview(tokens)[: len(tokens) - len(tokens) % width]
    # iter_unpack in a comprehension takes half the time of slicing in a loop, and hashing is on every request's path.
    sha256 = hashlib.sha256
    return b"".join([parent := sha256(parent + block).digest() for (block,) in struct.iter_unpack(f"{width}s", blocks)])


def state_page(block_hash: bytes, page: int) -> bytes:
    """Return the hash of page ``page`` of the state after a block. The pages follow the block as a chain, so a state is
    complete if its last page is present."""
    return hashlib.sha256(b"pillion.state.1" + block_hash + page.to_bytes(4, "little")).digest()


def split_hashes(packed: bytes) -> list[bytes]:
    """Split concatenated hashes. Raises InvalidRequest if the length is not a multiple of HASH_BYTES."""
    if len(packed) % HASH_BYTES:
        raise InvalidRequest(f"{len(packed)} bytes are not a whole number of {HASH_BYTES}-byte hashes")
    return [block_hash for (block_hash,) in struct.iter_unpack(f"{HASH_BYTES}s", packed)]


def digest_share(block_hash: bytes) -> int:
    """Return a block's share of a digest over many blocks (the XOR of all shares): the first 64 bits of its hash."""
    return int.from_bytes(block_hash[:8], "big")


def _digest(tag: bytes, *fields: str) -> bytes:
    """Digest fields, each prefixed with its length so that different lists never have the same bytes."""
    digest = hashlib.sha256(tag)
    for text in fields:
        encoded = text.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()
