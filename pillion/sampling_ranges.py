"""The ranges of sampling parameters. The gateway checks its clients' requests against them, a decode worker those of
every gateway."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pillion.errors import FieldViolation
from pillion.types import SamplingParams

MAX_LOGPROBS = 20
# Log probabilities that one request may ask of its prompt: tokens, times each one's own and its alternatives, times
# answers. They take some 150 bytes each in a gateway, and 64 in a response.
MAX_PROMPT_LOGPROBS = 2**18
MAX_LOGIT_BIASES = 1024
# Most tokens that one stream may speculate in one step.
MAX_SPECULATIVE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers from ``low`` to ``high``, both included; with ``above`` ``low`` itself is not."""

    low: float
    high: float
    above: bool = False

    def __contains__(self, value: float) -> bool:
        """Whether ``value`` is in the range. NaN, which compares false with everything, is in none."""
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        return f"{'(' if self.above else '['}{self.low:g}, {self.high:g}]"


RANGES = {
    "temperature": Range(0, 100),
    "top_p": Range(0, 1, above=True),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0, 10, above=True),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "logprobs": Range(0, MAX_LOGPROBS),
    "prompt_logprobs": Range(0, MAX_LOGPROBS),
}
_BIAS = Range(-100, 100)
_INT64 = range(-(2**63), 2**63)


def range_violations(sampling: SamplingParams, vocab_size: int) -> Iterator[FieldViolation]:
    """Every field that is out of its range; a field that is not set is within it. What depends on a request's length or
    on a model's context is not checked here."""
    for name, allowed in RANGES.items():
        value = getattr(sampling, name)
        if value is not None and value not in allowed:
            yield FieldViolation(f"sampling.{name}", f"{value} is not in {allowed}")
    if sampling.top_k is not None and sampling.top_k < -1:
        yield FieldViolation("sampling.top_k", f"{sampling.top_k} is below -1; 0 and -1 mean all tokens")
    if sampling.seed is not None and sampling.seed not in _INT64:
        yield FieldViolation("sampling.seed", "does not fit 64 bits")
    if len(sampling.logit_bias) > MAX_LOGIT_BIASES:
        count = f"{len(sampling.logit_bias)} tokens; at most {MAX_LOGIT_BIASES}"
        yield FieldViolation("sampling.logit_bias", count)
        return
    for token_id, bias in sampling.logit_bias.items():
        if not 0 <= token_id < vocab_size:
            yield FieldViolation(f"sampling.logit_bias[{token_id}]", f"{token_id} is not in [0, {vocab_size})")
        elif bias not in _BIAS:
            yield FieldViolation(f"sampling.logit_bias[{token_id}]", f"{bias} is not in {_BIAS}")
