"""Messages on the socket of a pool's keeper: lines of JSON with attached descriptors.

Decoding raises InvalidRequest for an unexpected message, and Conflict for a foreign protocol.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pillion._version import PROTOCOL, VERSION
from pillion.kvstore.memory.head_shares import MAX_SHARDS
from pillion.wire.json_lines import message_of

MAX_KEEPER_LINE_BYTES = 8192
# Descriptors of a pool besides its shards on GPUs: the file with its places, and its table.
MIN_KEPT_MEMORIES = 2
# Max processes per pool on GPUs. Their pidfds are sent in one message with the pool's memory fds, and Linux allows 253
# fds per message.
MAX_KEPT_PROCESSES = 200
MAX_KEPT_MEMORIES = MAX_SHARDS + MIN_KEPT_MEMORIES

KeeperAction = Annotated[str, Meta(pattern=r"^(keep|take|drop)\Z")]
Places = Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=MAX_KEPT_PROCESSES)]
KeptName = Annotated[str, Meta(min_length=1, max_length=256)]


class KeeperHello(msgspec.Struct, frozen=True, kw_only=True):
    """The only line that a node sends to its keeper.

    Attributes:
        action: "keep" replaces the descriptors stored under ``name`` by the attached ones; "take" requests them; "drop"
            closes them.
        name: the node's id.
        places: places of the pool's processes, whose pidfds are the last attached descriptors, in this order.
        memories: number of attached descriptors of memory, which precede the pidfds.
    """

    action: KeeperAction
    name: KeptName
    memories: Annotated[int, Meta(ge=0, le=MAX_KEPT_MEMORIES)] = 0
    places: Places = ()
    protocol: int = PROTOCOL
    version: str = VERSION


class KeeperReply(msgspec.Struct, frozen=True, kw_only=True):
    """The keeper's answer. ``kept`` is True if it stores descriptors under the name. Requested descriptors are attached
    in their original order, with their ``places`` and ``memories``."""

    kept: bool = False
    memories: int = 0
    places: Places = ()
    error: str = ""


def keeper_hello_from_line(line: bytes) -> KeeperHello:
    return message_of(line, KeeperHello, "a pool's keeper")


def keeper_reply_from_line(line: bytes) -> KeeperReply:
    return message_of(line, KeeperReply, "a pool's keeper")
