"""Edits on the device against the CPU's, which are checked against transformers: the same logits, bit by bit."""

from __future__ import annotations

from tests.support.gpu import DEVICE, NATIVE  # isort: skip  (before the kernels)

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.engine.sampling.sampler import edited
from pillion.errors import Internal
from pillion.kernels.gpu.sampling.sampling_edits import apply_edits, keep_raw
from pillion.kernels.gpu.sampling.sampling_record import EDIT_FIELDS, EditPacker
from tests.support.examples import examples
from tests.support.sampling import RowParameters, rows_of

VOCAB = 300
# numpy warns about infinities.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")

ids = st.lists(st.integers(0, VOCAB - 1), max_size=40)
edits = st.builds(
    RowParameters,
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), max_size=20),
    seen=ids,
    repetition=st.sampled_from([1.0, 0.1, 1.2, 10.0]),
    answered=ids,
    presence=st.sampled_from([0.0, -2.0, 0.5]),
    frequency=st.sampled_from([0.0, -2.0, 0.3]),
    banned=st.lists(st.integers(0, VOCAB + 3), max_size=4),
)


@settings(max_examples=examples(200 if NATIVE else 60))
@given(batch=st.lists(edits, min_size=1, max_size=4), seed=st.integers(0, 1000), odd=st.lists(st.integers(0, 299)))
def test_edited_logits_match_the_cpu_bit_by_bit(batch, seed, odd):
    logits = torch.randn(len(batch), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    logits[0, odd[:3]], logits[-1, odd[3:6]], logits[-1, odd[6:]] = torch.nan, torch.inf, -torch.inf
    rows, packer = rows_of(batch), EditPacker(VOCAB)
    # The packer's state of an earlier step has no effect.
    packer.pack(rows_of(batch[::-1]).edits)
    record = packer.pack(rows.edits)
    places = record[:, 0].astype(np.int64) * VOCAB + record[:, 1]
    assert len(np.unique(places)) == len(places)
    table = logits.clone().to(DEVICE)
    apply_edits(table, torch.from_numpy(record).to(DEVICE))
    with edited(logits.numpy(), rows.edits), np.errstate(all="ignore"):
        assert np.array_equal(table.cpu().numpy(), logits.numpy(), equal_nan=True)


def test_empty_edits_change_nothing_and_misshapen_ones_are_refused():
    logits, packer = torch.randn(2, VOCAB, device=DEVICE), EditPacker(VOCAB)
    before = logits.clone()
    none = torch.from_numpy(packer.pack(())).to(DEVICE)
    assert none.shape == (0, EDIT_FIELDS)
    apply_edits(logits, none)
    assert torch.equal(logits, before)
    record = torch.zeros(1, EDIT_FIELDS, dtype=torch.int32, device=DEVICE)
    for table, edit in ((logits.half(), record), (logits, record[:, :3]), (logits, record.long())):
        with pytest.raises(Internal):
            apply_edits(table, edit)


def test_raw_logits_are_kept_before_they_are_edited():
    logits = torch.randn(4, VOCAB, device=DEVICE).to(torch.bfloat16)
    kept = torch.zeros(2, VOCAB, device=DEVICE)
    keep_raw(logits, torch.tensor([3, 1], device=DEVICE), kept)
    assert torch.equal(kept, logits[[3, 1]].float())
