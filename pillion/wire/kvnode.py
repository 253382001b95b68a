"""Converters of the KV node's service (protos/pillion/v1/kvnode.proto) and the words of its attach protocol."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from pillion._version import PROTOCOL, VERSION
from pillion.errors import InvalidRequest
from pillion.v1 import common_pb2, kvnode_pb2
from pillion.wire.common import check_hello


@dataclass(frozen=True, slots=True)
class Ticket:
    """One request's claim: its first ``pinned_blocks`` hashes are here and stay until every holder lets go."""

    ticket_id: int
    pinned_blocks: int


@dataclass(frozen=True, slots=True)
class Adopted:
    """What a worker gets with a ticket.

    Attributes:
        chain_slots: slots of the pinned chain, in order.
        leased_slots: as many fresh slots as were asked for.
        tail_hash: hash of the chain's last block (32 bytes), empty where the chain is empty.
    """

    chain_slots: tuple[int, ...]
    leased_slots: tuple[int, ...]
    tail_hash: bytes


@dataclass(frozen=True, slots=True)
class CommitRun:
    """Blocks of one ticket, each the child of the one before; ``block_hashes`` has 32 bytes per slot."""

    ticket_id: int
    slots: tuple[int, ...]
    block_hashes: bytes


@dataclass(frozen=True, slots=True)
class CommitResult:
    """The slot that stays for each block (I2), or why nothing of the run was taken."""

    slots: tuple[int, ...] = ()
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Brought:
    """What a prefetch came to: ``blocks`` of the chain are pinned now; of them it brought ``fetched_blocks`` from other
    nodes and ``restored_blocks`` from the node's own lower tiers."""

    blocks: int
    fetched_blocks: int = 0
    restored_blocks: int = 0


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """``fenced``: the epoch may no longer commit or emit (I4). ``recall_blocks``: slots wanted back from the stock."""

    fenced: bool
    recall_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """A node's books; see NodeStatus in kvnode.proto for each field. The four states add up to ``total_blocks``."""

    node_id: str = ""
    boot_epoch: int = 0
    block_bytes: int = 0
    total_blocks: int = 0
    free_blocks: int = 0
    leased_blocks: int = 0
    committed_blocks: int = 0
    quarantined_blocks: int = 0
    pinned_blocks: int = 0
    reserved_blocks: int = 0
    tickets: int = 0
    holders: int = 0
    waiting_tickets: int = 0
    evicted_blocks: int = 0
    committed_blocks_ever: int = 0
    fenced_components: tuple[str, ...] = ()
    fetched_blocks: int = 0
    served_blocks: int = 0
    restored_blocks: int = 0
    spilled_blocks: int = 0
    corrupt_blocks: int = 0
    short_fetches: int = 0
    disk_blocks: int = 0
    kv_transport: str = ""
    host_blocks: int = 0
    kv_device: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachHello:
    """A worker's first line on the attach socket: JSON, because no message of gRPC's travels there.

    ``namespace`` is the base of its hashes (hexadecimal): model, dtype, layout, block size, sharding.
    """

    component_id: str
    role: str
    block_bytes: int
    namespace: str = ""
    protocol: int = PROTOCOL
    version: str = VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachReply:
    """The node's answer, sent together with the pool's file descriptor; ``error`` alone is a refusal.

    ``memory_kind``: "host", or "cuda": then ``device_uuid`` names the GPU, ``device_index`` says how the node counts
    it, and ``mapped_bytes`` is the size of the memory behind the descriptor, which can only be mapped whole.
    """

    node_id: str = ""
    node_address: str = ""
    epoch: int = 0
    num_slots: int = 0
    memory_kind: str = "host"
    device_uuid: str = ""
    device_index: int = 0
    mapped_bytes: int = 0
    protocol: int = PROTOCOL
    version: str = VERSION
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionHello:
    """Instead of an AttachHello: a process wants memory of ``size_bytes`` that it shares with all that name the same
    ``region_key`` (64 hexadecimal digits, the hash of what is in it)."""

    component_id: str
    region_key: str
    size_bytes: int
    protocol: int = PROTOCOL
    version: str = VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionReply:
    """Comes with the memory's descriptor once the region is the asker's. ``state``: "fill", and the asker answers with
    RegionFilled when it has done so, or "ready"; the other fields are those of AttachReply."""

    node_id: str = ""
    state: str = ""
    memory_kind: str = "host"
    device_uuid: str = ""
    mapped_bytes: int = 0
    protocol: int = PROTOCOL
    version: str = VERSION
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionFilled:
    """Others may have the region now: every byte of it is written."""

    filled_bytes: int


Line = AttachHello | AttachReply | RegionHello | RegionReply | RegionFilled
_LineKind = TypeVar("_LineKind", AttachHello, AttachReply, RegionHello, RegionReply, RegionFilled)
_NEEDED: dict[type, set[str]] = {
    AttachHello: {"component_id", "role", "block_bytes"},
    RegionHello: {"component_id", "region_key", "size_bytes"},
    RegionFilled: {"filled_bytes"},
}
_REGION_KEY = re.compile(r"[0-9a-f]{64}")


def line_to_bytes(message: Line) -> bytes:
    """One line of JSON."""
    return json.dumps(asdict(message), separators=(",", ":")).encode() + b"\n"


def hello_from_line(line: bytes) -> AttachHello | RegionHello:
    """A worker's first line, whatever it wants. Raises what the two converters raise."""
    return region_hello_from_line(line) if "region_key" in _said(line) else attach_hello_from_line(line)


def attach_hello_from_line(line: bytes) -> AttachHello:
    """Unknown keys are dropped. Raises InvalidRequest on what is no hello, Conflict on a foreign protocol."""
    hello = _read(line, AttachHello)
    check_hello(common_pb2.Hello(protocol=max(hello.protocol, 0), component_id=hello.component_id))
    return hello


def attach_reply_from_line(line: bytes) -> AttachReply:
    """Unknown keys are dropped. Raises InvalidRequest on what is no reply, Conflict on a foreign protocol."""
    reply = _read(line, AttachReply)
    check_hello(common_pb2.Hello(protocol=max(reply.protocol, 0), component_id=reply.node_id or "the KV node"))
    _check_memory(reply)
    return reply


def region_hello_from_line(line: bytes) -> RegionHello:
    """Unknown keys are dropped. Raises InvalidRequest on what is no hello, Conflict on a foreign protocol."""
    hello = _read(line, RegionHello)
    check_hello(common_pb2.Hello(protocol=max(hello.protocol, 0), component_id=hello.component_id))
    if not _REGION_KEY.fullmatch(hello.region_key) or hello.size_bytes <= 0:
        raise InvalidRequest("a region needs a name of 64 hexadecimal digits, and at least one byte")
    return hello


def region_reply_from_line(line: bytes) -> RegionReply:
    """Unknown keys are dropped. Raises InvalidRequest on what is no reply, Conflict on a foreign protocol."""
    reply = _read(line, RegionReply)
    check_hello(common_pb2.Hello(protocol=max(reply.protocol, 0), component_id=reply.node_id or "the KV node"))
    _check_memory(reply)
    if not reply.error and reply.state not in ("fill", "ready"):
        raise InvalidRequest(f"a region is to be filled or ready, not {reply.state!r}")
    return reply


def region_filled_from_line(line: bytes) -> RegionFilled:
    """Raises InvalidRequest on anything else."""
    return _read(line, RegionFilled)


def _check_memory(reply: AttachReply | RegionReply) -> None:
    if reply.memory_kind not in ("host", "cuda") or reply.mapped_bytes < 0:
        raise InvalidRequest(f"memory of kind {reply.memory_kind!r} and {reply.mapped_bytes} bytes cannot be mapped")


def _said(line: bytes) -> dict[str, Any]:
    try:
        said = json.loads(line)
    except ValueError:
        said = None
    if not isinstance(said, dict):
        raise InvalidRequest("the attach protocol speaks one line of JSON")
    return said


def _read(line: bytes, kind: type[_LineKind]) -> _LineKind:
    said = _said(line)
    wanted = {name: str if field.type == "str" else int for name, field in kind.__dataclass_fields__.items()}
    known = {name: value for name, value in said.items() if name in wanted}
    missing = _NEEDED.get(kind, set()) - known.keys()
    wrong = {name for name, value in known.items() if type(value) is not wanted[name]}
    if missing or wrong:
        raise InvalidRequest(f"attach line: missing or wrong {', '.join(sorted(missing | wrong))}")
    return kind(**known)


def ticket_from_pb(message: kvnode_pb2.OpenTicketReply) -> Ticket:
    """Field by field."""
    return Ticket(message.ticket_id, message.pinned_blocks)


def ticket_to_pb(ticket: Ticket) -> kvnode_pb2.OpenTicketReply:
    """Field by field."""
    return kvnode_pb2.OpenTicketReply(ticket_id=ticket.ticket_id, pinned_blocks=ticket.pinned_blocks)


def adopted_from_pb(message: kvnode_pb2.AdoptTicketReply) -> Adopted:
    """Field by field."""
    return Adopted(tuple(message.chain_slots), tuple(message.leased_slots), message.tail_hash)


def adopted_to_pb(adopted: Adopted) -> kvnode_pb2.AdoptTicketReply:
    """Field by field."""
    return kvnode_pb2.AdoptTicketReply(**asdict(adopted))


def runs_from_pb(message: kvnode_pb2.CommitRequest) -> list[CommitRun]:
    """In the order of the request."""
    return [CommitRun(run.ticket_id, tuple(run.slots), run.block_hashes) for run in message.runs]


def runs_to_pb(epoch: int, runs: Sequence[CommitRun]) -> kvnode_pb2.CommitRequest:
    """In the order given."""
    return kvnode_pb2.CommitRequest(
        epoch=epoch,
        runs=[
            kvnode_pb2.CommitRun(ticket_id=run.ticket_id, slots=run.slots, block_hashes=run.block_hashes)
            for run in runs
        ],
    )


def results_from_pb(message: kvnode_pb2.CommitReply) -> list[CommitResult]:
    """In the order of the request's runs."""
    return [CommitResult(tuple(result.slots), result.refusal) for result in message.results]


def results_to_pb(results: Sequence[CommitResult]) -> kvnode_pb2.CommitReply:
    """In the order of the request's runs."""
    return kvnode_pb2.CommitReply(
        results=[kvnode_pb2.CommitRunResult(slots=result.slots, refusal=result.refusal) for result in results]
    )


def heartbeat_from_pb(message: kvnode_pb2.HeartbeatReply) -> HeartbeatReply:
    """Field by field."""
    return HeartbeatReply(message.fenced, message.recall_blocks)


def heartbeat_to_pb(reply: HeartbeatReply) -> kvnode_pb2.HeartbeatReply:
    """Field by field."""
    return kvnode_pb2.HeartbeatReply(fenced=reply.fenced, recall_blocks=reply.recall_blocks)


def status_from_pb(message: kvnode_pb2.NodeStatus) -> NodeStatus:
    """Field by field."""
    said = {name: getattr(message, name) for name in NodeStatus.__dataclass_fields__}
    return NodeStatus(**said | {"fenced_components": tuple(message.fenced_components)})


def status_to_pb(status: NodeStatus) -> kvnode_pb2.NodeStatus:
    """Field by field."""
    return kvnode_pb2.NodeStatus(**asdict(status))


def brought_from_pb(message: kvnode_pb2.PrefetchReply) -> Brought:
    """Field by field."""
    return Brought(message.blocks, message.fetched_blocks, message.restored_blocks)


def brought_to_pb(brought: Brought) -> kvnode_pb2.PrefetchReply:
    """Field by field."""
    return kvnode_pb2.PrefetchReply(**asdict(brought))
