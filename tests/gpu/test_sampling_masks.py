"""Grammar masks on the device against plain torch, bit by bit, and the sampler after them against the CPU's."""

from __future__ import annotations

from tests.support.gpu import DEVICE, NATIVE  # isort: skip  (before the kernels)

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.testbed.gpu_reference import masked
from pillion.engine.sampling.sampler import sample
from pillion.errors import Internal
from pillion.kernels.gpu.sampling.gpu_sampling import choose
from pillion.kernels.gpu.sampling.sampling_device import SamplerScratch
from pillion.kernels.gpu.sampling.sampling_masks import apply_masks
from pillion.kernels.gpu.sampling.sampling_record import pack_rows
from tests.support.examples import examples
from tests.support.gpu_sampling import nearly_tie
from tests.support.sampling import RowParameters, packed_bits, rows_of

# numpy warns about infinities.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
# Neither is a multiple of a word, and the second exceeds one program's part.
VOCABULARIES = (300, 5001)


def words_of(allowed: np.ndarray) -> torch.Tensor:
    """Pack bool [M, V] for the kernel: int32 [M, ceil(V / 32)]."""
    return torch.from_numpy(packed_bits(allowed).view(np.int32))


@settings(max_examples=examples(100 if NATIVE else 15))
@given(
    vocab=st.sampled_from(VOCABULARIES),
    seed=st.integers(0, 1000),
    density=st.sampled_from([0.0, 0.002, 0.5, 0.999, 1.0]),
    rows=st.lists(st.integers(0, 5), unique=True, max_size=6),
    odd=st.lists(st.integers(0, 299), min_size=3, max_size=3),
)
def test_masked_logits_match_torch_bit_by_bit(vocab, seed, density, rows, odd):
    draw = np.random.default_rng(seed)
    logits = torch.from_numpy(draw.normal(0, 3, (6, vocab)).astype(np.float32))
    logits[:, odd[0]], logits[:, odd[1]], logits[:, odd[2]] = torch.nan, torch.inf, -torch.inf
    allowed = draw.random((len(rows), vocab)) < density
    masks, numbers = words_of(allowed), torch.tensor(rows, dtype=torch.int32)
    assert torch.equal(masked(torch.zeros(6, vocab), masks, numbers)[numbers.long()] == 0, torch.from_numpy(allowed))
    found = logits.clone().to(DEVICE)
    apply_masks(found, masks.to(DEVICE), numbers.to(DEVICE))
    torch.testing.assert_close(found.cpu(), masked(logits, masks, numbers), rtol=0, atol=0, equal_nan=True)


def test_masks_of_absent_rows_are_ignored_and_misshapen_ones_refused():
    logits = torch.randn(2, 300, device=DEVICE)
    before, masks = logits.clone(), torch.zeros(2, 10, dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([-1, 2], dtype=torch.int32, device=DEVICE)
    apply_masks(logits, masks[:0], rows[:0])
    apply_masks(logits, masks, rows)
    assert torch.equal(logits, before)
    for table, words, numbers in (
        (logits.half(), masks, rows),
        (logits, masks[:, :9].contiguous(), rows),
        (logits, masks[:1], rows),
        (logits, masks, rows.long()),
    ):
        with pytest.raises(Internal):
            apply_masks(table, words, numbers)


SEEDS = range(2 if NATIVE else 1)
KINDS = (
    RowParameters(temperature=0.0),
    RowParameters(temperature=0.8),
    RowParameters(temperature=1.0, top_k=5),
    RowParameters(temperature=1.3, top_p=0.7),
    RowParameters(temperature=1.0, top_k=40, top_p=0.9, min_p=0.05),
)


@pytest.mark.parametrize("permitted", [1, 3, 4000], ids=["forced", "few", "most"])
def test_masked_rows_sample_like_the_cpu(permitted):
    vocab, draw = VOCABULARIES[1], np.random.default_rng(permitted)
    kinds = [RowParameters(**{**vars(kind), "seed": seed, "position": 7}) for kind in KINDS for seed in SEEDS]
    logits = torch.from_numpy(draw.normal(0, 3, (len(kinds), vocab)).astype(np.float32))
    allowed = np.zeros((len(kinds), vocab), bool)
    for row in allowed:
        row[draw.choice(vocab, permitted, replace=False)] = True
    masks, numbers = words_of(allowed), torch.arange(len(kinds), dtype=torch.int32)
    rows, table = rows_of(kinds), logits.clone().to(DEVICE)
    apply_masks(table, masks.to(DEVICE), numbers.to(DEVICE))
    out = torch.zeros(len(kinds), dtype=torch.int32, device=DEVICE)
    record, scratch = torch.from_numpy(pack_rows(rows)).to(DEVICE), SamplerScratch(len(kinds), vocab, DEVICE)
    choose(table, record, out, scratch)
    expected = masked(logits, masks, numbers)
    for row, (found, wanted) in enumerate(zip(out.tolist(), sample(expected, rows).token_ids, strict=True)):
        assert allowed[row, found]
        assert found == wanted or nearly_tie(expected[row].numpy(), kinds[row], found, wanted)
