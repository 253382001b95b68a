"""Converts the messages of the public service (protos/pillion/v1/gateway.proto)."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import Any, TypeVar

from google.protobuf.message import Message

from pillion.types import (
    SAMPLING_OPTIONS,
    AnswerSoFar,
    ChatMessage,
    ChatOptions,
    ClusterStatus,
    ComponentStatus,
    Delta,
    GenerateRequest,
    ModelInfo,
    PinnedPrefix,
    Resume,
    StreamOrigin,
    TenantUsage,
    Timings,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolOptions,
    Usage,
    WarmedPrefix,
)
from pillion.v1 import common_pb2, gateway_pb2
from pillion.wire.common import (
    finish_from_pb,
    finish_to_pb,
    logprob_from_pb,
    logprob_to_pb,
    sampling_from_pb,
    sampling_to_pb,
)

T = TypeVar("T")

# Metadata of an operator's Generate call that restricts the planner.
PLAN_HEADER = "x-pillion-plan"
# Metadata of a call; the value 1 records a bundle of the request, if the gateway has --record-path.
RECORD_HEADER = "x-pillion-record"

_PLAIN = {field.name for field in fields(GenerateRequest)} - {
    "token_ids",
    "messages",
    "chat",
    "tools",
    "sampling",
    "resume",
}


def request_from_pb(message: gateway_pb2.GenerateRequest) -> GenerateRequest:
    """Read a request; :mod:`pillion.gateway.request.validation` checks it."""
    return GenerateRequest(
        **{name: getattr(message, name) for name in _PLAIN},
        token_ids=tuple(message.token_ids),
        messages=tuple(map(_message_from_pb, message.messages)),
        chat=_read(ChatOptions, message.chat) if message.HasField("chat") else ChatOptions(),
        tools=_tools_from_pb(message.tools) if message.HasField("tools") else ToolOptions(),
        sampling=sampling_from_pb(message.sampling),
        resume=_resume_from_pb(message.resume) if message.HasField("resume") else None,
    )


def request_to_pb(request: GenerateRequest) -> gateway_pb2.GenerateRequest:
    """Write a request. Raises ValueError if a number does not fit its field."""
    return gateway_pb2.GenerateRequest(
        **{name: getattr(request, name) for name in _PLAIN},
        token_ids=request.token_ids,
        messages=[gateway_pb2.ChatMessage(**asdict(m)) for m in request.messages],
        chat=None if request.chat == ChatOptions() else gateway_pb2.ChatOptions(**asdict(request.chat)),
        tools=None if request.tools == ToolOptions() else gateway_pb2.ToolOptions(**asdict(request.tools)),
        sampling=sampling_to_pb(request.sampling),
        resume=None if request.resume is None else _resume_to_pb(request.resume),
    )


def _message_from_pb(message: gateway_pb2.ChatMessage) -> ChatMessage:
    if not (message.tool_calls or message.tool_call_id or message.name or message.reasoning):
        return ChatMessage(message.role, message.content)
    calls = tuple(ToolCall(call.id, call.name, call.arguments) for call in message.tool_calls)
    return _read(ChatMessage, message, tool_calls=calls)


def _tools_from_pb(message: gateway_pb2.ToolOptions) -> ToolOptions:
    return _read(ToolOptions, message, tools=tuple(_read(Tool, tool) for tool in message.tools))


def _resume_from_pb(message: gateway_pb2.Resume) -> Resume:
    answers = (AnswerSoFar(tuple(one.token_ids), finish_from_pb(one.finish_reason)) for one in message.answers)
    return Resume(origin_from_pb(message.origin), tuple(answers), message.scored_tokens)


def _resume_to_pb(resume: Resume) -> gateway_pb2.Resume:
    answers = (
        gateway_pb2.AnswerSoFar(token_ids=one.token_ids, finish_reason=finish_to_pb(one.finish_reason))
        for one in resume.answers
    )
    return gateway_pb2.Resume(origin=origin_to_pb(resume.origin), answers=answers, scored_tokens=resume.scored_tokens)


def origin_from_pb(message: gateway_pb2.StreamOrigin) -> StreamOrigin:
    """Read the origin of a broken stream, by which it can be resumed."""
    return _read(StreamOrigin, message)


def origin_to_pb(origin: StreamOrigin) -> gateway_pb2.StreamOrigin:
    """Write the origin of a broken stream, by which it can be resumed."""
    return gateway_pb2.StreamOrigin(**asdict(origin))


def origin_digest(
    fingerprint: str, adapter: str, recommended: Sequence[tuple[str, float]], prompt: Sequence[int]
) -> bytes:
    """Return the 32-byte digest of a stream's origin: weights, adapter, the model's own sampling values in effect, and
    the prompt's ids with the positions of virtual tokens."""
    own = repr(tuple(recommended)) if recommended else ""
    return hashlib.sha256(f"{fingerprint}{adapter}{own}".encode() + array("I", prompt).tobytes()).digest()


def delta_to_pb(delta: Delta) -> gateway_pb2.GenerateResponse:
    """Write one message of a stream."""
    return gateway_pb2.GenerateResponse(
        request_id=delta.request_id,
        text=delta.text,
        token_ids=delta.token_ids,
        finish_reason=finish_to_pb(delta.finish_reason),
        usage=None if delta.usage is None else common_pb2.Usage(**asdict(delta.usage)),
        timings=None if delta.timings is None else common_pb2.Timings(**asdict(delta.timings)),
        index=delta.index,
        logprobs=[logprob_to_pb(logprob) for logprob in delta.logprobs],
        reasoning=delta.reasoning,
        tool_calls=[gateway_pb2.ToolCallDelta(**asdict(part)) for part in delta.tool_calls],
        stop_string=delta.stop_string,
        prompt_logprobs=[logprob_to_pb(logprob) for logprob in delta.prompt_logprobs],
    )


class DeltaWriter:
    """Writes the messages of one stream, most of which contain only text and tokens.

    Messages with only text and tokens share one object, so the caller must serialize it before the next :meth:`to_pb`,
    as gRPC does.
    """

    __slots__ = ("_plain",)

    def __init__(self, request_id: str) -> None:
        self._plain = gateway_pb2.GenerateResponse(request_id=request_id)

    def to_pb(self, delta: Delta) -> gateway_pb2.GenerateResponse:
        """Return the same message as :func:`delta_to_pb`, valid until the next call."""
        rare = delta.finish_reason or delta.usage or delta.timings or delta.logprobs or delta.reasoning
        if rare or delta.tool_calls or delta.stop_string or delta.prompt_logprobs:
            return delta_to_pb(delta)
        plain = self._plain
        plain.text = delta.text
        plain.token_ids[:] = delta.token_ids
        plain.index = delta.index
        return plain


def delta_from_pb(message: gateway_pb2.GenerateResponse) -> Delta:
    """Read one message of a stream. Usage and timings are None before the last one."""
    usage = _read(Usage, message.usage) if message.HasField("usage") else None
    timings = _read(Timings, message.timings) if message.HasField("timings") else None
    return Delta(
        request_id=message.request_id,
        text=message.text,
        token_ids=tuple(message.token_ids),
        finish_reason=finish_from_pb(message.finish_reason),
        usage=usage,
        timings=timings,
        index=message.index,
        logprobs=tuple(logprob_from_pb(logprob) for logprob in message.logprobs),
        reasoning=message.reasoning,
        tool_calls=tuple(_read(ToolCallDelta, part) for part in message.tool_calls),
        stop_string=message.stop_string,
        prompt_logprobs=tuple(logprob_from_pb(logprob) for logprob in message.prompt_logprobs),
    )


def model_to_pb(info: ModelInfo) -> gateway_pb2.Model:
    """Write one entry of ListModels."""
    return gateway_pb2.Model(**asdict(info) | {"sampling": sampling_to_pb(info.sampling)})


def model_from_pb(message: gateway_pb2.Model) -> ModelInfo:
    """Read one entry of ListModels."""
    sampling = sampling_from_pb(message.sampling)
    # The message has 32-bit floats; the sender's number is the shortest decimal one with the same bits.
    given: dict[str, Any] = {
        name: float(f"{value:.7g}") for name in SAMPLING_OPTIONS if isinstance(value := getattr(sampling, name), float)
    }
    return _read(ModelInfo, message, sampling=replace(sampling, **given))


def pin_to_pb(pin: PinnedPrefix) -> gateway_pb2.PinnedPrefix:
    """Write a pinned prefix."""
    return gateway_pb2.PinnedPrefix(**asdict(pin))


def pin_from_pb(message: gateway_pb2.PinnedPrefix) -> PinnedPrefix:
    """Read a pinned prefix."""
    return _read(PinnedPrefix, message)


def warmed_to_pb(warmed: WarmedPrefix) -> gateway_pb2.WarmPrefixResponse:
    """Write the result of warming a prompt."""
    pin = None if warmed.pin is None else pin_to_pb(warmed.pin)
    return gateway_pb2.WarmPrefixResponse(
        computed_tokens=warmed.computed_tokens, found_tokens=warmed.found_tokens, pin=pin
    )


def warmed_from_pb(message: gateway_pb2.WarmPrefixResponse) -> WarmedPrefix:
    """Read the result of warming a prompt."""
    pin = pin_from_pb(message.pin) if message.HasField("pin") else None
    return WarmedPrefix(message.computed_tokens, message.found_tokens, pin)


def status_to_pb(status: ClusterStatus) -> gateway_pb2.GetStatusResponse:
    """Write the status of the whole cluster."""
    return gateway_pb2.GetStatusResponse(**asdict(status))


def status_from_pb(message: gateway_pb2.GetStatusResponse) -> ClusterStatus:
    """Read the status of the whole cluster."""
    components = tuple(_read(ComponentStatus, one, figures=dict(one.figures)) for one in message.components)
    tenants = tuple(TenantUsage(one.tenant, _read(Usage, one.usage)) for one in message.tenants)
    return _read(ClusterStatus, message, components=components, tenants=tenants)


def _read(kind: type[T], message: Message, **others: Any) -> T:
    """Read a message into a dataclass with the same field names. ``others``: values of the fields that are not read
    here."""
    names = [field.name for field in fields(kind) if field.name not in others]  # type: ignore[arg-type]
    return kind(**{name: _value(message, name) for name in names}, **others)


def _value(message: Message, name: str) -> Any:
    """Return a field of a message: a list as a tuple, and None for an optional field that was not sent."""
    field, value = message.DESCRIPTOR.fields_by_name[name], getattr(message, name)
    if field.has_presence and not message.HasField(name):
        return None
    return tuple(value) if field.is_repeated else value
