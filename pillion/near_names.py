"""Suggests a known name for a mistyped one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_COMPARED_CHARS = 100


def did_you_mean(name: str, known: Iterable[str], skip: int = 0) -> str:
    """Return an error's suggestion for a name close to a known one; "" if none is close. The first ``skip`` letters,
    with which all known names begin, are not compared."""
    close = difflib.get_close_matches(name[skip:][:MAX_COMPARED_CHARS], [one[skip:] for one in known], 1)
    return f"; did you mean {name[:skip]}{close[0]}?" if close else ""
