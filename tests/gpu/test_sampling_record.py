"""The record of a row on the device: all parameters of its distribution."""

from __future__ import annotations

from tests.support.gpu import DEVICE  # isort: skip  (before the kernels)

import numpy as np
import pytest

from pillion.kernels.gpu.sampling.sampling_record import pack_rows
from pillion.kernels.step import SamplingRows
from pillion.types import SAMPLING_OPTIONS, SamplingParams

OF_ROWS = {name: option for name, option in SAMPLING_OPTIONS.items() if option.of_rows}


def record(**changed: float) -> np.ndarray:
    """The record of a row that draws, with every option of rows in the middle of its range except those that change."""
    assert DEVICE
    middle = {name: 2 if one.whole else (one.allowed.low + one.allowed.high) / 2 for name, one in OF_ROWS.items()}
    return pack_rows(SamplingRows.of([SamplingParams(**{**middle, **changed})], [1], [0]))


@pytest.mark.parametrize("name", OF_ROWS)
def test_every_row_option_is_in_the_record(name):
    """A GPU would ignore it."""
    assert not np.array_equal(record(**{name: 3 if OF_ROWS[name].whole else OF_ROWS[name].allowed.high}), record())
