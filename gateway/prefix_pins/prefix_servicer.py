"""gRPC methods that warm prompts, and list and drop prefix pins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pillion.gateway.gateway import Gateway
from pillion.gateway.grpc_api.gateway_servicer import GrpcCall, caller, generate_of, parsed, timeout_of
from pillion.gateway.prefix_pins.prefix_pins import PrefixPins
from pillion.gateway.request.validation import check_warm_message
from pillion.observability import telemetry
from pillion.types import GenerateRequest
from pillion.v1 import gateway_pb2
from pillion.wire.public import pin_to_pb, warmed_to_pb


def prefix_calls(gateway: Gateway) -> Mapping[str, GrpcCall]:
    """Return the gRPC methods of prefix pins, by name. The end of a call cancels its work."""
    pins = PrefixPins(gateway)

    async def warm(request: bytes, context: Any) -> gateway_pb2.WarmPrefixResponse:
        tenant = caller(gateway, context)
        message, prompt = await gateway.off_loop(tenant, len(request), _read_warm, request)
        warmed = await pins.warm(
            prompt,
            tenant,
            pin=message.pin,
            name=message.name,
            ttl_s=message.ttl_s,
            timeout_s=timeout_of(context),
            parent=telemetry.extract(context.invocation_metadata()),
        )
        return warmed_to_pb(warmed)

    async def prefixes(request: gateway_pb2.ListPrefixesRequest, context: Any) -> gateway_pb2.ListPrefixesResponse:
        listed = await pins.pins(caller(gateway, context))
        return gateway_pb2.ListPrefixesResponse(pins=map(pin_to_pb, listed))

    async def drop(request: gateway_pb2.DropPrefixRequest, context: Any) -> gateway_pb2.DropPrefixResponse:
        await pins.drop(request.name, caller(gateway, context))
        return gateway_pb2.DropPrefixResponse()

    return {"WarmPrefix": GrpcCall(warm, raw=True), "ListPrefixes": GrpcCall(prefixes), "DropPrefix": GrpcCall(drop)}


def _read_warm(raw: bytes) -> tuple[gateway_pb2.WarmPrefixRequest, GenerateRequest]:
    """Parse a serialized WarmPrefixRequest; return it with the request of its prompt. Raises InvalidRequest."""
    check_warm_message(raw)
    message = parsed(raw, gateway_pb2.WarmPrefixRequest)
    return message, generate_of(message.prompt)
