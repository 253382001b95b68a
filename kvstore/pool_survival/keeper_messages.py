"""Defines the messages on the socket of a pool's keeper: lines of JSON, with which descriptors travel.

Readers raise InvalidRequest for a line that is not the message they expect, and Conflict for a foreign protocol.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pillion._version import PROTOCOL, VERSION
from pillion.wire.json_lines import message_of

MAX_KEEPER_LINE_BYTES = 8192
# A pool in host memory is kept as two memories: its own and its table's.
MIN_KEPT_MEMORIES = 2
# At most this many processes are kept with a pool on a GPU. They go in one message with the pool's memories, and Linux
# passes on 253 descriptors at most.
MAX_KEPT_PROCESSES = 200
# A pool on GPUs is kept as at most this many memories: those of its shards, the file of its places, and its table.
MAX_KEPT_MEMORIES = 18

KeeperAction = Annotated[str, Meta(pattern=r"^(keep|take|drop)\Z")]
Places = Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=MAX_KEPT_PROCESSES)]
KeptName = Annotated[str, Meta(min_length=1, max_length=256)]


class KeeperHello(msgspec.Struct, frozen=True, kw_only=True):
    """Represents the only line that a node sends to its keeper.

    Attributes:
        action: "keep" has the keeper hold the descriptors that come along, in place of those it has under ``name``;
            "take" asks for those; "drop" has it close them.
        name: the node's name.
        places: places of the pool. The last descriptors that come along are of processes, one for each place.
        memories: how many descriptors come before those of processes.
    """

    action: KeeperAction
    name: KeptName
    memories: Annotated[int, Meta(ge=0, le=MAX_KEPT_MEMORIES)] = 0
    places: Places = ()
    protocol: int = PROTOCOL
    version: str = VERSION


class KeeperReply(msgspec.Struct, frozen=True, kw_only=True):
    """Represents the keeper's answer. ``kept`` says whether it keeps descriptors under the name. The descriptors that
    were asked for come along, in the order in which they came, with their ``places`` and ``memories``."""

    kept: bool = False
    memories: int = 0
    places: Places = ()
    error: str = ""


def keeper_hello_from_line(line: bytes) -> KeeperHello:
    """Reads a node's line."""
    return message_of(line, KeeperHello, "a pool's keeper")


def keeper_reply_from_line(line: bytes) -> KeeperReply:
    """Reads the keeper's answer."""
    return message_of(line, KeeperReply, "a pool's keeper")
