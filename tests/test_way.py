"""The walkthrough says what a chat passes on its way to the first native instruction, and the way does not grow."""

from __future__ import annotations

import asyncio
import pathlib
import re
import tempfile

from tests.way import PAGE, render, trace

# What is reached; lower these with the way. The goal of a co-located chat is 72 files and 12 forms to the native
# instruction, and 82 files to the first byte of the answer.
MAX_FILES = {"colocated": 73, "disaggregated": 88}
MAX_ANSWER_FILES = {"colocated": 79, "disaggregated": 91}
MAX_FORMS = {"colocated": 12, "disaggregated": 18}
MAX_CALLS = {"colocated": 4, "disaggregated": 9}


def words(page: str) -> list[str]:
    """The page's words in the alphabet's order: which of two components that work side by side comes first is open."""
    return sorted(re.split(r"[\s,]+", page))


def test_the_walkthrough_matches_the_trace_of_a_chat() -> None:
    with tempfile.TemporaryDirectory(prefix="pil-") as folder:
        found = asyncio.run(trace(pathlib.Path(folder)))
    for way in found:
        assert len(way.files) <= MAX_FILES[way.policy], way.lines()
        assert len(way.files) + len(way.answer_files) <= MAX_ANSWER_FILES[way.policy], way.lines()
        assert len(way.forms) <= MAX_FORMS[way.policy], way.lines()
        assert len(way.calls) <= MAX_CALLS[way.policy], way.lines()
    page = PAGE.read_text()
    assert words(render(page, found)) == words(page), "python -m tests.way --write"
