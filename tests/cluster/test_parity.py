"""A subset of the parity matrix (parity.py): every gateway and state of the cache, and in the long test every pair of
values and nearly every prompt.

`make parity` runs all of the matrix.
"""

from __future__ import annotations

import pathlib
import tempfile

import pytest

from tests.cluster.parity import CHAT, LONG, ParityCase, full_matrix, pairwise, run_cases
from tests.support.covering import each_value, few_and_rest

# Every value but the single prompts; one of them is a chat.
FEW = each_value(
    [case for case in pairwise() if case.prompt not in LONG],
    lambda case: (case.policy, case.chunk_size, case.warm, case.prompt in CHAT),
)


def test_subset_covers_every_pair() -> None:
    def pairs(cases: list[ParityCase]) -> set[object]:
        found: set[object] = set()
        for case in cases:
            found |= {(case.policy, case.chunk_size), (case.policy, case.warm), (case.chunk_size, case.warm)}
        return found

    assert pairs(pairwise()) == pairs(full_matrix())
    assert {case.prompt for case in pairwise()} == {case.prompt for case in full_matrix()} - {"3000 tokens"}


@pytest.mark.model
@pytest.mark.parametrize("cases", few_and_rest(FEW, pairwise(), 1200))
async def test_greedy_tokens_are_transformers(cases: list[ParityCase]) -> None:
    with tempfile.TemporaryDirectory(prefix="pil-") as folder:
        results = await run_cases(cases, pathlib.Path(folder))
    assert [f"{case}: {wrong}" for case, wrong in results if wrong] == []
