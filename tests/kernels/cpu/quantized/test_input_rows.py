"""The kernels that prepare rows for quantized weights, against their references."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.kernels.cpu.quantized.input_rows import SUMMED_GROUPS, GatherInputs, SumInputs
from tests.support.cpu_references import reference_gather_inputs, reference_sum_inputs
from tests.support.examples import examples
from tests.support.kernel_runner import normal, rows_step, runner_of, stride

TYPES = {True: torch.bfloat16, False: torch.float32}
SPECS = [GatherInputs(True), GatherInputs(False), SumInputs(True), SumInputs(False, each=3)]

runner = runner_of(SPECS)


def check_order(runner, spec, rows, vectors, seed, threads):
    depth = 16 * vectors
    x = normal(rows, depth + 32, seed=seed).to(TYPES[spec.bf16])
    order = torch.randperm(depth, generator=torch.Generator().manual_seed(seed)).int()
    out = torch.full((rows + 1, depth), 7.0, dtype=x.dtype)
    values = {"x": x, "order": order, "out": out, "depth": depth, "x_stride": stride(x), "out_stride": stride(out)}
    runner.run(spec, values, rows_step(rows), threads)
    assert torch.equal(out[:rows], reference_gather_inputs(x, order))
    assert (out[rows] == 7).all()


def check_sums(runner, spec, rows, vectors, inputs, threads):
    """The last group may be shorter; a row's sums have the same bits alone."""
    depth, count = 16 * vectors, rows * spec.each
    x = normal(count, depth + 32, seed=rows).to(TYPES[spec.bf16])
    groups = -(-depth // inputs)
    room = groups + -groups % SUMMED_GROUPS
    sums = torch.full((count + 1, room + 5), 7.0)
    values = {"x": x, "sums": sums, "depth": depth, "inputs": inputs, "x_stride": stride(x)}
    values["sums_stride"] = stride(sums)
    runner.run(spec, values, rows_step(rows), threads)
    expected = reference_sum_inputs(x, depth, inputs)
    torch.testing.assert_close(sums[:count, :groups], expected, rtol=1e-5, atol=1e-5)
    assert (sums[:count, groups:room] == 0).all()
    assert (sums[:count, room:] == 7).all()
    assert (sums[count] == 7).all()
    if spec.each == 1:
        alone = torch.zeros_like(sums[:1])
        runner.run(spec, values | {"x": x[rows - 1 :].clone(), "sums": alone}, rows_step(1), threads)
        assert torch.equal(alone[0, :room], sums[rows - 1, :room])


@pytest.mark.parametrize("spec", SPECS[:2], ids=lambda spec: spec.name)
@settings(max_examples=examples(10))
@given(rows=st.integers(1, 9), vectors=st.integers(1, 9), seed=st.integers(0, 99), threads=st.sampled_from((1, 3)))
def test_rows_are_reordered(runner, spec, rows, vectors, seed, threads):
    check_order(runner, spec, rows, vectors, seed, threads)


@pytest.mark.parametrize("spec", SPECS[2:], ids=lambda spec: spec.name)
@settings(max_examples=examples(10))
@given(
    rows=st.integers(1, 9),
    vectors=st.integers(1, 20),
    inputs=st.sampled_from((16, 48, 128)),
    threads=st.sampled_from((1, 3)),
)
def test_group_sums_match_the_reference(runner, spec, rows, vectors, inputs, threads):
    check_sums(runner, spec, rows, vectors, inputs, threads)


def test_each_kernel_runs_at_one_size(runner):
    """A size for runners on which many would take long."""
    for spec in SPECS[:2]:
        check_order(runner, spec, 5, 7, 1, 3)
    for spec in SPECS[2:]:
        check_sums(runner, spec, 5, 7, 48, 3)


def test_specs_have_distinct_names():
    assert len({spec.name for spec in SPECS}) == len(SPECS)
