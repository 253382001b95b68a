"""Quotas that stay as they are while a test spends them: the clock of the token buckets in Redis stands still."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from pillion.kvstore.index import redis_link

_SCRIPT = "take_tokens"


@contextlib.contextmanager
def standing_quotas() -> Iterator[None]:
    """No time passes for the buckets of whoever connects to Redis in here."""
    real = redis_link.script_text
    text = real(_SCRIPT).replace(b"= now_ms(),", b"= 1e12,")
    assert text != real(_SCRIPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis_link, "script_text", lambda name: text if name == _SCRIPT else real(name))
        # The digest of the text as it is now, not the one that was kept.
        patch.setattr(redis_link, "_script_sha", redis_link._script_sha.__wrapped__)
        yield
