"""Quotas without refill while a test spends them: the clock of the token buckets in Redis stands still."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from pillion.kvstore.index import redis_link

_SCRIPT = "take_tokens"


@contextlib.contextmanager
def standing_quotas() -> Iterator[None]:
    """Stop the clock of the buckets for connections to Redis within the block."""
    real = redis_link.script_text
    text = real(_SCRIPT).replace(b"= now_ms(),", b"= 1e12,")
    assert text != real(_SCRIPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis_link, "script_text", lambda name: text if name == _SCRIPT else real(name))
        # Digest of the current text, not the cached one.
        patch.setattr(redis_link, "_script_sha", redis_link._script_sha.__wrapped__)
        yield
