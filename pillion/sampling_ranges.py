"""Defines the ranges of sampling parameters. The gateway checks its clients' requests against them, and a decode worker
checks the requests of every gateway."""

from __future__ import annotations

from collections.abc import Iterator

from pillion.errors import FieldViolation
from pillion.types import MAX_LOGPROBS, SAMPLING_OPTIONS, Range, SamplingParams

# One request may ask for this many log probabilities of its prompt: tokens, times each token's own and its
# alternatives, times answers. Each takes some 150 bytes in a gateway, and 64 in a response.
MAX_PROMPT_LOGPROBS = 2**18
MAX_LOGIT_BIASES = 1024
# A request may list so many tokens that alone are chosen.
MAX_ALLOWED_TOKEN_IDS = 2**14
# The bad words of a request are so many sequences of tokens, with a space before them and without, of at most so many
# tokens each.
MAX_BAD_SEQUENCES = 512
MAX_BAD_TOKENS = 2048
# One stream may speculate at most this many tokens in one step.
MAX_SPECULATIVE_TOKENS = 16


_BIAS = Range(-100, 100)


def range_violations(sampling: SamplingParams, vocab_size: int) -> Iterator[FieldViolation]:
    """Yields every field that is out of its range; a field that is not set is within it. What depends on a request's
    length or on a model's context is not checked here."""
    for name, option in SAMPLING_OPTIONS.items():
        value = getattr(sampling, name)
        if value == -1 and name in ("logprobs", "prompt_logprobs"):
            text = f"-1 asks for all {vocab_size} tokens of the vocabulary; at most {MAX_LOGPROBS} are reported"
            yield FieldViolation(f"sampling.{name}", text)
        elif value is not None and option.allowed is not None and value not in option.allowed:
            yield FieldViolation(f"sampling.{name}", option.allowed.complaint(value))
    yield from _allowed_violations(sampling.allowed_token_ids, vocab_size)
    if len(sampling.logit_bias) > MAX_LOGIT_BIASES:
        count = f"{len(sampling.logit_bias)} tokens; at most {MAX_LOGIT_BIASES}"
        yield FieldViolation("sampling.logit_bias", count)
        return
    for token_id, bias in sampling.logit_bias.items():
        if not 0 <= token_id < vocab_size:
            yield FieldViolation(f"sampling.logit_bias[{token_id}]", f"{token_id} is not in [0, {vocab_size})")
        elif bias not in _BIAS:
            yield FieldViolation(f"sampling.logit_bias[{token_id}]", f"{bias} is not in {_BIAS}")


def _allowed_violations(token_ids: tuple[int, ...], vocab_size: int) -> Iterator[FieldViolation]:
    field = "sampling.allowed_token_ids"
    if len(token_ids) > MAX_ALLOWED_TOKEN_IDS:
        yield FieldViolation(field, f"{len(token_ids)} ids; at most {MAX_ALLOWED_TOKEN_IDS}")
    elif token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        for n, token_id in enumerate(token_ids):
            if not 0 <= token_id < vocab_size:
                yield FieldViolation(f"{field}[{n}]", f"{token_id} is not in [0, {vocab_size})")
