"""A subset of the matrix of structured answers (structured.py): every pair of values but of shapes, and every shape.

A few cases run on one cluster, with guesses and the kill of a decode worker; the rest is a long test. `make parity`
runs all of the matrix.
"""

from __future__ import annotations

from dataclasses import astuple

import pytest

from tests.cluster.structured import SHAPES, StructuredCase, full_matrix, pairwise, run_structured
from tests.support.covering import each_value, few_and_rest, pairs_of

FEW_TROUBLES = ("none", "decode worker killed")
FEW = each_value([case for case in pairwise() if case.guesses and case.trouble in FEW_TROUBLES], astuple)


def _pairs(cases: list[StructuredCase]) -> set[object]:
    return {pair for case in cases for pair in pairs_of(astuple(case)[1:])}


def test_subset_covers_every_pair_and_every_shape() -> None:
    assert _pairs(pairwise()) == _pairs(full_matrix())
    for shape in SHAPES:
        assert len({case.trouble for case in pairwise() if case.shape == shape}) > 1


@pytest.mark.cluster
@pytest.mark.parametrize("cases", few_and_rest(FEW, pairwise(), 900))
def test_answers_keep_their_shape_under_every_trouble(cases: list[StructuredCase]) -> None:
    results = run_structured(cases)
    assert [f"{case}: {wrong}" for case, wrong in results if wrong] == []
    assert len(results) == len(cases)
