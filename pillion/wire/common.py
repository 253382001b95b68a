"""Converts messages that several services share (protos/pillion/v1/common.proto), and checks the hello between two
components for compatible versions."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from pillion._version import PROTOCOL, VERSION
from pillion.errors import Conflict
from pillion.rules.priority import Flow
from pillion.types import PUBLIC_OPTIONS, FinishReason, PoolingParams, SamplingParams, StructuredOutputs, TokenLogprob
from pillion.v1 import common_pb2
from pillion.v1.decode_pb2 import Submit, TokenSequence

_FINISH_TO_PB = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.TOOL_CALLS: common_pb2.FINISH_REASON_TOOL_CALLS,
}
_FINISH_FROM_PB = {number: reason for reason, number in _FINISH_TO_PB.items()}
_DEFAULTS = SamplingParams()
_OPTIONAL = tuple(name for name in PUBLIC_OPTIONS if getattr(_DEFAULTS, name) is None and name != "structured_outputs")
_PLAIN = {name: type(value) for name in PUBLIC_OPTIONS if (value := getattr(_DEFAULTS, name)) is not None}


def hello_to_pb(component_id: str) -> common_pb2.Hello:
    """Return this component's Hello, with the program's version and protocol."""
    return common_pb2.Hello(protocol=PROTOCOL, component_id=component_id, version=VERSION)


def flow_to_pb(flow: Flow) -> common_pb2.Flow | None:
    """Create the message of a request's flow; None if tenants are not distinguished."""
    return common_pb2.Flow(key=flow.key, weight=flow.weight) if flow.key else None


def check_hello(message: common_pb2.Hello) -> str:
    """Return the sender's component id. Raises Conflict for an incompatible protocol."""
    check_protocol(message.protocol, message.component_id)
    return message.component_id


def check_protocol(protocol: int, component_id: str) -> None:
    """Raise Conflict if the protocol of ``component_id`` is more than one version away from ours."""
    if protocol == 0 or abs(protocol - PROTOCOL) > 1:
        raise Conflict(
            f"{component_id or 'peer'} speaks protocol {protocol}, this component speaks {PROTOCOL}: "
            "upgrade one version at a time"
        )


def finish_to_pb(reason: FinishReason | None) -> common_pb2.FinishReason.ValueType:
    """Return the enum value of a finish reason; None, while the stream continues, is UNSPECIFIED."""
    return common_pb2.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH_TO_PB[reason]


def finish_from_pb(number: int) -> FinishReason | None:
    """Return the finish reason of an enum value, None for UNSPECIFIED. An unknown reason of a newer peer also ends an
    answer, so it becomes STOP, which all client libraries know."""
    if number == common_pb2.FINISH_REASON_UNSPECIFIED:
        return None
    return _FINISH_FROM_PB.get(number, FinishReason.STOP)  # type: ignore[call-overload,no-any-return]


def sampling_from_pb(message: common_pb2.SamplingParams) -> SamplingParams:
    """Read sampling parameters. A field that was not sent is None, not zero."""
    given = {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}  # type: ignore[arg-type]
    given |= {name: kind(getattr(message, name)) for name, kind in _PLAIN.items()}
    return SamplingParams(**given, structured_outputs=_structured_from_pb(message.structured_outputs))


def sampling_to_pb(params: SamplingParams) -> common_pb2.SamplingParams:
    """Write sampling parameters. Raises ValueError if a number does not fit its field."""
    plain = {name: getattr(params, name) for name in PUBLIC_OPTIONS if name != "structured_outputs"}
    if isinstance(plain["stop"], str):
        # vLLM accepts a single stop string as str; iterated, it would become one stop string per character.
        plain["stop"] = (plain["stop"],)
    structured = None if params.structured_outputs is None else _structured_to_pb(params.structured_outputs)
    return common_pb2.SamplingParams(**plain, structured_outputs=structured)


# Only the next four functions map a stream's parameters to fields of a Submit. Some are outside its ``sampling``,
# because peers of the previous release read them there.


def write_sampling(submit: Submit, params: SamplingParams) -> None:
    """Write the resolved parameters of a stream. Raises ValueError where a number does not fit its field."""
    submit.sampling.CopyFrom(sampling_to_pb(replace(params, stop_token_ids=())))
    submit.stop_token_ids.extend(params.stop_token_ids)
    submit.max_tokens = params.max_tokens or 0
    submit.bad_words.extend(TokenSequence(token_ids=ids) for ids in params.bad_words_token_ids)


def read_sampling(submit: Submit) -> SamplingParams:
    """Read the parameters that :func:`write_sampling` wrote."""
    return replace(
        sampling_from_pb(submit.sampling),
        stop_token_ids=tuple(submit.stop_token_ids),
        max_tokens=submit.max_tokens,
        bad_words_token_ids=tuple(tuple(sequence.token_ids) for sequence in submit.bad_words),
    )


def write_pooling(submit: Submit, params: PoolingParams) -> None:
    """Write the parameters of a stream that ends with a vector."""
    submit.pooled = params.rows is None
    if params.rows is not None:
        submit.pooled_first, submit.pooled_rows = params.rows.start, len(params.rows)
    submit.pooled_ids.extend(params.logits_of)
    submit.second_from = params.second_from


def read_pooling(submit: Submit) -> PoolingParams | None:
    """Read the parameters that :func:`write_pooling` wrote, with the positions of the last token's row; None for a
    stream that generates."""
    if submit.pooled_rows:
        rows = range(submit.pooled_first, submit.pooled_first + submit.pooled_rows)
    elif submit.pooled:
        rows = range(submit.prompt_tokens - 1, submit.prompt_tokens)
    else:
        return None
    return PoolingParams(rows=rows, logits_of=tuple(submit.pooled_ids), second_from=submit.second_from)


def _structured_from_pb(message: common_pb2.StructuredOutputs) -> StructuredOutputs | None:
    """Read the structure of an answer; None if none is set."""
    name = message.WhichOneof("structure")
    if name is None:
        return None
    structured: dict[str, Any] = {name: getattr(message, name)}
    return (
        StructuredOutputs(choice=tuple(message.choice.texts)) if name == "choice" else StructuredOutputs(**structured)
    )


def _structured_to_pb(structured: StructuredOutputs) -> common_pb2.StructuredOutputs:
    """Write the structure of an answer. Raises ValueError unless exactly one is set."""
    given = {
        field.name: value
        for field in fields(structured)
        if (value := getattr(structured, field.name)) not in (None, False, ())
    }
    if len(given) != 1:
        raise ValueError(f"exactly one structure of an answer can be asked for, not {', '.join(given) or 'none'}")
    if structured.choice:
        return common_pb2.StructuredOutputs(choice=common_pb2.Choices(texts=structured.choice))
    return common_pb2.StructuredOutputs(**given)


def logprob_from_pb(message: common_pb2.TokenLogprob) -> TokenLogprob:
    """Read a token's log probability and those of its alternatives."""
    top_ids, top_logprobs = tuple(message.top_ids), tuple(message.top_logprobs)
    return TokenLogprob(message.token_id, message.logprob, top_ids, top_logprobs, message.rank)


def logprob_to_pb(logprob: TokenLogprob) -> common_pb2.TokenLogprob:
    """Write a token's log probability and those of its alternatives."""
    return common_pb2.TokenLogprob(
        token_id=logprob.token_id,
        logprob=logprob.logprob,
        top_ids=logprob.top_ids,
        top_logprobs=logprob.top_logprobs,
        rank=logprob.rank,
    )
