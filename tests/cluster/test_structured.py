"""A subset of the matrix of structured answers (structured.py): every pair of values but of shapes, and every shape.

`make parity` runs all of the matrix.
"""

from __future__ import annotations

from dataclasses import astuple

import pytest

from tests.cluster.structured import SHAPES, StructuredCase, full_matrix, pairwise, run_structured
from tests.support.covering import pairs_of


def _pairs(cases: list[StructuredCase]) -> set[object]:
    return {pair for case in cases for pair in pairs_of(astuple(case)[1:])}


def test_the_subset_covers_every_pair_and_output_constraint() -> None:
    assert _pairs(pairwise()) == _pairs(full_matrix())
    for shape in SHAPES:
        assert len({case.trouble for case in pairwise() if case.shape == shape}) > 1


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.timeout(900)
def test_structured_answers_stay_valid_in_every_case() -> None:
    results = run_structured(pairwise())
    assert [f"{case}: {wrong}" for case, wrong in results if wrong] == []
    assert len(results) == len(pairwise())
