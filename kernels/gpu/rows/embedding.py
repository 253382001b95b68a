"""Embedding of a step's tokens, some of which only the device knows yet.

A step may be launched before the host has the tokens that the previous step sampled. Id ``-1 - row`` stands for such a
token: ``sampled[row]`` on the device, or token 0 if that row sampled none.

On a tensor-parallel rank, a table has the rows of some tokens only. Embeddings of other tokens are then zeros, and the
sum over the ranks is the embedding. With position embeddings, the rank that has a token also adds its position's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pillion.kernels.gpu.dependent import dependent, wait_for_earlier
from pillion.kernels.gpu.launch import arch_of, cdiv, check, check_tensor
from pillion.kernels.gpu.tuned import tuned


@triton.jit
def _embed(
    ids,
    sampled,
    table,
    rows,
    positions,
    out,
    hidden,
    scale,
    FIRST: tl.constexpr,
    TOKENS: tl.constexpr,
    SCALED: tl.constexpr,
    POSITIONS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0)
    # The record is constant during a step. The previous step may still choose tokens, or read the rows of ``out``.
    token = tl.load(ids + row)
    wait_for_earlier(DEPENDENT)
    if token < 0:
        # A row without a finite logit has sampled -1. Its request fails once the host receives that; until then any id
        # will do.
        token = tl.maximum(tl.load(sampled + (-1 - token)), 0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    stored = inside
    if TOKENS:
        token -= FIRST
        stored = inside & (token >= 0) & (token < TOKENS)
    values = tl.load(table + token.to(tl.int64) * hidden + columns, mask=stored, other=0.0)
    if SCALED:
        values = (values.to(tl.float32) * scale).to(values.dtype)
    if POSITIONS:
        place = tl.load(rows + row).to(tl.int64)
        added = tl.load(positions + place * hidden + columns, mask=stored, other=0.0)
        values = (values.to(tl.float32) + added.to(tl.float32)).to(values.dtype)
    tl.store(out + row.to(tl.int64) * hidden + columns, values, mask=inside)


def embed(
    ids: torch.Tensor,
    sampled: torch.Tensor,
    table: torch.Tensor,
    out: torch.Tensor,
    scale: float = 1.0,
    tokens: range | None = None,
    positions: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Write the embeddings of ``ids``, times ``scale``, into ``out`` [T, hidden].

    ids: int32 [T], tokens, or ``-1 - row`` for ``sampled[row]``; not checked. sampled: int32 [R].
    table: [vocab, hidden], or [len(tokens), hidden] for ``tokens`` only; embeddings of other tokens are zeros.
    positions: int32 [T], not checked, and a table [positions, hidden] whose rows are added. None: nothing is added.
    Raises Internal for misshapen tensors.
    """
    check_tensor("ids", ids, (None,), torch.int32)
    check_tensor("sampled", sampled, (None,), torch.int32, ids.device)
    check_tensor(
        "table",
        table,
        (None if tokens is None else len(tokens), None),
        (torch.bfloat16, torch.float16, torch.float32),
        ids.device,
    )
    check_tensor("out", out, (len(ids), table.shape[1]), table.dtype, ids.device)
    rows, added = (ids, table) if positions is None else positions
    check_tensor("positions", rows, (len(ids),), torch.int32, ids.device)
    check_tensor("embeddings of positions", added, (None, table.shape[1]), table.dtype, ids.device)
    check(len(ids) > 0, "no tokens to embed")
    tile = _tile(arch_of(ids.device))
    hidden = table.shape[1]
    grid = (len(ids), cdiv(hidden, tile["BLOCK"]))
    share = {"FIRST": 0, "TOKENS": 0} if tokens is None else {"FIRST": tokens.start, "TOKENS": len(tokens)}
    flags = {"SCALED": scale != 1.0, "POSITIONS": positions is not None}
    _embed[grid](ids, sampled, table, rows, added, out, hidden, scale, **share, **flags, **tile)


def _tile(arch: int) -> dict[str, int]:
    use = tuned("embed", arch)
    return {"BLOCK": use["block"], "num_warps": use["num_warps"], **dependent(arch)}
