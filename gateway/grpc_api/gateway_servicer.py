"""Public gRPC service: checks API keys and converts messages for the gateway. Contains no policy."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from pillion.errors import InvalidRequest, PillionError, Unauthenticated
from pillion.gateway.admission.tenants import Tenant
from pillion.gateway.gateway import Gateway
from pillion.gateway.http_api.http_errors import from_pillion
from pillion.gateway.planning.forced_plan import parse_plan
from pillion.gateway.request.refusals import STRANGERS, Caller
from pillion.gateway.request.request_runner import RequestRunner
from pillion.gateway.request.validation import (
    MAX_TOKENS_HEADER,
    check_counts,
    check_generate_message,
    request_label,
)
from pillion.observability import telemetry
from pillion.types import GenerateRequest
from pillion.v1 import gateway_pb2, gateway_pb2_grpc
from pillion.wire.public import (
    PLAN_HEADER,
    RECORD_HEADER,
    DeltaWriter,
    delta_to_pb,
    model_to_pb,
    origin_to_pb,
    request_from_pb,
    status_to_pb,
)

M = TypeVar("M", bound=Message)

# Prefix of the methods that need a key; health and reflection need none.
_NEEDS_KEY = "/pillion.v1.Gateway/"
# Repeated fields of GenerateRequest whose items are counted.
_COUNTED = (
    "token_ids",
    "messages",
    "tools.tools",
    "resume.answers",
    "sampling.stop",
    "sampling.stop_token_ids",
    "sampling.logit_bias",
)


@dataclass(frozen=True, slots=True)
class GrpcCall:
    """Implementation of a method by a feature: a coroutine from message and context to the reply.

    Attributes:
        raw: whether it receives the serialized message, to count items before parsing.
    """

    serve: Callable[[Any, Any], Awaitable[Any]]
    raw: bool = False


class KeyCheck(grpc.aio.ServerInterceptor):
    """Interceptor that raises Unauthenticated for a call without a valid API key, before its message is parsed."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        if details.method.startswith(_NEEDS_KEY):
            metadata = details.invocation_metadata
            try:
                self._gateway.tenant_of(header(metadata, "authorization"))
            except Unauthenticated as error:
                record_refusal(self._gateway, details.method.removeprefix(_NEEDS_KEY), metadata, error)
                raise
        return await continuation(details)


class RawGenerate(grpc.aio.ServerInterceptor):
    """Interceptor that passes the messages of Generate and of the methods ``raw_calls`` on unparsed: their handlers
    count the items in a message before parsing it."""

    def __init__(self, raw_calls: Iterable[str]) -> None:
        self._raw_calls = {f"{_NEEDS_KEY}{name}" for name in raw_calls}

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if details.method in self._raw_calls:
            return grpc.unary_unary_rpc_method_handler(handler.unary_unary, None, handler.response_serializer)
        if details.method != f"{_NEEDS_KEY}Generate":
            return handler
        return grpc.unary_stream_rpc_method_handler(handler.unary_stream, None, handler.response_serializer)


class GatewayServicer(gateway_pb2_grpc.GatewayServicer):
    """Servicer of pillion.v1.Gateway.

    Args:
        calls: methods that features implement, by name.
    """

    def __init__(self, gateway: Gateway, calls: Mapping[str, GrpcCall]) -> None:
        self._gateway = gateway
        for name, call in calls.items():
            setattr(self, name, self._recording_refusals(name, call.serve))
        self.raw_calls = frozenset(name for name, call in calls.items() if call.raw)
        # Number of open streams: from the call until the last message was passed to the transport.
        self.streams = 0

    async def Generate(  # noqa: N802
        self, request: Any, context: Any
    ) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        """Stream an answer. If the call ends early, the request is cancelled.

        ``request``: a serialized GenerateRequest (see RawGenerate).
        """
        self.streams += 1
        try:
            runner = await self._recording_refusals("Generate", self._begin)(request, context)
            writer = DeltaWriter(runner.admitted.request_id)
            try:
                if runner.admitted.cut:
                    await context.send_initial_metadata(((MAX_TOKENS_HEADER, str(runner.admitted.max_tokens)),))
                # The first item is always a delta, or raises.
                first = delta_to_pb(await anext(runner))
                if (origin := runner.origin()) is not None:
                    first.origin.CopyFrom(origin_to_pb(origin))
                yield first
                async for delta in runner:
                    yield writer.to_pb(delta)
            finally:
                runner.cancel()
        finally:
            self.streams -= 1

    def _recording_refusals(self, name: str, serve: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """Wrap ``serve`` so that its refusals are recorded."""

        async def recording(request: Any, context: Any) -> Any:
            try:
                return await serve(request, context)
            except PillionError as error:
                record_refusal(self._gateway, name, context.invocation_metadata(), error)
                raise

        return recording

    async def _begin(self, request: bytes, context: Any) -> RequestRunner:
        metadata = context.invocation_metadata()
        tenant = self._gateway.tenant_of(header(metadata, "authorization"))
        plan = None
        if plan_text := header(metadata, PLAN_HEADER):
            self._gateway.operators_only(tenant)
            plan = parse_plan(plan_text)
        generate = await self._gateway.off_loop(tenant, len(request), read_generate, request)
        label = request_label(generate.request_id or header(metadata, "x-request-id"))
        # Set early, so that it is sent however the call ends.
        context.set_trailing_metadata((("x-request-id", label),))
        runner = await self._gateway.generate(
            replace(generate, request_id=label),
            tenant=tenant,
            timeout_s=timeout_of(context),
            parent=telemetry.extract(metadata),
            recorded=header(metadata, RECORD_HEADER) == "1",
            plan=plan,
        )
        context.add_done_callback(lambda _: runner.cancel())
        return runner

    async def ListModels(  # noqa: N802
        self, request: gateway_pb2.ListModelsRequest, context: Any
    ) -> gateway_pb2.ListModelsResponse:
        """Return the models that live workers serve, and their adapters."""
        tenant = caller(self._gateway, context)
        return gateway_pb2.ListModelsResponse(models=[model_to_pb(info) for info in self._gateway.models(tenant)])

    async def GetStatus(  # noqa: N802
        self, request: gateway_pb2.GetStatusRequest, context: Any
    ) -> gateway_pb2.GetStatusResponse:
        """Return the cluster's components and the gateways' totals."""
        return status_to_pb(self._gateway.status(caller(self._gateway, context)))


def record_refusal(gateway: Gateway, name: str, metadata: Any, error: PillionError) -> None:
    """Record that a call of method ``name`` is answered with an error."""
    tenant = STRANGERS
    with contextlib.suppress(Unauthenticated):
        tenant = gateway.find_tenant(header(metadata, "authorization")).name
    caller = Caller(f"gRPC {name}", tenant, header(metadata, "user-agent"))
    response = from_pillion(error, {})
    request_id = request_label(header(metadata, "x-request-id"))
    parent = telemetry.extract(metadata)
    reason = response.code or response.kind
    gateway.refusals.refused(caller, response.status, reason, response.param or "", request_id, parent)


def read_generate(raw: bytes) -> GenerateRequest:
    """Parse and convert a serialized GenerateRequest. Raises InvalidRequest."""
    check_generate_message(raw)
    return generate_of(parsed(raw, gateway_pb2.GenerateRequest))


def parsed(raw: bytes, kind: type[M]) -> M:
    """Parse a serialized message. Raises InvalidRequest."""
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise InvalidRequest(f"the message cannot be read: {str(error)[:200]}") from None


def generate_of(message: gateway_pb2.GenerateRequest) -> GenerateRequest:
    """Convert a message to the gateway's request. Raises InvalidRequest for too many items."""
    check_counts({name: len(attrgetter(name)(message)) for name in _COUNTED})
    check_counts({"resume.answers.token_ids": sum(len(one.token_ids) for one in message.resume.answers)})
    return request_from_pb(message)


def caller(gateway: Gateway, context: Any) -> Tenant:
    """Return the tenant of a call. Raises Unauthenticated."""
    return gateway.tenant_of(header(context.invocation_metadata(), "authorization"))


def timeout_of(context: Any) -> float | None:
    """Return the seconds until a call's deadline, None without one."""
    left_s = context.time_remaining()
    # gRPC may report centuries for a call without a deadline; more than 10 years count as none.
    return None if left_s is None or left_s > 10 * 365 * 86_400.0 else float(left_s)


def header(metadata: Any, name: str) -> str:
    """Return the first value of ``name`` in a call's metadata, or ""."""
    for key, value in metadata or ():
        if key == name:
            return value if isinstance(value, str) else ""
    return ""
