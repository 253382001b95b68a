"""Requests the answers of a bundle again from a gateway, over gRPC."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc.aio

from pillion.client.async_client import DEFAULT_TARGET, UNARY_TIMEOUT_S
from pillion.client.client_requests import to_pb
from pillion.client.connection import GatewayConnection, connect
from pillion.net import rpc
from pillion.records.bundle import Bundle
from pillion.records.comparison import ReplayedAnswer
from pillion.types import GenerateRequest, ModelInfo, Timings
from pillion.v1 import gateway_pb2, gateway_pb2_grpc
from pillion.wire.public import RECORD_HEADER, delta_from_pb, model_from_pb, origin_digest


@dataclass(slots=True)
class Replayed:
    """The result of a replay. If ``same_prompt`` is false, the gateway makes another prompt of the request's messages,
    and there are no answers."""

    answers: list[ReplayedAnswer]
    timings: Timings | None = None
    same_prompt: bool = True


class ReplayClient:
    """A client of one gateway, within an event loop. Calls raise PillionError."""

    def __init__(self, connection: GatewayConnection, channel: grpc.aio.Channel) -> None:
        self._connection = connection
        self._stub: Any = gateway_pb2_grpc.GatewayStub(channel)

    async def models(self) -> list[ModelInfo]:
        """Return the models that the gateway serves."""
        with self._errors():
            asked = self._stub.ListModels(
                gateway_pb2.ListModelsRequest(), timeout=UNARY_TIMEOUT_S, metadata=self._connection.metadata()
            )
            return [model_from_pb(model) for model in (await asked).models]

    async def answer(
        self,
        request: GenerateRequest,
        bundle: Bundle,
        info: ModelInfo,
        timeout_s: float | None = None,
        *,
        recorded: bool = False,
    ) -> Replayed:
        """Return the answers that model ``info`` gives to a ``bundle``'s request, as far as the recorded ones go.
        ``recorded`` asks the gateway to record a bundle of its own."""
        then, found = bundle.answers, Replayed([ReplayedAnswer() for _ in bundle.answers])
        # The stream's origin has this digest if the gateway makes the recorded prompt.
        digest = origin_digest(info.fingerprint, info.adapter, (), bundle.request.token_ids)
        # A unique salt makes the gateway compute the whole prompt, whatever it has cached.
        message = to_pb(request)
        message.cache_salt = secrets.token_hex(16)
        with self._errors():
            asked = [(RECORD_HEADER, "1")] if recorded else []
            metadata = self._connection.metadata() + asked
            call = self._stub.Generate(message, timeout=timeout_s, metadata=metadata)
            try:
                async for part in call:
                    if part.HasField("origin") and part.origin.digest != digest:
                        return Replayed([], same_prompt=False)
                    delta = delta_from_pb(part)
                    answer = found.answers[delta.index]
                    answer.token_ids += delta.token_ids
                    answer.logprobs += delta.logprobs
                    if delta.finish_reason is not None:
                        answer.finish_reason = delta.finish_reason.value
                    found.timings = delta.timings or found.timings
                    done = all(new.covers(old) for new, old in zip(found.answers, then, strict=True))
                    if done and not all(one.finish_reason for one in found.answers):
                        break
            finally:
                call.cancel()
        return found

    @contextlib.contextmanager
    def _errors(self) -> Any:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            told = rpc.from_rpc_error(error)
            raise self._connection.explained(told, told, rpc.said_by_server(error), 0) from None


@contextlib.asynccontextmanager
async def replay_client(target: str = DEFAULT_TARGET, **reach: Any) -> AsyncIterator[ReplayClient]:
    """Connect to a gateway for a block; the arguments are those of :class:`pillion.AsyncClient`. Raises
    ConfigError."""
    connection = connect(target, **reach)
    async with connection.open_async() as channel:
        yield ReplayClient(connection, channel)
