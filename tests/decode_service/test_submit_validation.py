"""A decode worker refuses impossible submits by itself, whatever its gateway let through."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from pillion.engine.streams.stream_session import check_submit
from pillion.errors import InvalidRequest
from pillion.types import SamplingParams
from pillion.v1.common_pb2 import Flow
from pillion.v1.decode_pb2 import Submit
from pillion.wire.common import sampling_to_pb

RESOLVED = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, seed=1)
GOOD: dict[str, Any] = {
    "key": 1,
    "request_id": "r",
    "attempt": 1,
    "ticket_id": 2,
    "root_hash": b"x" * 32,
    "token_ids": (1, 2, 3),
    "prompt_tokens": 3,
    "stop_token_ids": (2,),
    "max_tokens": 5,
}


def fields_of(flow: bytes = b"", **options: Any) -> list[str]:
    try:
        submit = Submit(**GOOD, sampling=sampling_to_pb(replace(RESOLVED, **options)), flow=Flow(key=flow))
        check_submit(submit, 4, 97, 64)
    except InvalidRequest as error:
        return [violation.field for violation in error.violations]
    return []


@pytest.mark.parametrize(
    "options",
    [
        # An older gateway omits unknown fields.
        {},
        {"min_p": 1.0, "repetition_penalty": 10.0, "presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"logit_bias": {0: 100.0, 96: -100.0}, "min_tokens": 5, "logprobs": 20, "n": 128, "best_of": 128},
    ],
)
def test_valid_sampling_options_are_accepted(options: dict[str, Any]) -> None:
    assert fields_of(**options) == []


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": math.nan},
        {"temperature": 100.5},
        {"top_p": 0.0},
        {"top_k": -2},
        {"min_p": math.nan},
        {"min_p": -0.5},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": math.inf},
        {"presence_penalty": math.nan},
        {"frequency_penalty": -2.5},
        {"logprobs": 21},
        {"logprobs": -1},
        {"min_tokens": 6},
        {"min_tokens": -1},
        {"logit_bias": dict.fromkeys(range(1025), 0.0)},
    ],
    ids=repr,
)
def test_invalid_sampling_options_are_named(options: dict[str, Any]) -> None:
    assert fields_of(**options) == [f"sampling.{name}" for name in options]


def test_invalid_logit_bias_entries_are_named() -> None:
    assert sorted(fields_of(logit_bias={97: 1.0, -1: 1.0, 3: math.nan})) == [
        "sampling.logit_bias[-1]",
        "sampling.logit_bias[3]",
        "sampling.logit_bias[97]",
    ]


def test_the_length_of_a_flow_key_is_limited() -> None:
    assert fields_of(flow=b"x" * 32) == []
    assert fields_of(flow=b"x" * 33) == ["flow.key"]


def test_unresolved_sampling_options_are_refused() -> None:
    for name in ("temperature", "top_p", "top_k", "seed"):
        assert fields_of(**{name: None}) == ["sampling"]
