"""RMS norms and the residual stream against torch, and their reference against the decoder's own."""

from __future__ import annotations

from tests.support.gpu import DEVICE, NATIVE, rounded  # isort: skip  (before the kernels)

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.testbed import gpu_reference as reference
from pillion.engine.models import layers
from pillion.errors import Internal
from pillion.kernels.gpu.experts.expert_sums import PairResults, add_up
from pillion.kernels.gpu.rows.norms import MAX_COLUMNS, add_rms_norm, rms_norm
from tests.support.examples import examples
from tests.support.guarded import Guarded

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COLUMNS = (1, 5, 16, 80, 130, 576, 1030, 2048, 2560)
EPS = 1e-3


def made_weight(columns: int, dtype: torch.dtype, wide: bool) -> torch.Tensor:
    return (torch.randn(columns) + 1).to(torch.float32 if wide else dtype).to(DEVICE)


def tolerance(dtype: torch.dtype, roundings: int) -> dict[str, float]:
    """Tolerance for values of size 4: a device's square root and the order of its sums differ by some float32 units."""
    slack = rounded(dtype, roundings * (8 if dtype == torch.float32 else 1))
    return {"rtol": slack["rtol"], "atol": 4 * slack["atol"]}


@given(
    rows=st.integers(1, 9),
    columns=st.sampled_from(COLUMNS),
    before=st.sampled_from([0, 16, 3]),
    after=st.sampled_from([0, 16, 3]),
    dtype=st.sampled_from(DTYPES),
    wide=st.booleans(),
    in_place=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(60))
def test_rows_of_a_wider_buffer_are_normed(rows, columns, before, after, dtype, wide, in_place, seed):
    torch.manual_seed(seed)
    buffer = (3 * torch.randn(rows, before + columns + after)).to(dtype).to(DEVICE)
    was = buffer.clone()
    part = slice(before, before + columns)
    weight = made_weight(columns, dtype, wide)
    expected = reference.rms_norm(was[:, part], weight, EPS, wide)
    guarded = Guarded((rows, columns), dtype)
    rms_norm(buffer[:, part], weight, buffer[:, part] if in_place else guarded.inside, EPS, wide)
    torch.testing.assert_close(buffer[:, part] if in_place else guarded.inside, expected, **tolerance(dtype, 3))
    assert guarded.margins_are_whole()
    if in_place:
        was[:, part] = buffer[:, part]
    assert torch.equal(buffer, was)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 48, 130])
def test_layer_norms(columns, dtype, has_bias):
    torch.manual_seed(4)
    values = (3 * torch.randn(5, columns) + 2).to(dtype).to(DEVICE)
    weight, bias = torch.randn(2, columns, device=DEVICE)
    found, shift = torch.randn(5, columns, device=DEVICE).to(dtype), bias if has_bias else None
    out = Guarded((5, columns), dtype)
    rms_norm(values, weight, out.inside, EPS, True, centered=True, bias=shift)
    expected = torch.nn.functional.layer_norm(values.float(), (columns,), weight, shift, EPS).to(dtype)
    torch.testing.assert_close(out.inside, expected, **tolerance(dtype, 3))
    add_rms_norm(values, found, out.inside, weight=weight, eps=EPS, wide=True, centered=True, bias=shift)
    expected = torch.nn.functional.layer_norm(values.float(), (columns,), weight, shift, EPS).to(dtype)
    torch.testing.assert_close(out.inside, expected, **tolerance(dtype, 3))
    assert out.margins_are_whole()


@given(
    rows=st.integers(1, 9),
    columns=st.sampled_from(COLUMNS),
    dtype=st.sampled_from(DTYPES),
    wide=st.booleans(),
    has_post=st.booleans(),
    has_norm=st.booleans(),
    scale=st.sampled_from([1.0, 0.22]),
    factor=st.sampled_from([None, 0.7]),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(80))
def test_a_layers_output_is_added_and_normed(rows, columns, dtype, wide, has_post, has_norm, scale, factor, seed):
    torch.manual_seed(seed)
    residual = Guarded((rows, columns), dtype)
    residual.inside.copy_(torch.randn(rows, columns))
    found = (2 * torch.randn(rows, columns)).to(dtype).to(DEVICE)
    weight = made_weight(columns, dtype, wide) if has_norm else None
    post_weight = made_weight(columns, dtype, wide) if has_post else None
    total, normed = reference.add_rms_norm(residual.inside, found, scale, post_weight, weight, EPS, wide)
    factor = None if factor is None else torch.tensor([factor], dtype=dtype, device=DEVICE)
    total = total if factor is None else total * factor
    out = Guarded((rows, columns), dtype)
    add_rms_norm(
        residual.inside,
        found,
        out.inside if has_norm else None,
        weight=weight,
        post_weight=post_weight,
        scale=scale,
        factor=factor,
        eps=EPS,
        wide=wide,
    )
    torch.testing.assert_close(residual.inside, total, **tolerance(dtype, 4))
    if normed is not None:
        # The norm of the kernel's own sum: only the sign of a row of one value remains, which rounding may change.
        expected = reference.rms_norm(residual.inside, weight, EPS, wide)
        torch.testing.assert_close(out.inside, expected, **tolerance(dtype, 3))
    assert residual.margins_are_whole()
    assert out.margins_are_whole()


@pytest.mark.parametrize("with_beside", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(5, 80), (2, 2048)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_of_experts_are_added_up_first(dtype, rows, columns, with_beside):
    """The bits are those of both kernels in sequence, with rows beside the experts' and without."""
    torch.manual_seed(6)
    residual, once, out, other = (torch.randn(rows, columns).to(dtype).to(DEVICE) for _ in range(4))
    weight, post_weight = (made_weight(columns, dtype, False) for _ in range(2))
    chosen = torch.randint(-1, 4, (rows, 3), dtype=torch.int32, device=DEVICE)
    found = torch.randn(3 * rows, columns, device=DEVICE).to(dtype)
    found[chosen.flatten() < 0] = torch.nan
    beside = torch.randn(rows, columns, device=DEVICE).to(dtype) if with_beside else None
    if with_beside:
        chosen[:, 2] = -1
        found[2::3] = torch.nan
    results = PairResults(found, torch.rand(rows, 3, device=DEVICE), chosen, beside)
    add_up(results, once)
    kept = torch.where((chosen < 0)[..., None], 0.0, found.view(rows, 3, columns).float())
    wanted = (kept * results.scores[..., None]).sum(1)
    if beside is not None:
        wanted += results.scores[:, 2:] * beside.float()
        same = beside.clone()
        add_up(results._replace(beside=same), same)
        assert torch.equal(same, once)
    torch.testing.assert_close(once, wanted.to(dtype), **tolerance(dtype, 3))
    total = residual.clone()
    norms = {"weight": weight, "post_weight": post_weight, "scale": 0.5, "eps": EPS, "wide": False}
    add_rms_norm(total, once, other, **norms)
    add_rms_norm(residual, results, out, **norms)
    assert torch.equal(residual, total)
    assert torch.equal(out, other)
    with pytest.raises(Internal, match="scores"):
        add_rms_norm(residual, results._replace(scores=results.scores[1:]), out, **norms)


@pytest.mark.parametrize("wide", [False, True])
def test_roundings_are_where_the_decoder_has_them(wide):
    """float16, because the interpreter truncates bfloat16 instead of rounding it."""
    torch.manual_seed(3)
    residual, found = (torch.randn(8, 1024).half().to(DEVICE) for _ in range(2))
    weight, post_weight = (made_weight(1024, torch.float16, wide) for _ in range(2))
    total, normed = reference.add_rms_norm(residual, found, 0.22, post_weight, weight, EPS, wide)
    out = torch.empty_like(residual)
    add_rms_norm(residual, found, out, weight=weight, post_weight=post_weight, scale=0.22, eps=EPS, wide=wide)
    assert (residual == total).float().mean() > 0.99
    assert (out == normed).float().mean() > 0.99
    otherwise = reference.rms_norm(total, weight, EPS, not wide).half()
    assert (out == otherwise).float().mean() < 0.9


def test_the_longest_rows():
    torch.manual_seed(4)
    residual, found = (torch.randn(2, MAX_COLUMNS).half().to(DEVICE) for _ in range(2))
    weight = made_weight(MAX_COLUMNS, torch.float16, False)
    total, normed = reference.add_rms_norm(residual, found, 1.0, None, weight, EPS, False)
    out = torch.empty_like(residual)
    add_rms_norm(residual, found, out, weight=weight, eps=EPS, wide=False)
    torch.testing.assert_close(residual, total, **tolerance(torch.float16, 1))
    torch.testing.assert_close(out, normed, **tolerance(torch.float16, 3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [False, True])
def test_the_reference_matches_the_decoder(wide, dtype):
    torch.manual_seed(5)
    hidden, found = (torch.randn(3, 48).to(dtype) for _ in range(2))
    weight, post_weight = (made_weight(48, dtype, wide).cpu() for _ in range(2))
    norm, post_norm = (layers.RmsNorm(each, EPS, wide) for each in (weight, post_weight))
    total, normed = reference.add_rms_norm(hidden, found, 0.5, post_weight, weight, EPS, wide)
    expected = torch.add(hidden, post_norm(found), alpha=0.5)
    assert torch.equal(total, expected)
    assert normed is not None
    assert torch.equal(normed, norm(expected))


@pytest.mark.skipif(not NATIVE, reason="the interpreter takes too long")
def test_a_long_prefill_is_within_the_grid():
    values = torch.randn(300_000, 64, device=DEVICE).half()
    weight = made_weight(64, torch.float16, False)
    out = torch.empty_like(values)
    rms_norm(values, weight, out, EPS, False)
    torch.testing.assert_close(out, reference.rms_norm(values, weight, EPS, False), **tolerance(torch.float16, 3))


def test_misshapen_tensors_are_refused():
    values = torch.zeros(2, 8, device=DEVICE)
    weight = torch.ones(8, device=DEVICE)
    for out in (torch.zeros(2, 7), torch.zeros(2, 8).half(), torch.zeros(8, 2).T):
        with pytest.raises(Internal):
            rms_norm(values, weight, out.to(DEVICE), EPS, False)
    for bad in (torch.ones(7), torch.ones(8).half(), torch.ones(2, 8)):
        with pytest.raises(Internal):
            rms_norm(values, bad.to(DEVICE), values, EPS, False)
    with pytest.raises(Internal):
        rms_norm(values.half(), weight.half(), values.half(), EPS, True)
    wide = torch.zeros(1, MAX_COLUMNS + 1, device=DEVICE)
    with pytest.raises(Internal):
        rms_norm(wide, torch.ones(MAX_COLUMNS + 1, device=DEVICE), wide, EPS, False)
    with pytest.raises(Internal):
        add_rms_norm(values, values[:, :7], values, weight=weight, eps=EPS, wide=False)
    with pytest.raises(Internal):
        add_rms_norm(values, values.clone(), None, weight=weight, eps=EPS, wide=False)
    with pytest.raises(Internal):
        add_rms_norm(torch.zeros(2, 16, device=DEVICE)[:, :8], values, None, weight=None, eps=EPS, wide=False)
