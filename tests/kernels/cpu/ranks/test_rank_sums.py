"""Sums over ranks, in the order of the ranks; the waits are tested with whole models (tests/engine/ranks)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pillion.kernels.cpu.ranks.rank_sums import ARRIVED, RANK_LINE_BYTES, MeetRanks, SumRanks, words_bytes
from pillion.kernels.cpu.runtime.program import CpuStepRecord, aligned_bytes
from tests.support.kernel_runner import runner_of

RANKS, ROOM, STRIDE = 3, 5, 9 * 64
SUMS = [SumRanks(RANKS, add) for add in (False, True)]
runner = runner_of([*SUMS, MeetRanks(RANKS)])


def step_of(rows):
    step = CpuStepRecord()
    step.count("num_tokens", rows)
    return step


def collective(naps=1):
    return np.array([6, naps, 1000, ROOM * STRIDE], np.int64)


def arrived(words):
    return words.view(np.int64)[(RANK_LINE_BYTES + ARRIVED) // 8 :: RANK_LINE_BYTES // 8]


def words_of(*phases):
    words = aligned_bytes(words_bytes(RANKS))
    arrived(words)[:] = phases
    return words


@pytest.mark.parametrize("spec", SUMS)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("width", [16, 144])
def test_partials_are_added_in_the_order_of_the_ranks(runner, spec, threads, width):
    rows, factor = 4, 0.37
    partials = torch.randn(RANKS, ROOM, STRIDE // 4, generator=torch.Generator().manual_seed(1)) * 1000
    out = torch.full((rows + 1, 160), 3.0)
    words = words_of(7, 6, 8)
    values = {"partials": partials, "out": out, "rank": 1, "number": 1, "width": width, "factor": factor}
    values |= {"row_stride": STRIDE, "out_stride": 160 * 4, "words": words, "collective": collective()}
    runner.run(spec, values, step_of(rows), threads)
    total = (partials[0] + partials[1]) + partials[2]
    wanted = total[:rows, :width].double() * torch.tensor(factor).double() + (3.0 if spec.add else 0.0)
    assert torch.equal(out[:rows, :width], wanted.float())
    assert (out[rows:] == 3).all()
    assert (out[:, width:] == 3).all()
    assert arrived(words).tolist() == [7, 7, 8]


def test_a_timeout_aborts_all_waits(runner):
    """Rank 0 may sleep once here; rank 1 never arrives, and waits end at once after an abort."""
    words = words_of(0, 6, 7)
    step = step_of(1)
    runner.run(MeetRanks(RANKS), {"rank": 0, "number": 1, "words": words, "collective": collective()}, step)
    assert words.view(np.int64)[0] == 1
    runner.run(MeetRanks(RANKS), {"rank": 0, "number": 2, "words": words, "collective": collective(2**62)}, step)
    assert arrived(words).tolist() == [8, 6, 7]
