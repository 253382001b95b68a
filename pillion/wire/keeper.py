"""The messages of the socket of a pool's keeper: one line of JSON each way, beside which descriptors travel.

Readers raise InvalidRequest for a line that is not the message they expect, and Conflict for a foreign protocol.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from pillion._version import PROTOCOL, VERSION
from pillion.errors import InvalidRequest
from pillion.wire.common import check_line

MAX_KEEPER_LINE_BYTES = 8192
# A pool in host memory and its table.
MIN_KEPT_MEMORIES = 2
# Processes that are kept with a pool on a GPU. With its memories they go in one message; Linux passes on 253 at most.
MAX_KEPT_PROCESSES = 200
# Memories of the shards of such a pool, the file of its places, and its table.
MAX_KEPT_MEMORIES = 18

KeeperAction = Annotated[str, Meta(pattern=r"^(keep|take|drop)\Z")]
Places = Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=MAX_KEPT_PROCESSES)]
KeptName = Annotated[str, Meta(min_length=1, max_length=256)]


class KeeperHello(msgspec.Struct, frozen=True, kw_only=True):
    """A node's only line.

    Attributes:
        action: "keep": the descriptors that come along are kept under ``name``, in place of those that are; "take":
            they are wanted; "drop": nothing is kept under it any more.
        name: the node's.
        places: the descriptors that come along end with one of a process for each of these places of the pool.
        memories: how many descriptors come before those.
    """

    action: KeeperAction
    name: KeptName
    memories: Annotated[int, Meta(ge=0, le=MAX_KEPT_MEMORIES)] = 0
    places: Places = ()
    protocol: int = PROTOCOL
    version: str = VERSION


class KeeperReply(msgspec.Struct, frozen=True, kw_only=True):
    """The keeper's answer. ``kept``: whether descriptors are kept under the name; those that are wanted come along, in
    the order in which they came, with what was said of them."""

    kept: bool = False
    memories: int = 0
    places: Places = ()
    error: str = ""


_Message = TypeVar("_Message")


def keeper_line(message: KeeperHello | KeeperReply) -> bytes:
    """Encodes one message as one line of JSON."""
    return msgspec.json.encode(message) + b"\n"


def keeper_hello_from_line(line: bytes) -> KeeperHello:
    """Reads a node's line."""
    return _decode(line, KeeperHello)


def keeper_reply_from_line(line: bytes) -> KeeperReply:
    """Reads the keeper's answer."""
    return _decode(line, KeeperReply)


def _decode(line: bytes, kind: type[_Message]) -> _Message:
    try:
        check_line(msgspec.json.decode(line))
        return msgspec.json.decode(line, type=kind)
    except ValueError as error:
        raise InvalidRequest(f"a pool's keeper speaks one line of JSON; this one is wrong: {error}") from None
