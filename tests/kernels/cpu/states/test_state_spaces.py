"""The kernels of state spaces, against their reference in torch."""

from __future__ import annotations

import pytest
import torch

from pillion.kernels.cpu.language.emit import LOG2E
from pillion.kernels.cpu.states.state_spaces import PrepareSpace, RunSelectiveScan, RunStateSpace
from pillion.kernels.torch.recurrences import ScanRows, SpaceRows, selective_scan, state_space, steps_of_time
from tests.support.kernel_runner import columns_of, normal, runner_of, stride
from tests.support.piece_pool import PiecePool

HEADS, GROUPS, HEAD_DIM, COUNTS, FOUND = 18, 2, 32, (2, 1, 8), (False, True, True)
RUN = [RunStateSpace(HEADS, HEAD_DIM, GROUPS, state_dim) for state_dim in (24, 23)]

SCAN = RunSelectiveScan(3, 64, 32)

runner = runner_of([PrepareSpace(HEADS), *RUN, SCAN])


@pytest.mark.parametrize("run", RUN, ids=lambda spec: spec.name)
def test_outputs_and_states_match_the_reference(runner, run):
    tokens, columns, values = sum(COUNTS), run.state_dim, HEADS * HEAD_DIM
    pool = PiecePool(COUNTS, FOUND, [(columns, 16)] * (values // 16))
    mixed, steps = normal(tokens, values + 2 * GROUPS * columns), normal(tokens, 32, seed=1) * 6
    decay, shift, skip = normal(32, seed=2).exp(), normal(32, seed=3), normal(32, seed=4)
    times, keeps = torch.full((tokens + 1, 32), 7.0), torch.full((tokens + 1, 32), 7.0)
    fields = {"steps": steps, "decay": -decay * LOG2E, "shift": shift, "times": times, "keeps": keeps}
    runner.run(PrepareSpace(HEADS), {**fields, "steps_stride": stride(steps), "heads_stride": stride(times)}, pool.step)
    wanted = steps_of_time(steps[:, :HEADS], shift[:HEADS])
    torch.testing.assert_close(times[:tokens, :HEADS], wanted, atol=0, rtol=2e-6)
    torch.testing.assert_close(keeps[:tokens, :HEADS], (-wanted * decay[:HEADS]).exp(), atol=1e-6, rtol=1e-5)
    assert (times[tokens] == 7).all()

    out = torch.full((tokens + 1, values), 7.0)
    starts = {"values": 0, "writes": values, "reads": values + GROUPS * columns}
    places = {name: columns_of(mixed, first) for name, first in starts.items()}
    fields = {**places, "times": times, "keeps": keeps, "skip": skip, "out": out, **pool.fields}
    fields |= {"mixed_stride": stride(mixed), "heads_stride": stride(times), "out_stride": stride(out)}
    runner.run(run, fields, pool.step)
    writes, reads = mixed[:, values:].view(tokens, 2, GROUPS, columns).unbind(1)
    rows = SpaceRows(mixed[:, :values].view(tokens, HEADS, HEAD_DIM), writes, reads, wanted)
    for sequence, mine in enumerate(pool.rows):
        memory = matrices(pool.old(sequence))
        found = state_space(rows.of(mine), -decay[:HEADS], skip[:HEADS], memory)
        torch.testing.assert_close(out[mine].view(found.shape), found, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(matrices(pool.new(sequence)), memory, atol=1e-4, rtol=1e-4)
    assert (out[tokens] == 7).all()
    pool.check_others_unchanged()


def test_scans_and_their_states_match_the_reference(runner):
    tokens, columns, channels = sum(COUNTS), SCAN.state_dim, SCAN.heads * SCAN.head_dim
    pool = PiecePool(COUNTS, FOUND, [(columns, 16)] * (channels // 16))
    mixed, steps = normal(tokens, channels), normal(tokens, channels + 32, seed=1) * 6
    writes, reads = normal(tokens, columns, seed=2), normal(tokens, columns + 16, seed=3)
    decay, skip = normal(channels, columns, seed=4).exp(), normal(channels, seed=5)
    out = torch.full((tokens + 1, channels), 7.0)
    fields = {"values": mixed, "steps": steps, "writes": writes, "reads": reads, "skip": skip, "out": out}
    fields |= {f"{name}_stride": stride(rows) for name, rows in fields.items() if name != "skip"}
    by_piece = (-decay * LOG2E).view(-1, 16, columns).transpose(1, 2).contiguous()
    runner.run(SCAN, {**fields, "decay": by_piece, **pool.fields}, pool.step)
    times = steps_of_time(steps[:, :channels], torch.zeros(channels))
    rows = ScanRows(mixed, writes, reads[:, :columns], times)
    for sequence, mine in enumerate(pool.rows):
        memory = matrices(pool.old(sequence), SCAN.heads)
        found = selective_scan(rows.of(mine), -decay, skip, memory)
        torch.testing.assert_close(out[mine], found, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(matrices(pool.new(sequence), SCAN.heads), memory, atol=1e-4, rtol=1e-4)
    assert (out[tokens] == 7).all()
    pool.check_others_unchanged()


def matrices(pieces, heads=HEADS):
    """Return the heads' matrices [heads, head_dim, columns] of their pieces, which have them by columns."""
    each = len(pieces) // heads
    return torch.stack([torch.cat(pieces[head * each : (head + 1) * each], 1).t() for head in range(heads)])
