"""The SDK: :class:`Client` and :class:`AsyncClient`, the same calls blocking and not.

    from pillion import Client

    with Client("127.0.0.1:50051") as client:
        for delta in client.chat([{"role": "user", "content": "Hello!"}], max_tokens=64):
            print(delta.text, end="", flush=True)

Several answers to one prompt come mixed; ``delta.index`` says which one a delta continues:

    texts = ["", "", ""]
    for delta in client.generate("Once upon a time", n=3, max_tokens=64):
        texts[delta.index] += delta.text

Leaving an iteration early (``break``, ``close()``, an exception) cancels the request, and everything that worked for it
is freed. Errors are those of :mod:`pillion.errors`. A call made inside an OpenTelemetry span carries its context along.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import grpc
import grpc.aio

from pillion import rpc, telemetry
from pillion.errors import InvalidRequest
from pillion.types import ChatMessage, ClusterStatus, Delta, GenerateRequest, ModelInfo, SamplingParams
from pillion.v1 import gateway_pb2, gateway_pb2_grpc
from pillion.wire.public import delta_from_pb, model_from_pb, request_to_pb, status_from_pb

DEFAULT_TARGET = "127.0.0.1:50051"
# For models() and status(); a stream takes as long as its caller allows.
UNARY_TIMEOUT_S = 10.0

Prompt = str | Sequence[int]
Message = ChatMessage | Mapping[str, str]


class Client:
    """A blocking client of one gateway. Thread-safe; streams may run side by side.

    Args:
        target: ``host:port`` or ``unix:path`` of the gateway's gRPC port.
    """

    def __init__(self, target: str = DEFAULT_TARGET) -> None:
        self._channel = rpc.sync_channel(target)
        self._stub: Any = gateway_pb2_grpc.GatewayStub(self._channel)

    def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        sampling: SamplingParams | None = None,
        cache_salt: str = "",
        request_id: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> Generator[Delta, None, None]:
        """Streams a completion of ``prompt``: text, or token ids.

        With ``n`` > 1 the deltas of all answers come mixed, each with its ``index``, and each answer's last one has a
        finish reason. With ``best_of`` > ``n`` everything comes at the end, the best answer as index 0. Usage and
        timings are in the very last delta.

        Args:
            model: served name; may be left out where one model is served.
            sampling: how tokens are chosen. Its fields may be given by keyword instead: ``temperature=0``.
            cache_salt: only requests with the same salt share KV.
            request_id: a label for logs and traces.
            priority: smaller is more urgent, from -100 to 100; who waits gains urgency with time.
            timeout_s: time for the whole stream; None for no limit.

        Raises:
            PillionError: one of its subclasses, from here or from the iteration.
            TypeError: an unknown keyword, or ``sampling`` and keywords together.
        """
        request = _request(prompt, model, sampling, cache_salt, request_id, priority, fields)
        return self._stream(request, timeout_s)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        model: str = "",
        sampling: SamplingParams | None = None,
        cache_salt: str = "",
        request_id: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> Generator[Delta, None, None]:
        """Streams the assistant's next message; ``messages`` as ChatMessage or as ``{"role": ..., "content": ...}``.

        The rest is as in :meth:`generate`.
        """
        request = _chat_request(messages, model, sampling, cache_salt, request_id, priority, fields)
        return self._stream(request, timeout_s)

    def models(self) -> list[ModelInfo]:
        """Models that live workers serve. Raises PillionError."""
        reply = self._unary(self._stub.ListModels, gateway_pb2.ListModelsRequest())
        return [model_from_pb(model) for model in reply.models]

    def status(self) -> ClusterStatus:
        """Parts, their load, and totals. Raises PillionError."""
        return status_from_pb(self._unary(self._stub.GetStatus, gateway_pb2.GetStatusRequest()))

    def close(self) -> None:
        """Ends the connection, and with it all streams of this client."""
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stream(self, request: gateway_pb2.GenerateRequest, timeout_s: float | None) -> Generator[Delta, None, None]:
        call = self._stub.Generate(request, timeout=timeout_s, metadata=telemetry.inject())
        return _deltas(call)

    def _unary(self, method: Any, message: Any) -> Any:
        try:
            return method(message, timeout=UNARY_TIMEOUT_S, metadata=telemetry.inject())
        except grpc.RpcError as error:
            raise rpc.from_rpc_error(error) from None


class AsyncClient:
    """The asyncio twin of :class:`Client`; one per event loop.

    Args:
        target: ``host:port`` or ``unix:path`` of the gateway's gRPC port.
    """

    def __init__(self, target: str = DEFAULT_TARGET) -> None:
        self._target = target
        self._channel: grpc.aio.Channel | None = None

    def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        sampling: SamplingParams | None = None,
        cache_salt: str = "",
        request_id: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> AsyncGenerator[Delta, None]:
        """As :meth:`Client.generate`, to be iterated with ``async for``."""
        request = _request(prompt, model, sampling, cache_salt, request_id, priority, fields)
        return self._stream(request, timeout_s)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        model: str = "",
        sampling: SamplingParams | None = None,
        cache_salt: str = "",
        request_id: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> AsyncGenerator[Delta, None]:
        """As :meth:`Client.chat`, to be iterated with ``async for``."""
        request = _chat_request(messages, model, sampling, cache_salt, request_id, priority, fields)
        return self._stream(request, timeout_s)

    async def models(self) -> list[ModelInfo]:
        """Models that live workers serve. Raises PillionError."""
        reply = await self._unary(self._stub().ListModels, gateway_pb2.ListModelsRequest())
        return [model_from_pb(model) for model in reply.models]

    async def status(self) -> ClusterStatus:
        """Parts, their load, and totals. Raises PillionError."""
        return status_from_pb(await self._unary(self._stub().GetStatus, gateway_pb2.GetStatusRequest()))

    async def close(self) -> None:
        """Ends the connection, and with it all streams of this client."""
        if self._channel is not None:
            await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _stub(self) -> Any:
        # A channel belongs to the loop that runs when it is made, so it is made with the first call.
        if self._channel is None:
            self._channel = rpc.open_channel(self._target)
        return gateway_pb2_grpc.GatewayStub(self._channel)

    def _stream(self, request: gateway_pb2.GenerateRequest, timeout_s: float | None) -> AsyncGenerator[Delta, None]:
        call = self._stub().Generate(request, timeout=timeout_s, metadata=telemetry.inject())
        return _async_deltas(call)

    async def _unary(self, method: Any, message: Any) -> Any:
        try:
            return await method(message, timeout=UNARY_TIMEOUT_S, metadata=telemetry.inject())
        except grpc.aio.AioRpcError as error:
            raise rpc.from_rpc_error(error) from None


def _deltas(call: Any) -> Generator[Delta, None, None]:
    try:
        for message in call:
            yield delta_from_pb(message)
    except grpc.RpcError as error:
        raise rpc.from_rpc_error(error) from None
    finally:
        call.cancel()


async def _async_deltas(call: Any) -> AsyncGenerator[Delta, None]:
    try:
        async for message in call:
            yield delta_from_pb(message)
    except grpc.aio.AioRpcError as error:
        raise rpc.from_rpc_error(error) from None
    finally:
        call.cancel()


def _request(
    prompt: Prompt,
    model: str,
    sampling: SamplingParams | None,
    cache_salt: str,
    request_id: str,
    priority: int,
    fields: dict[str, Any],
) -> gateway_pb2.GenerateRequest:
    is_text = isinstance(prompt, str)
    return _to_pb(
        GenerateRequest(
            model=model,
            text=str(prompt) if is_text else "",
            token_ids=() if is_text else tuple(prompt),  # type: ignore[arg-type]
            sampling=_sampling(sampling, fields),
            cache_salt=cache_salt,
            request_id=request_id,
            priority=priority,
        )
    )


def _chat_request(
    messages: Sequence[Message],
    model: str,
    sampling: SamplingParams | None,
    cache_salt: str,
    request_id: str,
    priority: int,
    fields: dict[str, Any],
) -> gateway_pb2.GenerateRequest:
    said = [m if isinstance(m, ChatMessage) else ChatMessage(**m) for m in messages]
    return _to_pb(
        GenerateRequest(
            model=model,
            messages=tuple(said),
            sampling=_sampling(sampling, fields),
            cache_salt=cache_salt,
            request_id=request_id,
            priority=priority,
        )
    )


def _sampling(sampling: SamplingParams | None, fields: dict[str, Any]) -> SamplingParams:
    if sampling is not None and fields:
        raise TypeError(f"give sampling or its fields by keyword, not both: {', '.join(sorted(fields))}")
    said = sampling if sampling is not None else SamplingParams(**fields)
    stop: Any = said.stop
    # Else every letter of it would be a stop string.
    return replace(said, stop=(stop,)) if isinstance(stop, str) else said


def _to_pb(request: GenerateRequest) -> gateway_pb2.GenerateRequest:
    try:
        return request_to_pb(request)
    except (ValueError, TypeError) as error:
        # A number that fits no field of the message never leaves this machine.
        raise InvalidRequest(str(error)) from None
