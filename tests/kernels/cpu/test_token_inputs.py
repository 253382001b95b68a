"""The kernels of layers' inputs per token beside the residual stream, against plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pillion.kernels.cpu.products.moe_kernels import ScaleChosen
from pillion.kernels.cpu.rows.token_inputs import MixTokenInputs, ScaleRows, WeighByTokenInputs
from tests.support.kernel_runner import normal, padded, rows_step, runner_of, stride

WEIGHTS = [WeighByTokenInputs(bf16, rows_of) for bf16 in (False, True) for rows_of in ("tokens", "samples")]
SPECS = [MixTokenInputs(), *WEIGHTS, ScaleRows(), ScaleRows("samples"), ScaleChosen(3), ScaleChosen(3, "samples")]
LAYERS, WIDTH, EPS = 3, 32, 0.1

runner = runner_of(SPECS)


def step_of(rows_of, count):
    return rows_step(count, 0) if rows_of == "tokens" else rows_step(9, count)


@pytest.mark.parametrize("count", [1, 5])
def test_token_inputs_of_all_layers_match_the_reference(runner, count):
    own, products = normal(count, LAYERS * WIDTH), normal(count, LAYERS * WIDTH, seed=1)
    weight = normal(WIDTH, seed=2)
    rows, made = padded(own, extra=1, filler=7.0), padded(products, extra=1, filler=torch.nan)
    values = {"rows": rows, "products": made, "weight": weight, "width": WIDTH, "layers": LAYERS, "eps": EPS}
    values |= {"rows_stride": stride(rows), "products_stride": stride(made)}
    runner.run(MixTokenInputs(), values, rows_step(count))
    by_layer = products.view(count, LAYERS, WIDTH)
    normed = by_layer * torch.rsqrt(by_layer.square().mean(-1, keepdim=True) + EPS) * weight
    torch.testing.assert_close(rows[:count], (normed.flatten(1) + own) * 0.5**0.5)
    assert (rows[count] == 7).all()


@pytest.mark.parametrize("spec", WEIGHTS, ids=lambda spec: spec.name)
def test_gates_are_multiplied_by_their_layers_inputs(runner, spec):
    chosen = np.array([4, 1, 1], np.int32)
    gate, inputs = normal(3, WIDTH), padded(normal(9, LAYERS * WIDTH, seed=1))
    kind = torch.bfloat16 if spec.bf16 else torch.float32
    room = padded(gate.to(kind), extra=1, filler=7.0)
    step = step_of(spec.rows_of, 3)
    step.point("sample_rows", chosen)
    values = {"gate": room, "inputs": inputs, "width": WIDTH, "gate_stride": stride(room)}
    values |= {"inputs_stride": stride(inputs), "layer_bytes": 2 * WIDTH * 4}
    runner.run(spec, values, step)
    part = inputs[:, 2 * WIDTH : 3 * WIDTH][torch.from_numpy(chosen).long() if spec.rows_of == "samples" else slice(3)]
    assert torch.equal(room[:3, :WIDTH], (gate.to(kind).float() * part).to(kind))
    assert (room[3] == 7).all()


@pytest.mark.parametrize("rows_of", ["tokens", "samples"])
def test_rows_and_expert_scores_are_scaled(runner, rows_of):
    hidden = normal(4, 40)
    room = padded(hidden, extra=1, filler=7.0)
    values = {"hidden": room, "width": 40, "hidden_stride": stride(room), "factor": -1.5}
    runner.run(ScaleRows(rows_of), values, step_of(rows_of, 4))
    assert torch.equal(room[:4, :40], hidden * -1.5)
    assert (room[4] == 7).all()
    scores, scales = normal(5, 3), normal(8, seed=1)
    experts = torch.tensor([[1, 0, 7], [2, 3, 4], [6, 5, 1], [0, 1, 2], [3, 3, 3]], dtype=torch.int32)
    found = scores.clone()
    runner.run(ScaleChosen(3, rows_of), {"scores": found, "experts": experts, "scales": scales}, step_of(rows_of, 4))
    assert torch.equal(found[:4], scores[:4] * scales[experts[:4].long()])
    assert torch.equal(found[4], scores[4])
