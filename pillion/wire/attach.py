"""The messages of a KV node's attach socket: lines of JSON, because no gRPC message travels beside a file descriptor.

Keys that are not known here are ignored, so that a neighbouring version may add some. Every reader raises
InvalidRequest for a line that is not the message it expects, and Conflict for a foreign protocol.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from pillion._version import PROTOCOL, VERSION
from pillion.errors import InvalidRequest
from pillion.wire.common import check_line

MAX_LINE_BYTES = 4096
# A worker's last message when it lets go of the pool and lives on.
DETACHED = b"detached\n"
# A worker's message, with a descriptor of each of its other processes (pidfd), before they map a GPU's memory.
PROCESSES = b"processes\n"
# Most processes that a worker may name.
MAX_PROCESSES = 128

_REGION_KEY = re.compile(r"[0-9a-f]{64}")
RegionState = Annotated[str, Meta(pattern=r"^(fill|ready|)\Z")]
MemoryKind = Annotated[str, Meta(pattern=r"^(host|cuda)\Z")]
MappedBytes = Annotated[int, Meta(ge=0)]


class AttachHello(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's first line.

    Attributes:
        namespace: base of the worker's block hashes (hexadecimal): model, dtype, layout, block size, sharding.
        kv_rows, kv_heads: a block is so many rows, two for each layer, of a piece for each KV head.
        block_tokens: tokens of a block, 0 where the worker does not say it.
        takes_place: whether it locks its place of a pool that outlives its node, before it uses the pool.
        pool_id, place: of a worker that comes back: the pool that it has mapped, and the place that it has locked. Its
            last step has ended, and it uses nothing of that pool before the node has answered.
        processes: how many processes of the worker will use the pool.
    """

    component_id: str
    role: str
    block_bytes: int
    namespace: str = ""
    kv_rows: int = 0
    kv_heads: int = 0
    block_tokens: Annotated[int, Meta(ge=0)] = 0
    takes_place: bool = False
    pool_id: str = ""
    place: Annotated[int, Meta(ge=0)] = 0
    processes: Annotated[int, Meta(ge=1)] = 1
    protocol: int = PROTOCOL
    version: str = VERSION


class AttachedShard(msgspec.Struct, frozen=True, kw_only=True):
    """One shard of a pool that is divided over GPUs.

    Attributes:
        device_uuid: its GPU.
        mapped_bytes: size of the memory behind its descriptor.
        first_head, heads: the KV heads whose pieces it has: ``heads`` from ``first_head`` on.
    """

    device_uuid: str
    mapped_bytes: MappedBytes
    first_head: Annotated[int, Meta(ge=0)]
    heads: Annotated[int, Meta(ge=1)]


class AttachReply(msgspec.Struct, frozen=True, kw_only=True):
    """The node's answer, sent together with the pool's file descriptor; ``error`` alone is a refusal.

    Attributes:
        memory_kind: "host" or "cuda".
        device_uuid, device_index: the GPU of "cuda" memory, and how the node counts it; of a divided pool, the first.
        mapped_bytes: size of the memory behind the descriptor, which a GPU can only map whole.
        shards: where the pool is divided, its shards, for each of which a descriptor comes; else none.
        pool_id: names a pool that outlives its node, whose user locks the place ``epoch`` of it, on GPUs that of a file
            whose descriptor comes behind those of the memory; "" for another one.
    """

    node_id: str = ""
    node_address: str = ""
    epoch: int = 0
    num_slots: int = 0
    memory_kind: MemoryKind = "host"
    device_uuid: str = ""
    device_index: int = 0
    mapped_bytes: MappedBytes = 0
    shards: tuple[AttachedShard, ...] = ()
    pool_id: str = ""
    protocol: int = PROTOCOL
    version: str = VERSION
    error: str = ""


class RegionHello(msgspec.Struct, frozen=True, kw_only=True):
    """A first line instead of AttachHello: a process wants memory that it shares with all who name the same key.

    Attributes:
        region_key: 64 hexadecimal digits, the hash of what is in the region.
        device_uuid: the GPU on which the process computes, and wants the region; "": none, or any.
    """

    component_id: str
    region_key: str
    size_bytes: int
    device_uuid: str = ""
    protocol: int = PROTOCOL
    version: str = VERSION


class RegionReply(msgspec.Struct, frozen=True, kw_only=True):
    """The node's answer to RegionHello, sent with the memory's descriptor once the region is granted.

    Attributes:
        state: "fill": the receiver fills the region and then sends RegionFilled; "ready": it may read.
        memory_kind, device_uuid, mapped_bytes: see AttachReply.
    """

    node_id: str = ""
    state: RegionState = ""
    memory_kind: MemoryKind = "host"
    device_uuid: str = ""
    mapped_bytes: MappedBytes = 0
    protocol: int = PROTOCOL
    version: str = VERSION
    error: str = ""


class RegionFilled(msgspec.Struct, frozen=True, kw_only=True):
    """The filler's line: every byte of the region is written, and others may have it."""

    filled_bytes: int


AttachMessage = AttachHello | AttachReply | RegionHello | RegionReply | RegionFilled
_Message = TypeVar("_Message")


def line_to_bytes(message: AttachMessage) -> bytes:
    """Encodes one message as one line of JSON."""
    return msgspec.json.encode(message) + b"\n"


def hello_from_line(line: bytes) -> AttachHello | RegionHello:
    """Reads the first line of a connection."""
    kind: Any = RegionHello if "region_key" in _decode(line, dict[str, Any]) else AttachHello
    hello: AttachHello | RegionHello = _decode(line, kind)
    if isinstance(hello, RegionHello) and (not _REGION_KEY.fullmatch(hello.region_key) or hello.size_bytes <= 0):
        raise InvalidRequest("a region needs a name of 64 hexadecimal digits, and at least one byte")
    return hello


def attach_reply_from_line(line: bytes) -> AttachReply:
    """Reads the node's answer to an AttachHello."""
    return _decode(line, AttachReply)


def region_reply_from_line(line: bytes) -> RegionReply:
    """Reads the node's answer to a RegionHello."""
    reply = _decode(line, RegionReply)
    if not (reply.error or reply.state):
        raise InvalidRequest("a region is to be filled or ready")
    return reply


def region_filled_from_line(line: bytes) -> RegionFilled:
    """Reads a filler's line."""
    return _decode(line, RegionFilled)


def _decode(line: bytes, kind: type[_Message]) -> _Message:
    try:
        check_line(msgspec.json.decode(line))
        return msgspec.json.decode(line, type=kind)
    except ValueError as error:
        raise InvalidRequest(f"the attach protocol speaks one line of JSON; this one is wrong: {error}") from None
