"""The embedding kernel against plain indexing."""

from __future__ import annotations

from tests.support.gpu import DEVICE, NATIVE, rounded  # isort: skip  (before the kernels)

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.testbed import gpu_reference
from pillion.errors import Internal
from pillion.kernels.gpu.rows.embedding import embed
from tests.support.examples import examples


@given(
    tokens=st.lists(st.integers(-3, 36), min_size=1, max_size=9),
    hidden=st.sampled_from([8, 64, 1030]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    scale=st.sampled_from([1.0, 7.5]),
    placed=st.booleans(),
)
@settings(max_examples=examples(20))
def test_rows_are_those_of_known_tokens_and_of_the_last_steps_samples(tokens, hidden, dtype, scale, placed):
    torch.manual_seed(0)
    table = torch.randn(37, hidden, device=DEVICE).to(dtype)
    sampled = torch.tensor([5, -1, 36], dtype=torch.int32, device=DEVICE)
    ids = torch.tensor(tokens, dtype=torch.int32, device=DEVICE)
    out = torch.empty(len(tokens), hidden, dtype=dtype, device=DEVICE)
    rows = torch.randint(11, (len(tokens),), dtype=torch.int32).to(DEVICE)
    positions = (rows, torch.randn(11, hidden, device=DEVICE).to(dtype)) if placed else None
    embed(ids, sampled, table, out, scale, positions=positions)
    wanted = gpu_reference.embed(ids, sampled, table, scale, positions)
    if (scale == 1.0 and not placed) or NATIVE:
        assert torch.equal(out, wanted)
    # A sum may be near 0 though its parts are not.
    tolerance = rounded(dtype, 2)
    torch.testing.assert_close(out, wanted, rtol=tolerance["rtol"], atol=10 * tolerance["atol"])


def test_ranks_add_a_positions_row_once():
    table, positions = (torch.randn(8, 16, device=DEVICE) for _ in range(2))
    ids, rows = (torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in ([0, 3, 5, 7], [2, 0, 7, 1]))
    parts = [torch.empty(4, 16, device=DEVICE) for _ in range(2)]
    for out, tokens in zip(parts, (range(5), range(5, 8)), strict=True):
        embed(ids, ids, table[tokens.start : tokens.stop], out, tokens=tokens, positions=(rows, positions))
    assert torch.equal(sum(parts), gpu_reference.embed(ids, ids, table, positions=(rows, positions)))


def test_misshapen_tensors_are_refused():
    table = torch.zeros(4, 8, device=DEVICE)
    ids = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    for out in (torch.zeros(3, 8), torch.zeros(2, 8, dtype=torch.float16), torch.zeros(8, 2).T):
        with pytest.raises(Internal):
            embed(ids, ids, table, out.to(DEVICE))
    out = torch.zeros(2, 8, device=DEVICE)
    for rows, added in ((ids[:1], table), (ids, table[:, :4]), (ids, table.half())):
        with pytest.raises(Internal):
            embed(ids, ids, table, out, positions=(rows, added))
