"""A pairwise subset of the matrix of structured answers (structured.py); `make parity` runs all of it."""

from __future__ import annotations

import pytest

from tests.cluster.structured import full_matrix, pairwise, run_structured
from tests.support.covering import pairs_of


def _pairs(cases: list) -> set:
    rows = [(case.shape, case.policy, case.answers, case.guesses, case.prefix, case.trouble) for case in cases]
    return {pair for row in rows for pair in pairs_of(row)}


def test_subset_covers_every_pair() -> None:
    assert _pairs(pairwise()) == _pairs(full_matrix())


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_answers_keep_their_shape_under_every_trouble() -> None:
    results = run_structured(pairwise())
    assert [f"{case}: {wrong}" for case, wrong in results if wrong] == []
    assert len(results) == len(pairwise())
