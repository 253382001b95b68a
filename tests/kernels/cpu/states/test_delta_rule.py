"""The kernels of the gated delta rule, against its reference in torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import softplus

from pillion.kernels.cpu.language.emit import LOG2E
from pillion.kernels.cpu.language.isa import BY_NAME
from pillion.kernels.cpu.states.delta_rule import PrepareDelta, RunDeltaRule
from pillion.kernels.cpu.states.state_spaces import RunStateSpace
from pillion.kernels.torch.recurrences import DeltaRows, delta_rule
from tests.support.kernel_runner import columns_of, normal, runner_of, stride
from tests.support.machine_code import assembly
from tests.support.piece_pool import PiecePool

# Neighbouring heads share a key. Keys do not fill vectors; sums over 23 or 24 values have one part or several.
KEY_HEADS, HEADS, HEAD_DIM, COUNTS, FOUND = 2, 6, 32, (1, 9, 3), (True, False, True)
# With a factor per row of a matrix there is one key per head, and keys fill vectors.
BY_ROWS = PrepareDelta(HEADS, HEADS, 48, by_rows=True), RunDeltaRule(HEADS, HEADS, 48, HEAD_DIM, by_rows=True)
PREPARE = [PrepareDelta(KEY_HEADS, HEADS, 24, doubled=True), PrepareDelta(KEY_HEADS, HEADS, 23)]
RUN = [RunDeltaRule(KEY_HEADS, HEADS, key_dim, HEAD_DIM) for key_dim in (24, 23)]

runner = runner_of([*PREPARE, *RUN, *BY_ROWS])


@pytest.mark.parametrize(("prepare", "run"), [*zip(PREPARE, RUN, strict=True)], ids=lambda spec: spec.name)
def test_outputs_and_states_match_the_reference(runner, prepare, run):
    tokens, key_dim = sum(COUNTS), run.key_dim
    pool = PiecePool(COUNTS, FOUND, [(key_dim, 16)] * (HEADS * HEAD_DIM // 16))
    mixed, rates = normal(tokens, 2 * KEY_HEADS * key_dim + HEADS * HEAD_DIM), normal(tokens, 32, seed=1) * 4
    decay, shift = normal(16, seed=2).exp(), normal(16, seed=3)
    units = torch.full((tokens, 2, KEY_HEADS, 32), 7.0)
    learns, forgets = torch.full((tokens + 1, 16), 7.0), torch.full((tokens + 1, 16), 7.0)
    made = {"units": units, "learns": learns, "forgets": forgets}
    strides = {"units_stride": stride(units), "heads_stride": stride(learns), "forgets_stride": stride(forgets)}
    keys = columns_of(mixed, KEY_HEADS * key_dim)
    values = {"queries": mixed, "keys": keys, "rates": rates, "decay": -decay * LOG2E, "shift": shift}
    values |= {**made, **strides}
    values |= {"mixed_stride": stride(mixed), "rates_stride": stride(rates)}
    runner.run(prepare, values, pool.step)
    assert (units[..., key_dim:] == 0).all()
    assert (learns[tokens] == 7).all()
    heads, kinds = mixed[:, : 2 * KEY_HEADS * key_dim].view(tokens, 2, KEY_HEADS, key_dim), (key_dim**-0.5, 1.0)
    for kind, scale in enumerate(kinds):
        one = heads[:, kind]
        wanted = one * torch.rsqrt(one.square().sum(-1, keepdim=True) + 1e-6) * scale
        torch.testing.assert_close(units[:, kind, :, :key_dim], wanted)

    out = torch.full((tokens + 1, HEADS * HEAD_DIM), 7.0)
    of_heads = mixed[:, 2 * KEY_HEADS * key_dim :]
    place = columns_of(mixed, 2 * KEY_HEADS * key_dim)
    values = {**made, **strides, "values": place, "out": out, "values_stride": stride(mixed)}
    runner.run(run, {**values, "out_stride": stride(out), **pool.fields}, pool.step)
    rows = DeltaRows(
        heads[:, 0],
        heads[:, 1],
        of_heads.view(tokens, HEADS, HEAD_DIM),
        (-decay[:HEADS] * softplus(rates[:, HEADS : 2 * HEADS] + shift[:HEADS]))[..., None],
        rates[:, :HEADS].sigmoid() * (2.0 if prepare.doubled else 1.0),
    )
    for sequence, mine in enumerate(pool.rows):
        memory = matrices(pool.old(sequence))
        found = delta_rule(rows.of(mine), memory)
        torch.testing.assert_close(out[mine].view(found.shape), found, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(matrices(pool.new(sequence)), memory, atol=1e-5, rtol=1e-5)
    assert (out[tokens] == 7).all()
    pool.check_others_unchanged()


def test_delta_rules_with_a_decay_per_row_match_the_reference(runner):
    prepare, run = BY_ROWS
    tokens, key_dim = sum(COUNTS), run.key_dim
    pool = PiecePool(COUNTS, FOUND, [(key_dim, 16)] * (HEADS * HEAD_DIM // 16))
    keys = HEADS * key_dim
    mixed, rates = normal(tokens, 2 * keys + HEADS * HEAD_DIM), normal(tokens, 16, seed=1) * 4
    decay, shift, made = normal(HEADS, seed=2).exp(), normal(keys, seed=3), normal(tokens + 1, keys, seed=4) * 3
    forgets, learns, units = made.clone(), torch.full((tokens, 16), 7.0), torch.full((tokens, 2 * keys), 7.0)
    shared = {"units": units, "learns": learns, "forgets": forgets}
    shared |= {"units_stride": stride(units), "heads_stride": stride(learns), "forgets_stride": stride(forgets)}
    values = {"queries": mixed, "keys": columns_of(mixed, keys), "rates": rates}
    values |= {"mixed_stride": stride(mixed), "rates_stride": stride(rates)}
    values |= {"decay": (-decay * LOG2E).repeat_interleave(key_dim), "shift": shift}
    runner.run(prepare, {**values, **shared}, pool.step)
    times = softplus(made[:tokens] + shift).view(tokens, HEADS, key_dim)
    heads = mixed[:, : 2 * keys].view(tokens, 2, HEADS, key_dim)
    of_heads = mixed[:, 2 * keys :].view(tokens, HEADS, HEAD_DIM)
    rows = DeltaRows(heads[:, 0], heads[:, 1], of_heads, -decay[:, None] * times, rates[:, :HEADS].sigmoid())
    torch.testing.assert_close(forgets[:tokens].view(times.shape), rows.decays.exp(), atol=1e-5, rtol=1e-5)
    assert torch.equal(forgets[tokens], made[tokens])

    out = torch.full((tokens + 1, HEADS * HEAD_DIM), 7.0)
    values = {
        **shared,
        "values": columns_of(mixed, 2 * keys),
        "out": out,
        "values_stride": stride(mixed),
        "out_stride": stride(out),
    }
    runner.run(run, {**values, **pool.fields}, pool.step)
    for sequence, mine in enumerate(pool.rows):
        memory = matrices(pool.old(sequence))
        found = delta_rule(rows.of(mine), memory)
        torch.testing.assert_close(out[mine].view(found.shape), found, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(matrices(pool.new(sequence)), memory, atol=1e-5, rtol=1e-5)
    assert (out[tokens] == 7).all()
    pool.check_others_unchanged()


@pytest.mark.parametrize("run", [*RUN, RunStateSpace(18, 32, 2, 24)], ids=lambda spec: spec.name)
def test_the_last_row_writes_states_past_the_caches(run):
    text = assembly([run], BY_NAME["avx512_bf16"])[run.name]
    assert "vmovntps" in text
    assert text.index("vmovntps") < text.index("sfence")


def matrices(pieces):
    """Return the heads' matrices [heads, rows, columns] of their pieces."""
    each = len(pieces) // HEADS
    return torch.stack([torch.cat(pieces[head * each : (head + 1) * each], 1) for head in range(HEADS)])
