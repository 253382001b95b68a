"""Suggests a known name for a mistyped one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Characters of a name that are compared, which takes time by their square.
MAX_COMPARED_CHARS = 100


def did_you_mean(name: str, known: Iterable[str], skip: int = 0) -> str:
    """Return what an error says of a name that is nearly a known one; "" where no known name is near. The first
    ``skip`` letters are not compared, because all known names begin with them."""
    close = difflib.get_close_matches(name[skip:][:MAX_COMPARED_CHARS], [one[skip:] for one in known], 1)
    return f"; did you mean {name[:skip]}{close[0]}?" if close else ""
