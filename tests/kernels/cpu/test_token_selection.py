"""The indexer of sparse attention: which tokens each query sees, and attention to these alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pillion.kernels.cpu.attention.attention_rows import AttentionShape
from pillion.kernels.cpu.attention.cpu_attention import Attention, AttentionMerge, row_counts
from pillion.kernels.cpu.attention.cpu_attention_plan import CpuAttentionPlanner
from pillion.kernels.cpu.attention.token_selection import SelectTokens
from tests.support.attention_case import KV_HEADS, PARTIAL_ROWS, AttentionCase
from tests.support.batches import Sequences
from tests.support.kernel_runner import batch_step, padded, runner_of, stride
from tests.support.plain_pools import pack_pool

HEADS, DIM, TOP = 6, 32, 40
BF16 = AttentionShape(48, 4, 16, True, latents=32, index=DIM)
FLOAT = AttentionShape(48, 4, 32, False, latents=32, index=DIM)
PLAIN = AttentionShape(64, 4, 16, True)
SPECS = [SelectTokens(shape, HEADS, DIM, TOP, 16, rotated=False) for shape in (BF16, FLOAT)]
runner = runner_of([*SPECS, Attention(PLAIN), Attention(PLAIN, sparse=True), AttentionMerge(PLAIN)])


def whole(*shape, seed):
    """Small whole numbers, whose products and sums are exact in every type, so that many scores are equal."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize("spec", SPECS, ids=["bf16", "float32"])
def test_the_best_tokens_are_selected_and_ties_go_to_the_first(runner, spec):
    parts, shape = [(0, 50), (90, 1), (30, 20), (200, 7), (0, 1)], spec.shape
    dtype = torch.bfloat16 if shape.bf16 else torch.float32
    sequences = Sequences(40, shape.block_size, len(parts))
    numbers = sequences.add(len(parts))
    for number, (before, _) in zip(numbers, parts, strict=True):
        if before:
            sequences.step([(number, [0] * before)])
    batch = sequences.step([(number, [0] * now) for number, (_, now) in zip(numbers, parts, strict=True)])
    width = shape.head_dim + DIM
    pool = torch.full((40, 1, 2, 1, shape.block_size, width), torch.nan)
    pool[..., shape.head_dim :] = whole(40, 1, 2, 1, shape.block_size, DIM, seed=1)
    queries, weights = whole(batch.num_tokens, HEADS, DIM, seed=2), whole(batch.num_tokens, HEADS, seed=3)
    held = pack_pool(pool.to(dtype))
    selected = torch.full((batch.num_tokens, 32), 0, dtype=torch.int16)
    rows, scales = padded(queries.flatten(1).to(dtype)), padded(weights)
    values = {
        "queries": rows,
        "weights": scales,
        "selected": selected,
        "cos": None,
        "sin": None,
        "queries_stride": stride(rows),
        "weights_stride": stride(scales),
        "selected_stride": stride(selected),
        "layer_offset": 0,
        "slot_bytes": 2 * shape.piece_bytes,
        "factor": 0.5,
    }
    runner.run(spec, values, batch_step(batch, held))
    bits = np.unpackbits(selected.numpy().view(np.uint8), axis=1, bitorder="little")
    owners = np.repeat(np.arange(len(parts)), [now for _, now in parts])
    for row, (number, position) in enumerate(zip(owners, batch.positions, strict=True)):
        table, seen = torch.from_numpy(batch.block_tables[number]).long(), int(position) + 1
        keys = pool[table, 0, 0, 0, :, shape.head_dim :].reshape(-1, DIM)[:seen]
        scores = ((queries[row] @ keys.T).relu() * weights[row][:, None]).sum(0)
        best = scores.sort(descending=True, stable=True).indices[:TOP]
        assert np.flatnonzero(bits[row, :seen]).tolist() == sorted(best.tolist())


def attended(runner, case, **options):
    planner = CpuAttentionPlanner(
        PLAIN.group, row_counts(runner.isa, PLAIN.group, PLAIN.bf16), KV_HEADS, 2, PARTIAL_ROWS, 0
    )
    return case.run(runner, planner.plan(case.batch), **options)


def test_attention_sees_only_selected_tokens(runner):
    """With everything selected the bits are those without a selection; with one token the result is its value."""
    case = AttentionCase.of(PLAIN, [(0, 600, 1), (1, 0, 30), (2, 500, 20), (3, 1100, 2)])
    every = torch.full((case.batch.num_tokens, 80), -1, dtype=torch.int16)
    assert torch.equal(attended(runner, case, selected=every), attended(runner, case))
    one = torch.zeros_like(every)
    one[:, 0] = 1 << 3
    seen = torch.from_numpy(case.batch.positions) >= 3
    found = attended(runner, case, selected=one)[seen]
    keys = replace(case, queries=torch.zeros_like(case.queries))
    assert torch.equal(found, attended(runner, keys, selected=one)[seen])
    assert found.unflatten(1, (KV_HEADS, PLAIN.group, -1)).float().std(2).max() == 0
