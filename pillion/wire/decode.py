"""The deltas of the decode service's steps, as gateways read them (protos/pillion/v1/decode.proto)."""

from __future__ import annotations

from typing import NamedTuple

from pillion.types import FinishReason, TokenLogprob
from pillion.v1 import decode_pb2
from pillion.v1.decode_pb2 import DecodeError, DecodeTimings
from pillion.wire.public import finish_from_pb, logprob_from_pb


class DecodeDelta(NamedTuple):
    """Tokens of one stream since its last delta; the last one has a finish reason or an error.

    One is made for every token of the whole cluster, and a tuple is made in a quarter of the time that a frozen
    dataclass takes.
    """

    key: int
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: DecodeError | None = None
    timings: DecodeTimings | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    # Set in a sign of life of a stream that waits: its place in line.
    queued: int | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    # How many streams a connection had that broke; 0 where the worker itself sent the error.
    broken: int = 0


def batch_from_pb(message: decode_pb2.DecodeBatch) -> list[DecodeDelta]:
    """Reads the deltas of one step."""
    return [
        _rich_delta_from_pb(delta)
        if delta.finish_reason
        or delta.logprobs
        or delta.prompt_logprobs
        or delta.HasField("timings")
        or delta.HasField("error")
        or not (token_ids := tuple(delta.token_ids))
        # Nearly all of them; what is not there is not looked at twice.
        else DecodeDelta(delta.key, token_ids)
        for delta in message.deltas
    ]


def _rich_delta_from_pb(message: decode_pb2.DecodeDelta) -> DecodeDelta:
    return DecodeDelta(
        key=message.key,
        token_ids=tuple(message.token_ids),
        finish_reason=finish_from_pb(message.finish_reason),
        error=message.error if message.HasField("error") else None,
        timings=message.timings if message.HasField("timings") else None,
        logprobs=tuple(map(logprob_from_pb, message.logprobs)),
        queued=message.queued.position if message.HasField("queued") else None,
        prompt_logprobs=tuple(map(logprob_from_pb, message.prompt_logprobs)),
    )
