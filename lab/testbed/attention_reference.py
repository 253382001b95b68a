"""Paged attention in plain torch, one sequence and head at a time: the slow and obvious oracle of every kernel.

Pool: [slots, layers, 2, kv_heads, block_size, head_dim], K before V.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from pillion.kernels.step import StepBatch


def paged_attention(
    queries: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    batch: StepBatch,
    *,
    scale: float,
    window: int = 0,
    chunked: bool = False,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention of queries [T, heads, head_dim] over the pool, in float32; cast to the queries' dtype.

    A query at position p attends to positions max(0, p - window + 1) .. p of its sequence (window 0: from 0), or if
    ``chunked`` from the last multiple of the window on. Query head h reads KV head h // (heads / kv_heads). With a
    ``softcap`` (Gemma 2) scaled scores become softcap * tanh(score / softcap). ``sinks`` [heads]: scores that each
    head's softmax includes without a value (gpt-oss).
    """
    _, _, _, kv_heads, block_size, head_dim = pool.shape
    group = queries.shape[1] // kv_heads
    out = torch.empty_like(queries)
    for sequence, table in enumerate(batch.block_tables):
        context = int(batch.context_lens[sequence])
        slots = torch.from_numpy(table[: math.ceil(context / block_size)].astype(np.int64))
        # [blocks, 2, kv_heads, block_size, head_dim] -> [2, kv_heads, tokens, head_dim]
        pieces = pool[slots, layer].float().permute(1, 2, 0, 3, 4)
        keys, values = pieces.reshape(2, kv_heads, -1, head_dim)[:, :, :context]
        for row in range(batch.query_starts[sequence], batch.query_starts[sequence + 1]):
            last = int(batch.positions[row]) + 1
            first = max(0, last - window) if window else 0
            if window and chunked:
                first = (last - 1) // window * window
            for head in range(queries.shape[1]):
                query = queries[row, head].float()
                scores = keys[head // group, first:last] @ query * scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat((scores, sinks[head, None].float()))
                weights = torch.softmax(scores, 0)[: last - first]
                out[row, head] = (weights @ values[head // group, first:last]).to(out.dtype)
    return out
