"""Sampling and pooling parameters of a Submit (protos/pillion/v1/decode.proto).

Gateways and workers pass each as one object; only this module maps their fields to the message's. Some are outside of
``Submit.sampling``, where workers of the last release read them.
"""

from __future__ import annotations

from dataclasses import replace

from pillion.types import PoolingParams, SamplingParams
from pillion.v1.decode_pb2 import Submit, TokenSequence
from pillion.wire.common import sampling_from_pb, sampling_to_pb


def write_sampling(submit: Submit, params: SamplingParams) -> None:
    """Write the resolved parameters of a stream. Raises ValueError if a number does not fit its field."""
    submit.sampling.CopyFrom(sampling_to_pb(replace(params, stop_token_ids=())))
    submit.stop_token_ids.extend(params.stop_token_ids)
    submit.max_tokens = params.max_tokens or 0
    submit.bad_words.extend(TokenSequence(token_ids=one) for one in params.bad_words_token_ids)


def read_sampling(submit: Submit) -> SamplingParams:
    """Read the parameters that :func:`write_sampling` wrote."""
    return replace(
        sampling_from_pb(submit.sampling),
        stop_token_ids=tuple(submit.stop_token_ids),
        max_tokens=submit.max_tokens,
        bad_words_token_ids=tuple(tuple(one.token_ids) for one in submit.bad_words),
    )


def write_pooling(submit: Submit, params: PoolingParams) -> None:
    """Write the parameters of a stream that ends with a vector."""
    submit.pooled = params.rows is None
    if params.rows is not None:
        submit.pooled_first, submit.pooled_rows = params.rows.start, len(params.rows)
    submit.pooled_ids.extend(params.logits_of)
    submit.second_from = params.second_from


def read_pooling(submit: Submit) -> PoolingParams | None:
    """Read the parameters that :func:`write_pooling` wrote, with the position of the last token's row; None for a
    stream that generates."""
    if submit.pooled_rows:
        rows = range(submit.pooled_first, submit.pooled_first + submit.pooled_rows)
    elif submit.pooled:
        rows = range(submit.prompt_tokens - 1, submit.prompt_tokens)
    else:
        return None
    return PoolingParams(rows=rows, logits_of=tuple(submit.pooled_ids), second_from=submit.second_from)
