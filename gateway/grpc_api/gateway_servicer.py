"""The public gRPC service: the check of keys, and converters around the gateway. No policy."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from pillion.errors import InvalidRequest
from pillion.gateway.admission.tenants import Tenant
from pillion.gateway.gateway import Gateway
from pillion.gateway.prefixes.prefix_pins import PrefixPins
from pillion.gateway.request.message_bounds import check_generate_message, check_warm_message
from pillion.gateway.request.runner import Generation
from pillion.gateway.request.validation import MAX_TOKENS_HEADER, check_counts, is_request_id
from pillion.observability import telemetry
from pillion.types import GenerateRequest
from pillion.v1 import gateway_pb2, gateway_pb2_grpc
from pillion.wire.public import (
    DeltaWriter,
    delta_to_pb,
    model_to_pb,
    origin_to_pb,
    pin_to_pb,
    request_from_pb,
    status_to_pb,
    warmed_to_pb,
)

M = TypeVar("M", bound=Message)

# Without a deadline, gRPC gives one that is centuries away.
MAX_DEADLINE_S = 10 * 365 * 86_400.0
# Health and reflection are open to everybody.
_NEEDS_KEY = "/pillion.v1.Gateway/"
_GENERATE = "/pillion.v1.Gateway/Generate"
_WARM = "/pillion.v1.Gateway/WarmPrefix"
_COUNTED = (
    "token_ids",
    "messages",
    "tools.tools",
    "resume.answers",
    "sampling.stop",
    "sampling.stop_token_ids",
    "sampling.logit_bias",
)


class KeyCheck(grpc.aio.ServerInterceptor):
    """Raises Unauthenticated for a call that needs a key and has none, before its message is read. ``tenant_of`` judges
    an Authorization header."""

    def __init__(self, tenant_of: Callable[[str], Tenant]) -> None:
        self._tenant_of = tenant_of

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        if details.method.startswith(_NEEDS_KEY):
            self._tenant_of(_header(details.invocation_metadata, "authorization"))
        return await continuation(details)


class RawGenerate(grpc.aio.ServerInterceptor):
    """Hands the messages of Generate and WarmPrefix on as bytes: the servicer counts what they hold before it reads
    them."""

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if details.method == _WARM:
            return grpc.unary_unary_rpc_method_handler(handler.unary_unary, None, handler.response_serializer)
        if details.method != _GENERATE:
            return handler
        return grpc.unary_stream_rpc_method_handler(handler.unary_stream, None, handler.response_serializer)


class GatewayServicer(gateway_pb2_grpc.GatewayServicer):
    """Serves pillion.v1.Gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._prefixes = PrefixPins(gateway)
        # Streams from their calls to their last messages, which have been given to the transport then.
        self.streams = 0

    async def Generate(  # noqa: N802
        self, request: Any, context: Any
    ) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        """Streams an answer; the call's end, however it comes, cancels what is left of the request. The ``request`` is
        a serialized GenerateRequest, as RawGenerate hands it on."""
        self.streams += 1
        try:
            generation = await self._begin(request, context)
            writer = DeltaWriter(generation.job.request_id)
            try:
                resolved = generation.job.resolved
                if resolved.cut:
                    await context.send_initial_metadata(((MAX_TOKENS_HEADER, str(resolved.max_tokens)),))
                # There is always a first delta, or an error.
                first = delta_to_pb(await anext(generation))
                if (origin := generation.origin()) is not None:
                    first.origin.CopyFrom(origin_to_pb(origin))
                yield first
                async for delta in generation:
                    yield writer.to_pb(delta)
            finally:
                generation.cancel()
        finally:
            self.streams -= 1

    async def _begin(self, request: bytes, context: Any) -> Generation:
        """The request of a Generate call, admitted."""
        metadata = context.invocation_metadata()
        tenant = self._gateway.tenant_of(_header(metadata, "authorization"))
        generate = await self._gateway.off_loop(tenant, len(request), read_generate, request)
        label = generate.request_id or _header(metadata, "x-request-id") or f"req-{secrets.token_hex(12)}"
        if is_request_id(label):
            # It is sent however the call ends. A bad one is refused, and repeated nowhere.
            context.set_trailing_metadata((("x-request-id", label),))
        generation = await self._gateway.generate(
            replace(generate, request_id=label),
            tenant=tenant,
            timeout_s=_timeout_s(context),
            parent=telemetry.extract(metadata),
        )
        context.add_done_callback(lambda _: generation.cancel())
        return generation

    async def ListModels(  # noqa: N802
        self, request: gateway_pb2.ListModelsRequest, context: Any
    ) -> gateway_pb2.ListModelsResponse:
        """The models that live workers serve, and their adapters."""
        tenant = self._tenant(context)
        return gateway_pb2.ListModelsResponse(models=[model_to_pb(info) for info in self._gateway.models(tenant)])

    async def LoadAdapter(  # noqa: N802
        self, request: gateway_pb2.LoadAdapterRequest, context: Any
    ) -> gateway_pb2.Model:
        """Gives a name to an adapter."""
        info = await self._gateway.load_adapter(
            self._tenant(context), request.name, request.path, in_place=request.in_place, model=request.model
        )
        return model_to_pb(info)

    async def UnloadAdapter(  # noqa: N802
        self, request: gateway_pb2.UnloadAdapterRequest, context: Any
    ) -> gateway_pb2.UnloadAdapterResponse:
        """Takes the name of an adapter away."""
        await self._gateway.unload_adapter(self._tenant(context), request.name)
        return gateway_pb2.UnloadAdapterResponse()

    async def WarmPrefix(  # noqa: N802
        self, request: Any, context: Any
    ) -> gateway_pb2.WarmPrefixResponse:
        """Computes a prompt ahead, and pins it; the call's end cancels what is left of that. The ``request`` is a
        serialized WarmPrefixRequest, as RawGenerate hands it on."""
        metadata = context.invocation_metadata()
        tenant = self._tenant(context)
        asked, prompt = await self._gateway.off_loop(tenant, len(request), read_warm, request)
        warmed = await self._prefixes.warm(
            prompt,
            tenant,
            pin=asked.pin,
            name=asked.name,
            ttl_s=asked.ttl_s,
            timeout_s=_timeout_s(context),
            parent=telemetry.extract(metadata),
        )
        return warmed_to_pb(warmed)

    async def ListPrefixes(  # noqa: N802
        self, request: gateway_pb2.ListPrefixesRequest, context: Any
    ) -> gateway_pb2.ListPrefixesResponse:
        """The tenant's pins."""
        pins = await self._prefixes.pins(self._tenant(context))
        return gateway_pb2.ListPrefixesResponse(pins=map(pin_to_pb, pins))

    async def DropPrefix(  # noqa: N802
        self, request: gateway_pb2.DropPrefixRequest, context: Any
    ) -> gateway_pb2.DropPrefixResponse:
        """Ends a pin of the tenant."""
        await self._prefixes.drop(request.name, self._tenant(context))
        return gateway_pb2.DropPrefixResponse()

    async def GetStatus(  # noqa: N802
        self, request: gateway_pb2.GetStatusRequest, context: Any
    ) -> gateway_pb2.GetStatusResponse:
        """Components and totals."""
        return status_to_pb(self._gateway.status(self._tenant(context)))

    def _tenant(self, context: Any) -> Tenant:
        return self._gateway.tenant_of(_header(context.invocation_metadata(), "authorization"))


def read_generate(raw: bytes) -> GenerateRequest:
    """Reads a serialized GenerateRequest. Raises InvalidRequest."""
    check_generate_message(raw)
    return _generate_of(_parsed(raw, gateway_pb2.GenerateRequest))


def read_warm(raw: bytes) -> tuple[gateway_pb2.WarmPrefixRequest, GenerateRequest]:
    """Reads a serialized WarmPrefixRequest, and the prompt in it. Raises InvalidRequest."""
    check_warm_message(raw)
    asked = _parsed(raw, gateway_pb2.WarmPrefixRequest)
    return asked, _generate_of(asked.prompt)


def _parsed(raw: bytes, kind: type[M]) -> M:
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise InvalidRequest(f"the message cannot be read: {str(error)[:200]}") from None


def _generate_of(message: gateway_pb2.GenerateRequest) -> GenerateRequest:
    check_counts({name: len(attrgetter(name)(message)) for name in _COUNTED})
    check_counts({"resume.answers.token_ids": sum(len(one.token_ids) for one in message.resume.answers)})
    return request_from_pb(message)


def _timeout_s(context: Any) -> float | None:
    left = context.time_remaining()
    return None if left is None or left > MAX_DEADLINE_S else float(left)


def _header(metadata: Any, wanted: str) -> str:
    """The first value of ``wanted`` in a call's metadata, "" where there is none."""
    for name, value in metadata or ():
        if name == wanted:
            return value if isinstance(value, str) else ""
    return ""
