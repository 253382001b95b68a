"""Converters of the decode service (protos/pillion/v1/decode.proto)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import NamedTuple

from pillion.types import FinishReason, SamplingParams, TokenLogprob
from pillion.v1 import decode_pb2
from pillion.wire.public import (
    finish_from_pb,
    finish_to_pb,
    logprob_from_pb,
    logprob_to_pb,
    sampling_from_pb,
    sampling_to_pb,
)


@dataclass(frozen=True, slots=True)
class Fork:
    """Another answer to a Submit's prompt: a stream with a key and a seed of its own."""

    key: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Generate from a prompt tail; see Submit in decode.proto for each field."""

    key: int
    request_id: str
    attempt: int
    ticket_id: int
    root_hash: bytes
    token_ids: tuple[int, ...]
    prompt_tokens: int
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    max_tokens: int
    timeout_ms: int = 0
    traceparent: str = ""
    priority: int = 0
    forks: tuple[Fork, ...] = ()
    awaited_blocks: int = 0


# The fields that message and dataclass hold alike.
_SUBMIT_PLAIN = {field.name for field in fields(Submit)} - {"token_ids", "sampling", "stop_token_ids", "forks"}


@dataclass(frozen=True, slots=True)
class DecodeError:
    """Why a stream failed: a google.rpc.Code, a message, and whether trying elsewhere can help."""

    code: int
    message: str
    retryable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTimings:
    """Timings of a request at its decode worker."""

    tail_tokens: int = 0
    tail_steps: int = 0
    queue_ms: float = 0.0
    preemptions: int = 0


class DecodeDelta(NamedTuple):
    """Tokens of one stream since its last delta; the last one has a finish reason or an error.

    One is made for every token of the whole cluster, on both sides, and a tuple is made in a quarter of the time that a
    frozen dataclass takes.
    """

    key: int
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: DecodeError | None = None
    timings: DecodeTimings | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


def submit_from_pb(message: decode_pb2.Submit) -> Submit:
    """Convert a received submit."""
    return Submit(
        **{name: getattr(message, name) for name in _SUBMIT_PLAIN},
        token_ids=tuple(message.token_ids),
        sampling=sampling_from_pb(message.sampling),
        stop_token_ids=tuple(message.stop_token_ids),
        forks=tuple(Fork(fork.key, fork.seed) for fork in message.forks),
    )


def submit_to_pb(submit: Submit) -> decode_pb2.Submit:
    """Convert a submit that is to be sent."""
    return decode_pb2.Submit(
        **{name: getattr(submit, name) for name in _SUBMIT_PLAIN},
        token_ids=submit.token_ids,
        sampling=sampling_to_pb(submit.sampling),
        stop_token_ids=submit.stop_token_ids,
        forks=[decode_pb2.Fork(key=fork.key, seed=fork.seed) for fork in submit.forks],
    )


def batch_from_pb(message: decode_pb2.DecodeBatch) -> list[DecodeDelta]:
    """All deltas of one step."""
    return [
        _rich_delta_from_pb(delta)
        if delta.finish_reason or delta.logprobs or delta.HasField("timings") or delta.HasField("error")
        # Nearly all of them; what is not there is not looked at twice.
        else DecodeDelta(delta.key, tuple(delta.token_ids))
        for delta in message.deltas
    ]


def batch_to_pb(deltas: Sequence[DecodeDelta]) -> decode_pb2.DecodeBatch:
    """All deltas of one step."""
    return decode_pb2.DecodeBatch(deltas=[_delta_to_pb(delta) for delta in deltas])


def _rich_delta_from_pb(message: decode_pb2.DecodeDelta) -> DecodeDelta:
    error, timings = None, None
    if message.HasField("error"):
        error = DecodeError(message.error.code, message.error.message, message.error.retryable)
    if message.HasField("timings"):
        timings = DecodeTimings(**{name: getattr(message.timings, name) for name in DecodeTimings.__slots__})
    return DecodeDelta(
        key=message.key,
        token_ids=tuple(message.token_ids),
        finish_reason=finish_from_pb(message.finish_reason),
        error=error,
        timings=timings,
        logprobs=tuple(logprob_from_pb(logprob) for logprob in message.logprobs),
    )


def _delta_to_pb(delta: DecodeDelta) -> decode_pb2.DecodeDelta:
    message = decode_pb2.DecodeDelta(
        key=delta.key,
        token_ids=delta.token_ids,
        finish_reason=finish_to_pb(delta.finish_reason),
        logprobs=[logprob_to_pb(logprob) for logprob in delta.logprobs],
    )
    if delta.error is not None:
        message.error.CopyFrom(decode_pb2.DecodeError(**asdict(delta.error)))
    if delta.timings is not None:
        message.timings.CopyFrom(decode_pb2.DecodeTimings(**asdict(delta.timings)))
    return message
