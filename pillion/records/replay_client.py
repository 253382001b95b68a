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
    """Result of a replay. ``same_prompt``: False if the gateway made another prompt of the messages than the recorded
    one; then there are no answers."""

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
        """Return the answers of model ``info`` to a ``bundle``'s request, up to the length of recorded unfinished ones.
        ``recorded``: request that the gateway records a bundle of the replay."""
        recorded_answers, replayed = bundle.answers, Replayed([ReplayedAnswer() for _ in bundle.answers])
        # Digest of the stream's origin if its prompt is the recorded one.
        digest = origin_digest(info.fingerprint, info.adapter, (), bundle.request.token_ids)
        # A unique salt, so that no cached KV is used.
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
                    answer = replayed.answers[delta.index]
                    answer.token_ids += delta.token_ids
                    answer.logprobs += delta.logprobs
                    if delta.finish_reason is not None:
                        answer.finish_reason = delta.finish_reason.value
                    replayed.timings = delta.timings or replayed.timings
                    done = all(new.covers(old) for new, old in zip(replayed.answers, recorded_answers, strict=True))
                    if done and not all(one.finish_reason for one in replayed.answers):
                        break
            finally:
                call.cancel()
        return replayed

    @contextlib.contextmanager
    def _errors(self) -> Any:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            failure = rpc.from_rpc_error(error)
            raise self._connection.explained(failure, failure, rpc.said_by_server(error), 0) from None


@contextlib.asynccontextmanager
async def replay_client(target: str = DEFAULT_TARGET, **reach: Any) -> AsyncIterator[ReplayClient]:
    """Connect to a gateway for a block; the arguments are those of :class:`pillion.AsyncClient`. Raises
    ConfigError."""
    connection = connect(target, **reach)
    async with connection.open_async() as channel:
        yield ReplayClient(connection, channel)
