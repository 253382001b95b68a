"""Messages of a KV node's attach socket: lines of JSON, because no gRPC message can accompany a file descriptor.

Unknown keys are ignored, so that an adjacent version may add some. Every parser raises InvalidRequest for a line that
is not the expected message, and Conflict for an incompatible protocol.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from pillion._version import PROTOCOL, VERSION
from pillion.errors import InvalidRequest
from pillion.wire.json_lines import message_of

MAX_LINE_BYTES = 4096
# A worker's last message when it releases the pool and keeps running.
DETACHED = b"detached\n"
# Message of a worker with pidfds of its other processes, sent before these map a GPU's memory.
PROCESSES = b"processes\n"
# Max pidfds with that message.
MAX_PROCESSES = 128

RegionState = Annotated[str, Meta(pattern=r"^(fill|ready|)\Z")]
MemoryKind = Annotated[str, Meta(pattern=r"^(host|cuda)\Z")]
MappedBytes = Annotated[int, Meta(ge=0)]


class AttachHello(msgspec.Struct, frozen=True, kw_only=True):
    """The first line that a worker writes to the attach socket.

    Attributes:
        namespace: the base of the worker's block hashes (hexadecimal): model, dtype, layout, block size.
        kv_rows, kv_heads: rows per block, two per layer, and pieces per row, one per KV head.
        block_tokens: tokens per block; 0 from older workers.
        takes_place: True if it locks its place, a byte of the file of a pool that outlives its node, before it uses the
            pool.
        pool_id, place: the pool that a returning worker has mapped, and the place that it has locked. Its last step has
            ended, and it does not use that pool before the node has answered.
        processes: number of processes of the worker that will use the pool.
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
        first_head, heads: it has the pieces of ``heads`` KV heads, starting with ``first_head``.
    """

    device_uuid: str
    mapped_bytes: MappedBytes
    first_head: Annotated[int, Meta(ge=0)]
    heads: Annotated[int, Meta(ge=1)]


class AttachReply(msgspec.Struct, frozen=True, kw_only=True):
    """The node's answer, sent together with the pool's file descriptor; ``error`` alone is a refusal.

    Attributes:
        memory_kind: "host" or "cuda".
        device_uuid, device_index: the GPU of "cuda" memory, and the node's number for it; for a divided pool, those of
            the first GPU.
        mapped_bytes: size of the memory behind the descriptor, which a GPU can only map whole.
        shards: the shards of a divided pool, each with its own descriptor; empty for any other pool.
        pool_id: the name of a pool that outlives its node; "" for any other pool. A worker locks byte ``epoch`` of the
            pool's file; on GPUs, of a separate file, whose descriptor follows those of the memory.
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
    """The first line of a process that requests a region, memory shared by all processes with the same key.

    Attributes:
        region_key: 64 hexadecimal digits, the hash of the region's content.
        device_uuid: the GPU on which the process needs the region; "" for host memory or any GPU.
    """

    component_id: str
    region_key: str
    size_bytes: int
    device_uuid: str = ""
    protocol: int = PROTOCOL
    version: str = VERSION


class RegionReply(msgspec.Struct, frozen=True, kw_only=True):
    """The node's answer to RegionHello, sent with the memory's descriptor when the region is granted.

    Attributes:
        state: "fill": the receiver fills the region and then sends RegionFilled; "ready": it may read.
        memory_kind, device_uuid, mapped_bytes: as in AttachReply.
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
    """Message that every byte of the region is written, so that other processes may use it."""

    filled_bytes: int


_Message = TypeVar("_Message")


def hello_from_line(line: bytes) -> AttachHello | RegionHello:
    """Parse the first line of a connection."""
    kind: Any = RegionHello if "region_key" in _decode(line, dict[str, Any]) else AttachHello
    hello: AttachHello | RegionHello = _decode(line, kind)
    if isinstance(hello, RegionHello) and (
        not re.fullmatch(r"[0-9a-f]{64}", hello.region_key) or hello.size_bytes <= 0
    ):
        raise InvalidRequest("a region needs a name of 64 hexadecimal digits, and at least one byte")
    return hello


def attach_reply_from_line(line: bytes) -> AttachReply:
    """Parse the node's answer to an AttachHello."""
    return _decode(line, AttachReply)


def region_reply_from_line(line: bytes) -> RegionReply:
    """Parse the node's answer to a RegionHello."""
    reply = _decode(line, RegionReply)
    if not (reply.error or reply.state):
        raise InvalidRequest("a region must be filled or ready")
    return reply


def region_filled_from_line(line: bytes) -> RegionFilled:
    """Parse the line of a process that has filled a region."""
    return _decode(line, RegionFilled)


def _decode(line: bytes, kind: type[_Message]) -> _Message:
    return message_of(line, kind, "the attach protocol")
