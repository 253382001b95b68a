"""Defines the ranges of sampling parameters. The gateway checks its clients' requests against them, and a decode worker
checks the requests of every gateway."""

from __future__ import annotations

from collections.abc import Iterator

from pillion.errors import FieldViolation
from pillion.types import SAMPLING_OPTIONS, Range, SamplingParams

# One request may ask for this many log probabilities of its prompt: tokens, times each token's own and its
# alternatives, times answers. Each takes some 150 bytes in a gateway, and 64 in a response.
MAX_PROMPT_LOGPROBS = 2**18
MAX_LOGIT_BIASES = 1024
# One stream may speculate at most this many tokens in one step.
MAX_SPECULATIVE_TOKENS = 16


_BIAS = Range(-100, 100)


def range_violations(sampling: SamplingParams, vocab_size: int) -> Iterator[FieldViolation]:
    """Yields every field that is out of its range; a field that is not set is within it. What depends on a request's
    length or on a model's context is not checked here."""
    for name, option in SAMPLING_OPTIONS.items():
        value = getattr(sampling, name)
        if value is not None and option.allowed is not None and value not in option.allowed:
            yield FieldViolation(f"sampling.{name}", option.allowed.complaint(value))
    if len(sampling.logit_bias) > MAX_LOGIT_BIASES:
        count = f"{len(sampling.logit_bias)} tokens; at most {MAX_LOGIT_BIASES}"
        yield FieldViolation("sampling.logit_bias", count)
        return
    for token_id, bias in sampling.logit_bias.items():
        if not 0 <= token_id < vocab_size:
            yield FieldViolation(f"sampling.logit_bias[{token_id}]", f"{token_id} is not in [0, {vocab_size})")
        elif bias not in _BIAS:
            yield FieldViolation(f"sampling.logit_bias[{token_id}]", f"{bias} is not in {_BIAS}")
