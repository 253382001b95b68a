"""Converters: values survive the round trip, "not set" differs from zero, and adjacent protocols are compatible."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pillion._version import PROTOCOL
from pillion.config import parse_size
from pillion.errors import (
    BY_CODE,
    ConfigError,
    Conflict,
    FieldViolation,
    Internal,
    InvalidRequest,
    Overloaded,
    PillionError,
    QuotaViolation,
    Unavailable,
)
from pillion.gateway.links.decode_link import DecodeDelta, batch_from_pb
from pillion.kvstore.pool_survival.keeper_messages import keeper_hello_from_line
from pillion.types import (
    AnswerSoFar,
    ChatMessage,
    ChatOptions,
    Delta,
    FinishReason,
    GenerateRequest,
    Resume,
    SamplingParams,
    StreamOrigin,
    StructuredOutputs,
    Timings,
    TokenLogprob,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolOptions,
    Usage,
)
from pillion.v1 import common_pb2, decode_pb2, gateway_pb2
from pillion.wire.attach import attach_reply_from_line, hello_from_line, region_reply_from_line
from pillion.wire.common import check_hello, finish_to_pb, hello_to_pb, logprob_to_pb, sampling_from_pb, sampling_to_pb
from pillion.wire.public import DeltaWriter, delta_from_pb, delta_to_pb, request_from_pb, request_to_pb
from pillion.wire.registry import MAX_COUNT, STEP_COSTS, ComponentRecord

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
TEXT = st.text(max_size=8)
FLOAT32 = st.floats(width=32, allow_nan=False)
I32 = st.integers(-(2**31), 2**31 - 1)
IDS = st.lists(U32, max_size=5).map(tuple)


def built(cls: type, **known: st.SearchStrategy) -> st.SearchStrategy:
    """Generate instances of a dataclass or struct whose fields are all ``known`` or of a plain kind."""
    kinds = {"int": U32, "float": st.floats(0, 1e6), "str": TEXT, "bool": st.booleans()}
    kinds |= {"Count": st.integers(0, MAX_COUNT), "Amount": kinds["float"]}
    kinds["tuple[str, ...]"] = st.lists(TEXT, max_size=3).map(tuple)
    kinds["tuple[tuple[str, Count], ...]"] = st.lists(st.tuples(TEXT, kinds["Count"]), max_size=3).map(tuple)
    fields = {name: known[name] if name in known else kinds[kind] for name, kind in cls.__annotations__.items()}
    return st.builds(cls, **fields)


SHAPES = st.one_of(
    [st.builds(StructuredOutputs, **{name: TEXT}) for name in ("json", "regex", "grammar", "structural_tag")]
    + [
        st.just(StructuredOutputs(json_object=True)),
        st.builds(StructuredOutputs, choice=st.lists(TEXT, min_size=1, max_size=3).map(tuple)),
    ]
)
SAMPLING = st.builds(
    SamplingParams,
    temperature=st.none() | FLOAT32,
    top_p=st.none() | FLOAT32,
    top_k=st.none() | st.integers(-(2**31), 2**31 - 1),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    max_tokens=st.none() | st.integers(-(2**31), 2**31 - 1),
    stop=st.lists(TEXT, max_size=3).map(tuple),
    stop_token_ids=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    min_p=st.none() | FLOAT32,
    repetition_penalty=st.none() | FLOAT32,
    presence_penalty=st.none() | FLOAT32,
    frequency_penalty=st.none() | FLOAT32,
    logit_bias=st.dictionaries(I32, FLOAT32, max_size=3),
    min_tokens=st.none() | I32,
    logprobs=st.none() | I32,
    n=st.none() | I32,
    best_of=st.none() | I32,
    structured_outputs=st.none() | SHAPES,
    prompt_logprobs=st.none() | I32,
)
LOGPROBS = st.lists(
    st.builds(TokenLogprob, U32, FLOAT32, IDS, st.lists(FLOAT32, max_size=3).map(tuple), U32), max_size=3
).map(tuple)
CALLS = st.lists(built(ToolCall), max_size=2).map(tuple)
MESSAGES = st.lists(built(ChatMessage, tool_calls=CALLS), max_size=3).map(tuple)
TOOLS = built(
    ToolOptions,
    tools=st.lists(built(Tool, strict=st.none() | st.booleans()), max_size=2).map(tuple),
    parallel_tool_calls=st.none() | st.booleans(),
)
CHAT = built(ChatOptions, add_generation_prompt=st.none() | st.booleans())
REASON = st.none() | st.sampled_from(list(FinishReason))
RESUMES = st.builds(
    Resume,
    st.builds(StreamOrigin, st.integers(-(2**63), 2**63 - 1), st.binary(max_size=3), U32),
    st.lists(st.builds(AnswerSoFar, IDS, REASON), max_size=3).map(tuple),
    U32,
)
REQUESTS = built(
    GenerateRequest,
    token_ids=IDS,
    messages=MESSAGES,
    chat=CHAT,
    tools=TOOLS,
    sampling=SAMPLING,
    priority=I32,
    resume=st.none(),
)
DELTAS = built(
    Delta,
    token_ids=IDS,
    finish_reason=REASON,
    usage=st.none() | built(Usage),
    timings=st.none() | built(Timings),
    logprobs=LOGPROBS,
    tool_calls=st.lists(built(ToolCallDelta), max_size=2).map(tuple),
    prompt_logprobs=LOGPROBS,
    parsed=st.none(),
)
ERRORS = st.builds(decode_pb2.DecodeError, code=st.integers(0, 16), message=TEXT, retryable=st.booleans())
TIMINGS = st.builds(
    decode_pb2.DecodeTimings, tail_tokens=U32, tail_steps=U32, queue_ms=st.floats(allow_nan=False), preemptions=U32
)
DECODE_DELTAS = st.builds(
    DecodeDelta,
    key=U64,
    token_ids=IDS,
    finish_reason=REASON,
    error=st.none() | ERRORS,
    timings=st.none() | TIMINGS,
    logprobs=LOGPROBS,
    queued=st.none() | U32,
    pinned_blocks=st.none() | U32,
    prompt_logprobs=LOGPROBS,
    vector=st.binary(max_size=8),
    # A delta with tokens says by them that the stream goes on, and by timings that a prompt was computed.
).map(lambda delta: delta._replace(queued=None) if delta.token_ids else delta)
DECODE_DELTAS = DECODE_DELTAS.map(
    lambda delta: delta._replace(prompt_logprobs=()) if delta.token_ids and not delta.timings else delta
)
# A vector comes with a stream's end.
DECODE_DELTAS = DECODE_DELTAS.map(lambda delta: delta if delta.finish_reason else delta._replace(vector=b""))
# No worker sends it: the gateway says it of a connection that broke.
DECODE_DELTAS = DECODE_DELTAS.map(lambda delta: delta._replace(broken=0))


@given(REQUESTS)
def test_requests_round_trip(request: GenerateRequest) -> None:
    sent = gateway_pb2.GenerateRequest.FromString(request_to_pb(request).SerializeToString())
    assert request_from_pb(sent) == request


@given(RESUMES)
def test_resumed_requests_round_trip(resume: Resume) -> None:
    request = GenerateRequest(text="x", resume=resume)
    sent = gateway_pb2.GenerateRequest.FromString(request_to_pb(request).SerializeToString())
    assert request_from_pb(sent) == request


@given(DELTAS)
def test_deltas_round_trip(delta: Delta) -> None:
    assert delta_from_pb(delta_to_pb(delta)) == delta


@given(st.lists(DELTAS, max_size=4))
def test_deltas_of_one_stream_round_trip(deltas: list[Delta]) -> None:
    writer, deltas_sent = DeltaWriter("r"), [dataclasses.replace(delta, request_id="r") for delta in deltas]
    sent = [gateway_pb2.GenerateResponse.FromString(writer.to_pb(delta).SerializeToString()) for delta in deltas_sent]
    assert [delta_from_pb(message) for message in sent] == deltas_sent


@given(SAMPLING)
def test_sampling_params_round_trip(sampling: SamplingParams) -> None:
    assert sampling_from_pb(sampling_to_pb(sampling)) == sampling


@given(st.lists(DECODE_DELTAS, max_size=4))
def test_batches(deltas: list[DecodeDelta]) -> None:
    batch = decode_pb2.DecodeBatch(
        deltas=[
            decode_pb2.DecodeDelta(
                key=delta.key,
                token_ids=delta.token_ids,
                finish_reason=finish_to_pb(delta.finish_reason),
                error=delta.error,
                timings=delta.timings,
                logprobs=map(logprob_to_pb, delta.logprobs),
                prompt_logprobs=map(logprob_to_pb, delta.prompt_logprobs),
                queued=None if delta.queued is None else common_pb2.Queued(position=delta.queued),
                pinned_blocks=delta.pinned_blocks,
                vector=delta.vector,
            )
            for delta in deltas
        ]
    )
    assert batch_from_pb(decode_pb2.DecodeBatch.FromString(batch.SerializeToString())) == deltas


COSTS = st.just(()) | st.tuples(*[st.floats(1e-9, 1e3)] * STEP_COSTS)


@given(built(ComponentRecord, step_cost_s=COSTS))
def test_component_records_round_trip(record: ComponentRecord) -> None:
    newer = record.to_json()[:-1] + ',"zz_field_of_a_newer_version":[1]}'
    assert ComponentRecord.from_json(newer) == record


@given(built(ComponentRecord, step_cost_s=COSTS))
def test_both_readers_of_a_record_agree(record: ComponentRecord) -> None:
    """A record with an implausible number is read by the tolerant decoder, and nothing else in it changes."""
    odd = record.to_json()[:-1] + ',"queued_tokens":-1}'
    assert ComponentRecord.from_json(odd) == replace(record, queued_tokens=0)


@pytest.mark.parametrize("text", ["", "[]", "{}", "nonsense", '{"component_id":"x"}'])
def test_invalid_component_records_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        ComponentRecord.from_json(text)


def test_adjacent_protocols_are_accepted() -> None:
    for protocol in (PROTOCOL, PROTOCOL + 1):
        assert check_hello(common_pb2.Hello(protocol=protocol, component_id="x")) == "x"
    for protocol in (0, PROTOCOL + 2):
        with pytest.raises(Conflict, match=f"speaks protocol {protocol}, this component speaks {PROTOCOL}"):
            check_hello(common_pb2.Hello(protocol=protocol, component_id="x"))
    assert hello_to_pb("y").protocol == PROTOCOL


@pytest.mark.parametrize(
    "read", [hello_from_line, attach_reply_from_line, region_reply_from_line, keeper_hello_from_line]
)
@pytest.mark.parametrize("protocol", [0, PROTOCOL - 2, PROTOCOL + 2])
def test_another_protocol_version_is_rejected(read: Callable[[bytes], object], protocol: int) -> None:
    """Not by the names of its fields, which depend on the protocol."""
    line = json.dumps({"worker_id": "decode-0", "protocol": protocol, "node_id": 7}).encode()
    with pytest.raises(Conflict, match=f"speaks protocol {protocol}, this component speaks {PROTOCOL}"):
        read(line)


def test_fields_of_a_newer_version_are_kept() -> None:
    newer = b"\x9a\x3e\x03new"  # field 995, which nobody knows yet
    message = gateway_pb2.GenerateRequest.FromString(gateway_pb2.GenerateRequest(text="x").SerializeToString() + newer)
    assert message.SerializeToString().endswith(newer)
    end = delta_from_pb(gateway_pb2.GenerateResponse(text="x", finish_reason=99))  # type: ignore[arg-type]
    assert end.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("cls", sorted(BY_CODE.values(), key=lambda cls: cls.code))
def test_errors_round_trip(cls: type[PillionError]) -> None:
    import grpc

    from pillion.net.rpc import from_rpc_error, to_status

    violations = (FieldViolation("sampling.top_p", "must be positive"),)
    quotas = (QuotaViolation("max_inflight_requests", "256 are under way"),)
    errors = {
        InvalidRequest: InvalidRequest.of(*violations),
        Overloaded: Overloaded("full", 1500, quotas),
        Unavailable: Unavailable("stopping", 1500),
    }
    status = to_status(errors.get(cls, cls("words")))
    metadata = grpc.aio.Metadata(*status.trailing_metadata)
    back = from_rpc_error(grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), metadata, status.details))
    assert type(back) is cls
    assert back.message == status.details
    assert getattr(back, "violations", violations) == violations
    assert getattr(back, "retry_after_ms", 1500) == 1500
    assert getattr(back, "quotas", quotas) == quotas


def test_client_input_cannot_overflow_the_trailers() -> None:
    """gRPC's clients reject more than 8 KiB; a character of two bytes takes six in a message."""
    from pillion.net.rpc import to_status

    error = InvalidRequest.of(*(FieldViolation(f"tools.allowed[{n}]", "ä%" * 2000) for n in range(32)))
    status = to_status(error)
    spelled = quote(status.details, safe=" ")
    trailers = sum(len(key) + len(value) + 32 for key, value in status.trailing_metadata)
    assert len(spelled) + trailers < 8000
    assert "tools.allowed[0]: ä%ä%" in status.details


def test_an_unknown_code_is_internal() -> None:
    import grpc

    from pillion.net.rpc import from_rpc_error

    empty = grpc.aio.Metadata()
    assert type(from_rpc_error(grpc.aio.AioRpcError(grpc.StatusCode.DATA_LOSS, empty, empty, "x"))) is Internal


@pytest.mark.parametrize(
    ("text", "size"), [("4096", 4096), ("32K", 32_000), ("1GiB", 2**30), ("1.5 MiB", 3 * 2**19), ("2_000", 2000)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "K", "-1", "1e3", "1TiBs", "0x10", "1..5"])
def test_invalid_sizes(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_size(text)


def test_an_answer_has_at_most_one_structured_output() -> None:
    with pytest.raises(ValueError, match="json, regex"):
        sampling_to_pb(SamplingParams(structured_outputs=StructuredOutputs(json="{}", regex="a")))
