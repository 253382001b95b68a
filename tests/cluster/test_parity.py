"""A subset of the parity matrix (parity.py): every pair of values and nearly every prompt.

`make parity` runs all of the matrix. Without a real model, tests/cluster/test_paths.py has the same in `make test`.
"""

from __future__ import annotations

import pathlib
import tempfile

import pytest

from tests.cluster.parity import ParityCase, full_matrix, pairwise, run_cases


def test_the_pairwise_subset_covers_every_pair() -> None:
    def pairs(cases: list[ParityCase]) -> set[object]:
        found: set[object] = set()
        for case in cases:
            found |= {(case.policy, case.chunk_size), (case.policy, case.warm), (case.chunk_size, case.warm)}
        return found

    assert pairs(pairwise()) == pairs(full_matrix())
    assert {case.prompt for case in pairwise()} == {case.prompt for case in full_matrix()} - {"3000 tokens"}


@pytest.mark.model
@pytest.mark.long
@pytest.mark.timeout(1200)
async def test_greedy_tokens_match_transformers() -> None:
    with tempfile.TemporaryDirectory(prefix="pil-") as folder:
        results = await run_cases(pairwise(), pathlib.Path(folder))
    assert [f"{case}: {wrong}" for case, wrong in results if wrong] == []
