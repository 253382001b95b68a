"""Reads the deltas of the decode service's steps, as gateways get them (protos/pillion/v1/decode.proto)."""

from __future__ import annotations

from typing import NamedTuple

from pillion.types import FinishReason, TokenLogprob
from pillion.v1 import decode_pb2
from pillion.v1.decode_pb2 import DecodeError, DecodeTimings
from pillion.wire.public import finish_from_pb, logprob_from_pb


class DecodeDelta(NamedTuple):
    """Holds the tokens of one stream since its last delta; the last delta has a finish reason or an error.

    A delta is made for every token of the whole cluster, and a tuple is made in a quarter of the time that a frozen
    dataclass takes.
    """

    key: int
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: DecodeError | None = None
    timings: DecodeTimings | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    # In a sign of life of a stream that waits, this is its place in line.
    queued: int | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    # In the message that says that the worker has adopted the ticket, this is the length of its pinned chain.
    pinned_blocks: int | None = None
    # This counts the streams of a connection that broke; it is 0 where the worker itself sent the error.
    broken: int = 0
    # It comes with the finish reason of a stream that ends with its text's vector.
    vector: bytes = b""


def batch_from_pb(message: decode_pb2.DecodeBatch) -> list[DecodeDelta]:
    """Reads the deltas of one step."""
    return [
        _rich_delta_from_pb(delta)
        if delta.finish_reason
        or delta.logprobs
        or delta.prompt_logprobs
        or delta.HasField("timings")
        or delta.HasField("error")
        or delta.HasField("pinned_blocks")
        or not (token_ids := tuple(delta.token_ids))
        # Nearly all deltas have token ids alone, so their other fields are not looked at twice.
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
        pinned_blocks=message.pinned_blocks if message.HasField("pinned_blocks") else None,
        vector=message.vector,
    )
