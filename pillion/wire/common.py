"""Makes and checks the hello between two components, and the rule for different versions that it carries; and makes the
message that says whose a request is."""

from __future__ import annotations

from pillion._version import PROTOCOL, VERSION
from pillion.errors import Conflict
from pillion.rules.priority import Flow
from pillion.v1 import common_pb2


def hello_to_pb(component_id: str) -> common_pb2.Hello:
    """Makes the hello of a component of this program."""
    return common_pb2.Hello(protocol=PROTOCOL, component_id=component_id, version=VERSION)


def flow_to_pb(flow: Flow) -> common_pb2.Flow | None:
    """Makes the message of a request's flow, or returns None where tenants are not told apart."""
    return common_pb2.Flow(key=flow.key, weight=flow.weight) if flow.key else None


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
