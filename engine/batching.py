"""From a step's plan to the arrays of its batch: the only place that lays tokens and block tables side by side."""

from __future__ import annotations

import numpy as np

from engine.batch import StepBatch
from engine.plan import StepPlan
from engine.sampler import SamplingRows


def build_batch(plan: StepPlan, block_size: int) -> StepBatch:
    """The batch of a plan that has at least one piece; shapes in :class:`StepBatch`."""
    pieces = plan.pieces
    starts = np.array([piece.start for piece in pieces], dtype=np.int32)
    counts = np.array([piece.count for piece in pieces], dtype=np.int32)
    ends = starts + counts
    query_starts = np.zeros(len(pieces) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_starts[1:])
    # Row r of sequence s is position starts[s] + (r - query_starts[s]).
    positions = np.arange(query_starts[-1], dtype=np.int32) + np.repeat(starts - query_starts[:-1], counts)
    token_ids = np.concatenate([p.sequence.tokens(p.start, p.start + p.count) for p in pieces])
    num_blocks = -(-ends // block_size)
    tables = np.zeros((len(pieces), int(num_blocks.max())), dtype=np.int32)
    for row, piece, used in zip(tables, pieces, num_blocks.tolist(), strict=True):
        row[:used] = piece.sequence.table()[:used]
    samples = np.array([piece.samples for piece in pieces], dtype=bool)
    return StepBatch(
        token_ids=token_ids,
        positions=positions,
        query_starts=query_starts,
        context_lens=ends,
        block_tables=tables,
        sample_rows=query_starts[1:][samples] - np.int32(1),
    )


def build_sampling(plan: StepPlan) -> SamplingRows:
    """How each sampling row chooses its token, in the order of the batch's ``sample_rows``.

    The position is the new token's own in prompt + answer, so a stream that moved or resumed draws the same (I6).
    """
    sequences = [piece.sequence for piece in plan.pieces if piece.samples]
    params = [s.spec.sampling for s in sequences if s.spec.sampling is not None]
    return SamplingRows(
        temperature=np.array([_said(p.temperature, 1.0) for p in params], dtype=np.float32),
        top_p=np.array([_said(p.top_p, 1.0) for p in params], dtype=np.float32),
        top_k=np.array([max(int(_said(p.top_k, 0)), 0) for p in params], dtype=np.int32),
        seeds=np.array([int(p.seed or 0) & (2**64 - 1) for p in params], dtype=np.uint64),
        positions=np.array([s.num_tokens for s in sequences], dtype=np.int64),
    )


def _said(value: float | None, default: float) -> float:
    return default if value is None else value
