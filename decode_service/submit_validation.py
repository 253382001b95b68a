"""Checks a Submit before anything is done for it. A gateway has checked its clients' requests already; these checks
keep a broken or older gateway from reaching the step loop."""

from __future__ import annotations

from collections.abc import Iterator

from pillion.errors import FieldViolation, InvalidRequest
from pillion.sampling_ranges import range_violations
from pillion.v1.decode_pb2 import Submit
from pillion.wire.public import sampling_from_pb

ROOT_HASH_BYTES = 32
MAX_STOP_TOKEN_IDS = 1024


def check_submit(submit: Submit, *, vocab_size: int, max_model_len: int) -> None:
    """Raises InvalidRequest with every violation."""
    violations = (*_shape(submit, vocab_size, max_model_len), *_sampling(submit, vocab_size))
    if violations:
        raise InvalidRequest.of(*violations)


def _shape(submit: Submit, vocab_size: int, max_model_len: int) -> Iterator[FieldViolation]:
    total = len(submit.token_ids)
    if not 1 <= total < max_model_len:
        yield FieldViolation("token_ids", f"{total} tokens; from 1 to {max_model_len - 1} can be continued")
    elif max(submit.token_ids) >= vocab_size:
        yield FieldViolation("token_ids", f"an id is outside the vocabulary of {vocab_size}")
    if not 1 <= submit.prompt_tokens <= total:
        yield FieldViolation("prompt_tokens", f"{submit.prompt_tokens} of {total} tokens")
    elif total - submit.prompt_tokens >= submit.max_tokens:
        yield FieldViolation("max_tokens", f"{submit.max_tokens} are generated already, or none are wanted")
    if len(submit.root_hash) != ROOT_HASH_BYTES:
        yield FieldViolation("root_hash", f"{len(submit.root_hash)} bytes; {ROOT_HASH_BYTES} are needed")
    if submit.awaited_blocks > total:
        yield FieldViolation("awaited_blocks", f"{submit.awaited_blocks} blocks cannot hold {total} tokens")
    if len(submit.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        yield FieldViolation("stop_token_ids", f"more than {MAX_STOP_TOKEN_IDS}")


def _sampling(submit: Submit, vocab_size: int) -> Iterator[FieldViolation]:
    """Violations of the sampling fields. A field that an older gateway does not know is unset and does nothing."""
    params = sampling_from_pb(submit.sampling)
    if params.temperature is None or params.top_p is None or params.top_k is None or params.seed is None:
        yield FieldViolation("sampling", "temperature, top_p, top_k and seed must be resolved")
        return
    yield from range_violations(params, vocab_size)
    if not 0 <= (params.min_tokens or 0) <= submit.max_tokens:
        yield FieldViolation("sampling.min_tokens", f"{params.min_tokens} is not in [0, {submit.max_tokens}]")
