"""Requests are limited by bytes: no valid one is refused, no oversized one passes."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.errors import InvalidRequest
from pillion.gateway.request import validation as bounds
from pillion.gateway.request.validation import MAX_MESSAGES, MAX_PROMPT_IDS, MAX_REQUEST_BYTES
from pillion.gateway.tokens.tokenizer import LOOP_BYTES
from pillion.v1 import common_pb2, gateway_pb2
from tests.support.examples import examples

TRICKY = st.text(alphabet='\\"a,{}[]\u00e4\n', max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TRICKY,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TRICKY, inner, max_size=4),
    max_leaves=30,
)


def strings_of(value: Any) -> int:
    """Yield the strings of a JSON value, field names included."""
    if isinstance(value, dict):
        return sum(1 + strings_of(item) for item in value.values())
    if isinstance(value, list):
        return sum(map(strings_of, value))
    return isinstance(value, str)


@given(VALUES, st.integers(0, 12), st.booleans())
@settings(max_examples=examples(400))
def test_strings_are_counted_at_any_depth(value: Any, most: int, escaped: bool) -> None:
    body, count = json.dumps(value, ensure_ascii=escaped).encode(), strings_of(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounds, "MAX_STRINGS", most)
        too_many = bounds.holds_too_many_strings(body)
    assert count > most if too_many else count <= 2 * most


def test_an_escaped_name_is_a_string() -> None:
    message = b'{"\\u0072ole":"user","content":""}'
    assert bounds.holds_too_many_strings(b",".join([message] * (bounds.MAX_STRINGS // 4 + 1)))
    assert not bounds.holds_too_many_strings(b",".join([message] * MAX_MESSAGES))


def refused(raw: bytes) -> str:
    with pytest.raises(InvalidRequest) as caught:
        bounds.check_generate_message(raw)
    (violation,) = caught.value.violations
    return violation.field


def field(number: int, content: bytes) -> bytes:
    """Encode a bytes field in protobuf wire format."""
    size, head = len(content), bytearray([number << 3 | 2])
    while size > 127:
        head.append(size & 127 | 128)
        size >>= 7
    return bytes((*head, size)) + content


LARGE = max(LOOP_BYTES, bounds.MAX_FIELDS) + 1


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (b"\x22\x00" * LARGE, "messages"),
        (field(4, b"\x0a\x00" * LARGE), "messages"),
        (b"\x18\x01" * LARGE, "messages"),
        (b"\x12\x00" * LARGE, "messages"),
        (b"\x2a\x00" * LARGE, "messages"),
        (b"\xf8\x01\x01" * LARGE, "messages"),
        (b"\x7b\x7c" + b"\x22\x00" * LARGE, "messages"),
        (b"\x79" + bytes(8) + b"\x7d" + bytes(4) + b"\x22\x00" * LARGE, "messages"),
        (field(9, field(2, b"") * LARGE), "messages"),
        (field(5, b"\x32\x00" * (bounds.MAX_SAMPLING_BYTES // 2 + 1)), "sampling"),
        (field(5, b"\x6a\x00" * LARGE) * (bounds.MAX_SAMPLING_BYTES // (2 * LARGE) + 1), "sampling"),
        (field(3, b"\x01" * (MAX_PROMPT_IDS + 1)), "token_ids"),
        (field(3, b"\x81\x01" * 2**19) * 3, "token_ids"),
        (field(9, field(2, field(1, b"\x01" * (MAX_PROMPT_IDS + 1)))), "resume.answers.token_ids"),
        (b"\x12" * (MAX_REQUEST_BYTES + 1), "(message)"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[:6].hex(),
)
def test_messages_are_counted_before_they_are_read(raw: bytes, named: str) -> None:
    assert refused(raw) == named


def test_the_largest_good_messages_pass() -> None:
    sampling = common_pb2.SamplingParams(
        stop=["ä" * 256] * 16,
        stop_token_ids=[2**31 - 1] * 64,
        logit_bias=dict.fromkeys(range(2**31 - 1024, 2**31), -1.5),
    )
    message = gateway_pb2.ChatMessage(role="assistant", content="x" * 100)
    for good in (
        gateway_pb2.GenerateRequest(messages=[message] * MAX_MESSAGES, sampling=sampling, model="m", request_id="r"),
        gateway_pb2.GenerateRequest(token_ids=[2**21] * MAX_PROMPT_IDS, sampling=sampling),
        gateway_pb2.GenerateRequest(text="x" * (MAX_REQUEST_BYTES - 100)),
    ):
        bounds.check_generate_message(good.SerializeToString())


@given(st.binary(max_size=200), st.integers(0, 200))
@settings(max_examples=examples(300))
def test_counting_terminates_on_arbitrary_bytes(noise: bytes, cut: int) -> None:
    """Counting ends for any bytes, and for a valid message cut anywhere."""
    good = gateway_pb2.GenerateRequest(text="x" * LARGE, messages=[gateway_pb2.ChatMessage(role="a")])
    for raw in (noise + bytes(LARGE), good.SerializeToString()[:-1] + noise, good.SerializeToString()[: LARGE + cut]):
        with contextlib.suppress(InvalidRequest):
            bounds.check_generate_message(raw)


def test_warm_prefix_prompts_have_the_same_bounds() -> None:
    ids = gateway_pb2.GenerateRequest(token_ids=[1] * (MAX_PROMPT_IDS + 1))
    fields = gateway_pb2.GenerateRequest(messages=[gateway_pb2.ChatMessage(role="r", content="c")] * bounds.MAX_FIELDS)
    for prompt in (ids, fields):
        with pytest.raises(InvalidRequest):
            bounds.check_warm_message(gateway_pb2.WarmPrefixRequest(prompt=prompt, pin=True).SerializeToString())
    good = gateway_pb2.WarmPrefixRequest(prompt=gateway_pb2.GenerateRequest(token_ids=[1] * 10_000), name="n", ttl_s=60)
    bounds.check_warm_message(good.SerializeToString())
    with pytest.raises(InvalidRequest):
        bounds.check_warm_message(bytes(MAX_REQUEST_BYTES + 1))
