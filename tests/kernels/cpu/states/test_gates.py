"""The kernels that gate and norm rows, against plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import silu

from pillion.kernels.cpu.states.gates import GateRows, GroupSquares, NormGated
from pillion.kernels.torch.recurrences import normed_and_gated
from tests.support.kernel_runner import normal, padded, rows_step, runner_of, stride

NORMS = [NormGated(False), NormGated(True, gate_first=True), NormGated(True), NormGated(False, normed=False)]
NORMS += [NormGated(True, sigmoid=True)]
# Two processes have half of a group each.
SHARED = [(GroupSquares(first), NormGated(False, gate_first=first, shared=True)) for first in (False, True)]
GATES = [GateRows(bf16, rows_of) for bf16 in (False, True) for rows_of in ("tokens", "samples")]
# Some values in a row share a gate.
GATES += [GateRows(bf16, rows_of, 16) for bf16, rows_of in ((False, "samples"), (True, "tokens"))]
TOKENS, GROUPS, WIDTH, EPS = 5, 3, 48, 0.1

runner = runner_of([*NORMS, *(spec for pair in SHARED for spec in pair), *GATES])


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("spec", NORMS, ids=lambda spec: spec.name)
def test_groups_are_normed_and_gated(runner, spec, own):
    rows, gates = normal(TOKENS, GROUPS, WIDTH), normal(TOKENS, GROUPS, WIDTH, seed=1) * 3
    weight = normal(GROUPS if own else 1, WIDTH, seed=2)
    kind = torch.bfloat16 if spec.bf16 else torch.float32
    out, x, room = torch.full((TOKENS + 1, GROUPS * WIDTH), 7.0, dtype=kind), rows.clone(), padded(gates.flatten(1))
    values = {"x": x, "gates": room, "weight": weight if spec.normed else None, "out": out, "eps": EPS}
    values |= {"groups": GROUPS, "width": WIDTH, "weight_bytes": WIDTH * 4 if own else 0}
    values |= {"x_stride": stride(x), "gates_stride": stride(room), "out_stride": stride(out)}
    values |= {"squares": None, "group": 0, "group_width": 0, "squares_stride": 0}
    runner.run(spec, values, rows_step(TOKENS))
    wanted = normed_and_gated(rows, gates, weight, EPS, gate_first=spec.gate_first, sigmoid=spec.sigmoid)
    wanted = (wanted if spec.normed else rows * silu(gates)).flatten(1).to(kind)
    tolerance = {"atol": 1e-2, "rtol": 1e-2} if spec.bf16 else {}
    torch.testing.assert_close(out[:TOKENS], wanted, **tolerance)
    assert (out[TOKENS] == 7).all()


@pytest.mark.parametrize(("squares", "norm"), SHARED, ids=lambda spec: spec.name)
def test_parts_of_a_group_are_normed_by_its_whole_sum_of_squares(runner, squares, norm):
    rows, gates, weight = normal(TOKENS, WIDTH), normal(TOKENS, WIDTH, seed=1) * 3, normal(WIDTH, seed=2)
    halves, partials = (slice(0, 16), slice(16, WIDTH)), torch.full((2, TOKENS + 1, 3), 7.0)
    parts = [(rows[:, half].clone(), gates[:, half].contiguous(), weight[half].contiguous()) for half in halves]
    for (x, gate, _), partial in zip(parts, partials, strict=True):
        values = {"x": x, "gates": gate, "out": partial, "groups": 3, "group": 1, "width": x.shape[1]}
        values |= {"x_stride": stride(x), "gates_stride": stride(gate), "out_stride": stride(partial)}
        runner.run(squares, values, rows_step(TOKENS))
    assert (partials[:, :TOKENS, [0, 2]] == 0).all()
    assert (partials[:, TOKENS] == 7).all()
    total, found = partials.sum(0), []
    for x, gate, own in parts:
        out = torch.full((TOKENS + 1, x.shape[1]), 7.0)
        values = {"x": x, "gates": gate, "weight": own, "out": out, "squares": total, "eps": EPS, "weight_bytes": 0}
        values |= {"groups": 1, "width": x.shape[1], "group": 1, "group_width": WIDTH, "squares_stride": stride(total)}
        values |= {"x_stride": stride(x), "gates_stride": stride(gate), "out_stride": stride(out)}
        runner.run(norm, values, rows_step(TOKENS))
        assert (out[TOKENS] == 7).all()
        found.append(out[:TOKENS])
    wanted = normed_and_gated(rows, gates, weight, EPS, gate_first=norm.gate_first)
    torch.testing.assert_close(torch.cat(found, 1), wanted)


@pytest.mark.parametrize("spec", GATES, ids=lambda spec: spec.name)
def test_rows_are_gated(runner, spec):
    chosen = np.array([4, 1, 1], np.int32)
    kind = torch.bfloat16 if spec.bf16 else torch.float32
    rows, gates = normal(3, WIDTH).to(kind), normal(TOKENS, WIDTH // spec.each, seed=1) * 3
    x = padded(rows, extra=1, filler=7.0)
    step = rows_step(3) if spec.rows_of == "tokens" else rows_step(TOKENS, 3)
    step.point("sample_rows", chosen)
    values = {"x": x, "gates": gates, "width": WIDTH, "x_stride": stride(x), "gates_stride": stride(gates)}
    runner.run(spec, values, step)
    own = gates[torch.from_numpy(chosen).long()] if spec.rows_of == "samples" else gates[:3]
    factors = own.sigmoid().repeat_interleave(spec.each, 1)
    torch.testing.assert_close(x[:3, :WIDTH], (rows.float() * factors).to(kind))
    assert (x[3] == 7).all()
