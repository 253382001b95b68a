"""Serves the gRPC calls that warm prompts, and that list and drop prefix pins."""

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
    """Returns the gRPC calls about prefix pins by their names."""
    calls = PrefixCalls(gateway)
    return {
        "WarmPrefix": GrpcCall(calls.warm, raw=True),
        "ListPrefixes": GrpcCall(calls.prefixes),
        "DropPrefix": GrpcCall(calls.drop),
    }


class PrefixCalls:
    """Serves the gRPC calls about prefix pins."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._pins = PrefixPins(gateway)

    async def warm(self, request: bytes, context: Any) -> gateway_pb2.WarmPrefixResponse:
        """Computes a prompt ahead, and pins it; the call's end cancels what is left of that work. The ``request`` is a
        serialized WarmPrefixRequest."""
        tenant = caller(self._gateway, context)
        asked, prompt = await self._gateway.off_loop(tenant, len(request), read_warm, request)
        warmed = await self._pins.warm(
            prompt,
            tenant,
            pin=asked.pin,
            name=asked.name,
            ttl_s=asked.ttl_s,
            timeout_s=timeout_of(context),
            parent=telemetry.extract(context.invocation_metadata()),
        )
        return warmed_to_pb(warmed)

    async def prefixes(
        self, request: gateway_pb2.ListPrefixesRequest, context: Any
    ) -> gateway_pb2.ListPrefixesResponse:
        """Lists the tenant's prefix pins."""
        pins = await self._pins.pins(caller(self._gateway, context))
        return gateway_pb2.ListPrefixesResponse(pins=map(pin_to_pb, pins))

    async def drop(self, request: gateway_pb2.DropPrefixRequest, context: Any) -> gateway_pb2.DropPrefixResponse:
        """Ends a prefix pin of the tenant."""
        await self._pins.drop(request.name, caller(self._gateway, context))
        return gateway_pb2.DropPrefixResponse()


def read_warm(raw: bytes) -> tuple[gateway_pb2.WarmPrefixRequest, GenerateRequest]:
    """Reads a serialized WarmPrefixRequest, and the prompt in it. Raises InvalidRequest."""
    check_warm_message(raw)
    asked = parsed(raw, gateway_pb2.WarmPrefixRequest)
    return asked, generate_of(asked.prompt)
