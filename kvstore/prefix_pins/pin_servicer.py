"""The KV node's gRPC calls for prefix pins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pillion.kvstore.prefix_pins.node_pins import NodePrefixPins
from pillion.v1 import kvnode_pb2 as pb


def pin_calls(pins: NodePrefixPins) -> Mapping[str, Callable[[Any, Any], Any]]:
    """Return the handlers of the calls for prefix pins by method name."""

    async def pin(request: pb.PinPrefixRequest, context: Any) -> pb.PrefixPin:
        return pins.pin_prefix(request)

    async def unpin(request: pb.UnpinPrefixRequest, context: Any) -> pb.UnpinPrefixReply:
        return pb.UnpinPrefixReply(found=pins.drop(request))

    async def list_pins(request: pb.ListPrefixPinsRequest, context: Any) -> pb.ListPrefixPinsReply:
        return pins.list_pins(request)

    return {"PinPrefix": pin, "UnpinPrefix": unpin, "ListPrefixPins": list_pins}
