"""Each field of a decode worker's message is read, whatever else the message contains."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pillion.gateway.links.decode_link import DecodeDelta, batch_from_pb
from pillion.types import FinishReason, TokenLogprob
from pillion.v1 import common_pb2, decode_pb2

LOGPROB = common_pb2.TokenLogprob(token_id=3, logprob=-0.5)
READ_LOGPROB = (TokenLogprob(3, -0.5),)
# Fields of a message, and of the delta read from it. A queue position that comes with tokens is obsolete.
SAID: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tokens": ({"token_ids": [5, 6]}, {"token_ids": (5, 6)}),
    "end": ({"finish_reason": common_pb2.FINISH_REASON_STOP}, {"finish_reason": FinishReason.STOP}),
    "error": ({"error": decode_pb2.DecodeError(code=14)}, {"error": decode_pb2.DecodeError(code=14)}),
    "timings": ({"timings": decode_pb2.DecodeTimings()}, {"timings": decode_pb2.DecodeTimings()}),
    "logprobs": ({"logprobs": [LOGPROB]}, {"logprobs": READ_LOGPROB}),
    "prompt_logprobs": ({"prompt_logprobs": [LOGPROB]}, {"prompt_logprobs": READ_LOGPROB}),
    "ticket": ({"pinned_blocks": 0}, {"pinned_blocks": 0}),
    "chain": ({"pinned_blocks": 4}, {"pinned_blocks": 4}),
    "queued": ({"queued": common_pb2.Queued(position=2)}, {"queued": 2}),
    "vector": (
        {"finish_reason": common_pb2.FINISH_REASON_STOP, "vector": b"1234"},
        {"finish_reason": FinishReason.STOP, "vector": b"1234"},
    ),
}


def read(names: set[str]) -> tuple[DecodeDelta, DecodeDelta]:
    message, expected = decode_pb2.DecodeDelta(key=9), DecodeDelta(9)
    for name in sorted(names):
        said, heard = SAID[name]
        message.MergeFrom(decode_pb2.DecodeDelta(**said))
        expected = expected._replace(**heard)
    (found,) = batch_from_pb(decode_pb2.DecodeBatch(deltas=[message]))
    return found, expected


@pytest.mark.parametrize("name", sorted(SAID.keys() - {"queued"}))
def test_each_delta_field_is_parsed_alongside_tokens(name: str) -> None:
    found, expected = read({"tokens", name})
    assert found == expected


@given(st.sets(st.sampled_from(sorted(SAID))))
def test_any_combination_of_delta_fields_is_parsed(names: set[str]) -> None:
    found, expected = read(names)
    assert found._replace(queued=None) == expected._replace(queued=None)
    assert found.queued == expected.queued or names == {"tokens", "queued"}
