"""Row kernels against their references, and those against the layers of the torch path."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.engine.models import layers
from pillion.kernels.cpu.rows import rows
from tests.support.batches import Sequences
from tests.support.cpu_references import (
    reference_embed,
    reference_gather_rows,
    reference_norm,
    reference_norm_add,
    reference_soft_cap_scale,
)
from tests.support.examples import examples
from tests.support.kernel_runner import (
    batch_step,
    normal,
    padded,
    rows_step,
    runner_of,
    stride,
)

KINDS = ("rms", "layer", "none")
NORMS = [rows.NormRows(kind, bf16) for kind in KINDS for bf16 in (False, True)]
NORMS += [rows.NormRows(kind, True, "samples", True) for kind in ("rms", "layer")]
SPECS = [
    *NORMS,
    *(rows.Embed(bf16, share) for bf16 in (False, True) for share in (False, True)),
    rows.AddPositions(),
    *(rows.NormAdd(rows_of) for rows_of in ("tokens", "samples")),
    rows.GatherRows(),
    *(rows.SoftCapScale(capped) for capped in (False, True)),
    *(kernel(group) for kernel in (rows.GroupMaxima, rows.LargestTokens) for group in (32, 128)),
]
# Large enough to affect results.
EPS = 0.1


runner = runner_of(SPECS)


def run_norm(runner, spec, x, weight, bias=None, threads=3):
    """Return the norm of x [rows, width]; fail if anything else was written."""
    count, width = x.shape
    room = padded(x, extra=2, filler=torch.nan)
    out = torch.full((count + 2, room.shape[1]), 7.0, dtype=torch.bfloat16 if spec.bf16_out else torch.float32)
    values = {
        "x": room,
        "weight": padded(weight[None]),
        "bias": None if bias is None else padded(bias[None]),
        "out": out,
        "width": width,
        "x_stride": stride(room),
        "out_stride": stride(out),
        "eps": EPS,
    }
    step = rows_step(count, 0) if spec.rows_of == "tokens" else rows_step(0, count)
    runner.run(spec, values, step, threads)
    written = -(-width // 16) * 16
    assert (out[count:] == 7).all()
    assert (out[:, written:] == 7).all()
    assert (out[:count, width:written] == 0).all(), "padding stays zero"
    return out[:count, :width]


@pytest.mark.parametrize("spec", NORMS, ids=lambda spec: spec.name)
@pytest.mark.parametrize(("count", "width"), [(1, 64), (5, 48), (3, 576), (4, 40)])
def test_norms_match_the_reference(runner, spec, count, width):
    x = normal(count, width) * 3 + 1
    weight, bias = normal(width, seed=1), normal(width, seed=2) if spec.bias else None
    found = run_norm(runner, spec, x, weight, bias)
    expected = reference_norm(x, weight, EPS, spec.kind, bias)
    if spec.bf16_out:
        torch.testing.assert_close(found.float(), expected, rtol=2**-8, atol=1e-5)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_norm_none_only_casts(runner):
    x = normal(3, 32)
    assert torch.equal(run_norm(runner, rows.NormRows("none", True), x, torch.ones(32)), x.bfloat16())
    assert torch.equal(run_norm(runner, rows.NormRows("none", False), x, torch.ones(32)), x)


@pytest.mark.parametrize("wide", [False, True])
def test_reference_norms_match_those_of_the_torch_path(wide):
    """The norms agree without rounding in between; the loader adds Gemma's 1 + w."""
    x, weight = normal(4, 48), normal(48, seed=1)
    torch.testing.assert_close(reference_norm(x, weight, EPS, "rms"), layers.RmsNorm(weight, EPS, wide)(x))


@settings(max_examples=examples(20))
@given(st.integers(1, 12), st.integers(1, 12), st.sampled_from(NORMS), st.integers(0, 2**31))
def test_norms_of_a_row_do_not_depend_on_the_others(runner, count, vectors, spec, seed):
    x = normal(count, vectors * 16, seed=seed)
    weight, bias = normal(vectors * 16, seed=1), normal(vectors * 16, seed=2)
    together = run_norm(runner, spec, x, weight, bias if spec.bias else None)
    for row in range(count):
        alone = run_norm(runner, spec, x[row : row + 1], weight, bias if spec.bias else None, threads=1)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("rows_of", ["tokens", "samples"])
@pytest.mark.parametrize(("count", "width", "factor"), [(1, 64, 1.0), (7, 48, 0.22), (2, 40, 1.0)])
def test_norms_with_a_residual_match_the_reference(runner, rows_of, count, width, factor):
    hidden, found, weight = normal(count, width), normal(count, width, seed=1) * 5, normal(width, seed=2)
    into, source = padded(hidden, 2, 7.0), padded(found, 2, torch.nan)
    values = {
        "found": source,
        "weight": padded(weight[None]),
        "hidden": into,
        "width": width,
        "found_stride": stride(source),
        "hidden_stride": stride(into),
        "eps": EPS,
        "factor": factor,
    }
    runner.run(rows.NormAdd(rows_of), values, rows_step(count if rows_of == "tokens" else 0, count))
    expected = reference_norm_add(hidden, found, weight, EPS, factor)
    torch.testing.assert_close(into[:count, :width], expected, rtol=1e-5, atol=1e-5)
    assert (into[count:] == 7).all()
    assert (into[:count, width:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "scale"), [(16, 1.0), (64, 8.0), (40, 12.0)])
@pytest.mark.parametrize("share", [range(9), range(3, 8)])
def test_embeddings_are_the_rows_of_the_table(runner, dtype, width, scale, share):
    """The whole table, or a rank's share of it: other tokens are zeros."""
    table = normal(9, width).to(dtype)
    ids = [8, 0, 3, 3, 7]
    hidden = padded(torch.full((5, width), 7.0), 1, 7.0)
    values = {
        "table": table[share.start : share.stop],
        "hidden": hidden,
        "width": width,
        "hidden_stride": stride(hidden),
        "first": share.start,
        "tokens": len(share),
        "scale": scale,
    }
    batch = Sequences(4, 16)
    step = batch_step(batch.step([(batch.add()[0], ids)]))
    runner.run(rows.Embed(dtype == torch.bfloat16, share=len(share) < 9), values, step)
    mine = torch.tensor([[token in share] for token in ids])
    assert torch.equal(hidden[:5, :width], reference_embed(table, torch.tensor(ids), scale) * mine)
    assert (hidden[5:] == 7).all()
    assert (hidden[:5, width:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gather_rows(runner, dtype):
    hidden, attended = padded(normal(6, 40)), padded(normal(6, 96, seed=1).to(dtype))
    found = torch.full((5, hidden.shape[1]), 7.0), torch.full((5, attended.shape[1]), 7.0, dtype=dtype)
    values = {
        "hidden": hidden,
        "attended": attended,
        "sampled_hidden": found[0],
        "sampled_attended": found[1],
        "hidden_stride": stride(hidden),
        "attended_stride": stride(attended),
    }
    sequences = Sequences(4, 16)
    sample = [0, 2, 2, 5]
    runner.run(rows.GatherRows(), values, batch_step(sequences.step([(sequences.add()[0], [1] * 6)], sample)))
    expected = reference_gather_rows(hidden, attended, torch.tensor(sample))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one[:4], other)
        assert (one[4:] == 7).all()


@pytest.mark.parametrize(("count", "width"), [(1, 258), (3, 2050), (5, 16)])
@pytest.mark.parametrize(("divisor", "cap"), [(8.0, 0.0), (1.0, 30.0), (4.0, 30.0)])
def test_soft_cap_scale(runner, count, width, divisor, cap):
    logits = normal(count, width) * 40
    logits[0, :3] = torch.tensor([-1e4, 1e4, 0.0])
    found = padded(logits, 1, 7.0)
    values = {"logits": found, "width": width, "stride": stride(found), "divisor": divisor, "cap": cap}
    runner.run(rows.SoftCapScale(cap > 0), values, rows_step(0, count))
    expected = reference_soft_cap_scale(logits, divisor, cap)
    torch.testing.assert_close(found[:count, :width], expected, rtol=1e-6, atol=2e-6 * max(cap, 1.0))
    assert (found[count:] == 7).all()
    assert (found[:count, width:] == 0).all()
    if cap and divisor == 1.0:
        torch.testing.assert_close(expected, layers.soft_cap(logits.clone(), cap))


def largest(runner, logits, group):
    """Return the maxima of groups and the largest token of each row, by the kernels; fail if anything else was
    written."""
    count, width = logits.shape
    room, groups = padded(logits, 1, 7.0), width // group
    maxima = torch.full((count + 1, -(-groups // 16) * 16), 7.0)
    tokens = torch.full((count + 1, 16), 7, dtype=torch.int32)
    values = {"logits": room, "maxima": maxima, "width": width, "stride": stride(room), "maxima_stride": stride(maxima)}
    runner.run(rows.GroupMaxima(group), values, rows_step(0, count))
    runner.run(
        rows.LargestTokens(group), {**values, "tokens": tokens, "tokens_stride": stride(tokens)}, rows_step(0, count)
    )
    assert (maxima[count:] == 7).all()
    assert (maxima[:, groups:] == 7).all()
    assert (tokens[count:] == 7).all()
    assert (tokens[:, 1:] == 7).all()
    return maxima[:count, :groups], tokens[:count, 0]


@pytest.mark.parametrize(("count", "width", "group"), [(1, 128, 128), (3, 32 * 70, 32), (5, 128 * 17, 128)])
def test_the_largest_logits_and_their_tokens_are_found(runner, count, width, group):
    logits = normal(count, width) * 40
    # Equal maxima, in one group and in several, including a negative zero; and a row of the lowest numbers.
    logits[0] = torch.where(torch.arange(width) % 7 == 3, 0.0, -1.0)
    logits[0, 3] = -0.0
    logits[-1] = torch.finfo(torch.float32).min
    maxima, tokens = largest(runner, logits, group)
    assert torch.equal(maxima, logits.view(count, -1, group).amax(-1))
    assert tokens.tolist() == logits.numpy().argmax(axis=1).tolist()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_not_finite_have_no_largest_token(runner, value):
    logits = normal(3, 32 * 40)
    logits[1, 1111] = value
    maxima, tokens = largest(runner, logits, 32)
    assert torch.isnan(maxima).nonzero().tolist() == [[1, 1111 // 32]]
    argmax = logits.numpy().argmax(axis=1).tolist()
    assert tokens.tolist() == [argmax[0], -1, argmax[2]]


def test_kernels_accept_zero_rows(runner):
    for spec in (rows.NormRows("rms", True), rows.NormRows("none", False)):
        run_norm(runner, spec, normal(1, 16)[:0], torch.ones(16))


def test_infinite_rows_do_not_affect_others(runner):
    x = normal(3, 32)
    x[1, 5] = np.inf
    found = run_norm(runner, rows.NormRows("rms", False), x, torch.ones(32))
    assert torch.equal(found[[0, 2]], run_norm(runner, rows.NormRows("rms", False), x[[0, 2]], torch.ones(32)))


@pytest.mark.parametrize("width", [16, 40])
def test_positions_are_added(runner, width):
    """In two texts, one of them continued."""
    sequences = Sequences(8, 16, 0)
    one, two = sequences.add(2)
    sequences.step([(one, [0] * 9)])
    batch = sequences.step([(one, [0] * 3), (two, [0] * 20)])
    hidden, table = padded(normal(batch.num_tokens, width)), padded(normal(30, width, seed=1))
    wanted = hidden + table[torch.from_numpy(batch.positions).long()]
    values = {"table": table, "hidden": hidden, "width": width}
    values |= {"hidden_stride": stride(hidden), "table_stride": stride(table)}
    runner.run(rows.AddPositions(), values, batch_step(batch, torch.zeros(1)))
    assert torch.equal(hidden, wanted)
