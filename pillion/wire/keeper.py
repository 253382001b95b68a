"""The messages of the socket of a pool's keeper: one line of JSON each way, beside which descriptors travel.

Readers raise InvalidRequest for a line that is not the message they expect, and Conflict for a foreign protocol.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from pillion._version import PROTOCOL, VERSION
from pillion.errors import InvalidRequest
from pillion.wire.common import check_protocol

MAX_KEEPER_LINE_BYTES = 1024
# A pool's memory and its table.
KEPT_DESCRIPTORS = 2

KeeperAction = Annotated[str, Meta(pattern=r"^(keep|take)\Z")]
KeptName = Annotated[str, Meta(min_length=1, max_length=256)]


class KeeperHello(msgspec.Struct, frozen=True, kw_only=True):
    """A node's only line.

    Attributes:
        action: "keep": the descriptors that come along are kept under ``name``, in place of those that are; "take":
            they are wanted.
        name: the node's.
    """

    action: KeeperAction
    name: KeptName
    protocol: int = PROTOCOL
    version: str = VERSION


class KeeperReply(msgspec.Struct, frozen=True, kw_only=True):
    """The keeper's answer. ``kept``: whether descriptors are kept under the name; those that are wanted come along."""

    kept: bool = False
    error: str = ""


_Message = TypeVar("_Message")


def keeper_line(message: KeeperHello | KeeperReply) -> bytes:
    """Encodes one message as one line of JSON."""
    return msgspec.json.encode(message) + b"\n"


def keeper_hello_from_line(line: bytes) -> KeeperHello:
    """Reads a node's line."""
    hello = _decode(line, KeeperHello)
    check_protocol(hello.protocol, hello.name)
    return hello


def keeper_reply_from_line(line: bytes) -> KeeperReply:
    """Reads the keeper's answer."""
    return _decode(line, KeeperReply)


def _decode(line: bytes, kind: type[_Message]) -> _Message:
    try:
        return msgspec.json.decode(line, type=kind)
    except ValueError as error:
        raise InvalidRequest(f"a pool's keeper speaks one line of JSON; this one is wrong: {error}") from None
