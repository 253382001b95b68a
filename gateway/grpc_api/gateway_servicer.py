"""The public gRPC service: converters around :class:`pillion.gateway.gateway.Gateway`, no policy."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from pillion.gateway.gateway import Gateway
from pillion.gateway.grpc_api.key_check import authorization
from pillion.gateway.request.validation import check_counts, check_size, is_request_id
from pillion.observability import telemetry
from pillion.v1 import gateway_pb2, gateway_pb2_grpc
from pillion.wire.public import DeltaWriter, model_to_pb, request_from_pb, status_to_pb

# gRPC says "no deadline" by one that is centuries away.
MAX_DEADLINE_S = 10 * 365 * 86_400.0


class GatewayServicer(gateway_pb2_grpc.GatewayServicer):
    """pillion.v1.Gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        # Streams whose last message has not been given to the transport.
        self.streams = 0

    async def Generate(  # noqa: N802
        self, request: gateway_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        """The stream; the call's end, however it comes, cancels what is left of the request."""
        tenant = self._gateway.tenant_of(authorization(context.invocation_metadata()))
        sampling = request.sampling
        check_size(request.ByteSize())
        check_counts(
            {
                "token_ids": len(request.token_ids),
                "messages": len(request.messages),
                "sampling.stop": len(sampling.stop),
                "sampling.stop_token_ids": len(sampling.stop_token_ids),
                "sampling.logit_bias": len(sampling.logit_bias),
            }
        )
        asked = request_from_pb(request)
        label = asked.request_id or _header(context, "x-request-id") or f"req-{secrets.token_hex(12)}"
        if is_request_id(label):
            # With every end of the call. A bad one is refused, and repeated nowhere.
            context.set_trailing_metadata((("x-request-id", label),))
        generation = await self._gateway.generate(
            replace(asked, request_id=label),
            tenant=tenant,
            timeout_s=_timeout_s(context),
            parent=telemetry.extract(context.invocation_metadata()),
        )
        self.streams += 1
        context.add_done_callback(lambda _: generation.cancel())
        writer = DeltaWriter(generation.job.request_id)
        try:
            async for delta in generation:
                yield writer.to_pb(delta)
        finally:
            self.streams -= 1
            generation.cancel()

    async def ListModels(  # noqa: N802
        self, request: gateway_pb2.ListModelsRequest, context: Any
    ) -> gateway_pb2.ListModelsResponse:
        """Models that live workers serve."""
        return gateway_pb2.ListModelsResponse(models=[model_to_pb(info) for info in self._gateway.models()])

    async def GetStatus(  # noqa: N802
        self, request: gateway_pb2.GetStatusRequest, context: Any
    ) -> gateway_pb2.GetStatusResponse:
        """Parts and totals."""
        tenant = self._gateway.tenant_of(authorization(context.invocation_metadata()))
        return status_to_pb(self._gateway.status(tenant))


def _timeout_s(context: Any) -> float | None:
    left = context.time_remaining()
    return None if left is None or left > MAX_DEADLINE_S else float(left)


def _header(context: Any, wanted: str) -> str:
    for name, value in context.invocation_metadata() or ():
        if name == wanted:
            return value if isinstance(value, str) else ""
    return ""
