"""The gRPC calls that load, unload and list adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pillion.gateway.gateway import Gateway
from pillion.gateway.grpc_api.gateway_servicer import GrpcCall, caller
from pillion.v1 import gateway_pb2
from pillion.wire.public import model_to_pb


def adapter_calls(gateway: Gateway) -> Mapping[str, GrpcCall]:
    """Return the gRPC calls about adapters, by name."""

    async def load(request: gateway_pb2.LoadAdapterRequest, context: Any) -> gateway_pb2.Model:
        info = await gateway.load_adapter(
            caller(gateway, context), request.name, request.path, in_place=request.in_place, model=request.model
        )
        return model_to_pb(info)

    async def unload(request: gateway_pb2.UnloadAdapterRequest, context: Any) -> gateway_pb2.UnloadAdapterResponse:
        await gateway.unload_adapter(caller(gateway, context), request.name)
        return gateway_pb2.UnloadAdapterResponse()

    return {"LoadAdapter": GrpcCall(load), "UnloadAdapter": GrpcCall(unload)}
