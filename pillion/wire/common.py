"""The hello between two components, and the rule for version skew that it carries."""

from __future__ import annotations

from pillion._version import PROTOCOL, VERSION
from pillion.errors import Conflict
from pillion.v1 import common_pb2


def hello_to_pb(component_id: str) -> common_pb2.Hello:
    """The hello of a component of this program."""
    return common_pb2.Hello(protocol=PROTOCOL, component_id=component_id, version=VERSION)


def check_hello(message: common_pb2.Hello) -> str:
    """The sender's component id. Raises Conflict for a protocol that is too far from ours."""
    check_protocol(message.protocol, message.component_id)
    return message.component_id


def check_line(fields: object) -> None:
    """Raises Conflict for a message in JSON that was written in a protocol too far from ours. It is called before the
    other fields are looked at: their names and types are the protocol's."""
    if isinstance(fields, dict) and isinstance(fields.get("protocol"), int):
        names = (fields.get(name) for name in ("component_id", "node_id", "name"))
        check_protocol(fields["protocol"], next((name for name in names if name and isinstance(name, str)), ""))


def check_protocol(protocol: int, component_id: str) -> None:
    """Raises Conflict unless the protocol of ``component_id`` is at most one version away from ours."""
    if protocol == 0 or abs(protocol - PROTOCOL) > 1:
        raise Conflict(
            f"{component_id or 'peer'} speaks protocol {protocol}, this component speaks {PROTOCOL}: "
            "upgrade one version at a time"
        )
