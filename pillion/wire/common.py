"""Makes and checks the hello between two components, and the rule for different versions that it carries."""

from __future__ import annotations

from pillion._version import PROTOCOL, VERSION
from pillion.errors import Conflict
from pillion.v1 import common_pb2


def hello_to_pb(component_id: str) -> common_pb2.Hello:
    """Makes the hello of a component of this program."""
    return common_pb2.Hello(protocol=PROTOCOL, component_id=component_id, version=VERSION)


def check_hello(message: common_pb2.Hello) -> str:
    """Returns the sender's component id. Raises Conflict for a protocol that is too far from this program's."""
    check_protocol(message.protocol, message.component_id)
    return message.component_id


def check_protocol(protocol: int, component_id: str) -> None:
    """Raises Conflict unless the protocol of ``component_id`` is at most one version away from ours."""
    if protocol == 0 or abs(protocol - PROTOCOL) > 1:
        raise Conflict(
            f"{component_id or 'peer'} speaks protocol {protocol}, this component speaks {PROTOCOL}: "
            "upgrade one version at a time"
        )
