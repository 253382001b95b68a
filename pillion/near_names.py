"""Suggests a known name for a mistyped one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str], skip: int = 0) -> str:
    """Return "; did you mean ..." with the known name that is closest to ``name``, "" if none is close. The first
    ``skip`` characters, which all known names share, are not compared."""
    # The beginning is enough, and comparing takes quadratic time.
    close = difflib.get_close_matches(name[skip:][:100], [other[skip:] for other in known], 1)
    return f"; did you mean {name[:skip]}{close[0]}?" if close else ""
