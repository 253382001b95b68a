"""What a span must look like before anything is done for it."""

from __future__ import annotations

from collections.abc import Iterator

from pillion.errors import FieldViolation, InvalidRequest
from pillion.wire.prefill import Span

PARENT_HASH_BYTES = 32


def check_span(span: Span, *, block_size: int, vocab_size: int, max_model_len: int) -> None:
    """Raises InvalidRequest with every violation."""
    violations = tuple(_violations(span, block_size, vocab_size, max_model_len))
    if violations:
        raise InvalidRequest.of(*violations)


def _violations(span: Span, block_size: int, vocab_size: int, max_model_len: int) -> Iterator[FieldViolation]:
    total = len(span.token_ids)
    if not total or total % block_size:
        yield FieldViolation("token_ids", f"{total} tokens; a multiple of the block size {block_size} is needed")
    elif max(span.token_ids) >= vocab_size:
        yield FieldViolation("token_ids", f"an id is outside the vocabulary of {vocab_size}")
    if span.start_tokens % block_size:
        yield FieldViolation("start_tokens", f"{span.start_tokens} is no multiple of the block size {block_size}")
    if span.split_tokens >= max_model_len:
        yield FieldViolation("token_ids", f"the span ends at {span.split_tokens}, the model's end is {max_model_len}")
    if any(count == 0 or count % block_size for count in span.chunk_tokens):
        yield FieldViolation("chunk_tokens", f"each must be a multiple of the block size {block_size}")
    elif sum(span.chunk_tokens) != total:
        yield FieldViolation("chunk_tokens", f"they add up to {sum(span.chunk_tokens)}, the span has {total} tokens")
    if len(span.parent_hash) != PARENT_HASH_BYTES:
        yield FieldViolation("parent_hash", f"{len(span.parent_hash)} bytes; {PARENT_HASH_BYTES} are needed")
