"""The kernel of convolutions over the last tokens of a sequence, against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from pillion.kernels.cpu.products.packing import pack_taps
from pillion.kernels.cpu.states.convolutions import PIECE_CHANNELS, Convolve
from pillion.kernels.torch.recurrences import Taps, convolve
from tests.support.kernel_runner import normal, runner_of, stride
from tests.support.piece_pool import PiecePool

SPECS = [
    Convolve(4, bias=True),
    Convolve(4, bias=False),
    Convolve(5, bias=True, gated=True),
    Convolve(3, bias=False, gated=True, bf16=True),
]
# The last piece is not full. Sequences have rows of one token and of several, with an earlier state or without.
CHANNELS, PIECES, COUNTS, FOUND = 150, 3, (1, 7, 2, 1), (True, False, True, False)

runner = runner_of(SPECS)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_outputs_and_states_match_the_reference(runner, spec):
    tokens, parts, width = sum(COUNTS), 3 if spec.gated else 1, PIECES * PIECE_CHANNELS
    x, taps = normal(tokens, parts, width), Taps(normal(CHANNELS, spec.taps, seed=1), normal(CHANNELS, seed=2))
    pool = PiecePool(COUNTS, FOUND, [(spec.taps - 1, PIECE_CHANNELS)] * PIECES)
    kind = torch.bfloat16 if spec.bf16 else torch.float32
    out = torch.full((tokens + 1, width), 7.0, dtype=kind)
    values = {
        "x": x.flatten(1).contiguous(),
        "taps": pack_taps(taps.factors),
        "bias": pack_taps(taps.bias[:, None]) if spec.bias else None,
        "out": out,
        "x_stride": stride(x),
        "part_bytes": width * 4 if spec.gated else 0,
        "out_stride": stride(out),
        "pieces": PIECES,
        **pool.fields,
    }
    runner.run(spec, values, pool.step)
    inputs = x[:, 0] * x[:, 2] if spec.gated else x[:, 0]
    for sequence, rows in enumerate(pool.rows):
        state = torch.cat(pool.old(sequence), 1)[:, :CHANNELS].contiguous()
        found = convolve(inputs[rows, :CHANNELS], state, Taps(taps.factors, taps.bias if spec.bias else None))
        wanted = (x[rows, 1, :CHANNELS] * found).to(kind) if spec.gated else silu(found)
        torch.testing.assert_close(out[rows, :CHANNELS], wanted)
        assert torch.equal(torch.cat(pool.new(sequence), 1)[:, :CHANNELS], state)
    assert (out[tokens] == 7).all()
    pool.check_others_unchanged()
