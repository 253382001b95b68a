"""Choice of the experts of each row: router product, scores, top-k, and the order of few pairs, in one launch.

    rows [T, H] --router [E, H]--> products --softmax or sigmoid--> scores --best k--> scores [T, k], chosen [T, k]

The router is small, so the product of few rows is latency-bound: its inputs are split (split-K), and its experts are
divided into blocks, each for one program. The last program of a tile of 16 rows to finish, identified by a ticket, adds
up the splits in order, and chooses. Many rows have enough tiles to fill the device, so a program computes all splits of
its tile itself, and adds them up in the same order. So a row's bits depend on the router's shape alone. The router is
the left operand of the products of tiles, as in :mod:`pillion.kernels.gpu.products.quantized_product`.

In addition to the routed experts, a row may have experts common to all rows (shared experts), with a score of 1 or that
of a gate: the sigmoid of the row's product with one vector, which is computed like the router's products.

If there are few pairs of a row and an expert, they are also sorted here
(:mod:`pillion.kernels.gpu.experts.pair_sorting`), by the last program to choose, identified by another ticket.

The last program of a tile, and of the launch, resets its ticket for the next replay of a graph. Among equal scores the
lowest expert wins, which torch.topk does not guarantee.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from pillion.kernels.gpu.dependent import dependent, wait_for_earlier
from pillion.kernels.gpu.dot import dot
from pillion.kernels.gpu.experts.pair_sorting import COMPARED, FEW_PAIRS, PairOrder, columns_of, sort_few
from pillion.kernels.gpu.launch import FLOAT_DTYPES, arch_of, cdiv, check, check_tensor, next_power_of_2
from pillion.kernels.gpu.tuned import tuned

# Rows per tile: the smallest tensor-core tile.
ROWS = 16
# Max rows of split-K launches.
SPLIT_K_MAX_ROWS = 256
# Max splits of the inputs; the inputs of a split are a multiple of the second number.
MAX_PARTS, PART_UNIT = 8, 128
# Tickets of tiles. The launch's own ticket follows.
TICKETS = max(SPLIT_K_MAX_ROWS, FEW_PAIRS) // ROWS
# Max experts per block of a product.
BLOCK_EXPERTS = 64
# Max experts whose scores of 16 rows fit into registers: with the default number of warps, and with one warp per row.
WARPS_EXPERTS, MAX_EXPERTS = 256, 1024
# Columns per slab of a row's scores: four for each of a warp's 32 threads.
SLAB_COLUMNS = tl.constexpr(128)
# Key below those of all scores, for experts that are chosen already or not eligible.
_CHOSEN = tl.constexpr(-(2**31))


@dataclass(frozen=True, slots=True)
class RouteOptions:
    """How experts are chosen.

    Attributes:
        experts: number of routed experts.
        per_token: routed experts per row.
        normalize: scale the scores of a row's experts to a sum of 1.
        sigmoid: scores are the logits' sigmoids, not their softmax.
        exact: do not round the logits to the rows' type.
        scale: factor of the scores.
        always: number of experts of every row (shared experts), with ids from ``experts`` on.
        groups: number of groups of consecutive experts.
        kept_groups: a row's experts are chosen from this many of its best groups.
        group_best: a group's score is the sum of this many of its best scores.
    """

    experts: int
    per_token: int
    normalize: bool
    sigmoid: bool = False
    exact: bool = False
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 2
    always: int = 0

    @property
    def choices(self) -> int:
        """Experts per row, including shared ones."""
        return self.per_token + self.always

    @property
    def group_columns(self) -> int:
        """Columns of a group in the kernel's tile, a power of 2."""
        return next_power_of_2(self.experts // self.groups)

    @property
    def columns(self) -> int:
        """Columns of the kernel's tile of scores, at least the smallest tensor-core tile."""
        return max(ROWS, self.group_columns * next_power_of_2(self.groups))


@triton.jit
def _expert_of(column, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, GROUP_COLUMNS: tl.constexpr):
    """Return the expert of each column, and False for padding columns: groups begin at multiples of GROUP_COLUMNS."""
    size: tl.constexpr = EXPERTS // GROUPS
    group, place = column // GROUP_COLUMNS, column % GROUP_COLUMNS
    real = (place < size) & (group < GROUPS)
    return tl.where(real, group * size + place, 0), real


@triton.jit
def _partial_sums(rows, router, row, expert, begin, end, hidden, BLOCK_INPUTS: tl.constexpr):
    """Return the products' sums over inputs ``begin`` .. ``end`` - 1: float32 [experts, rows]."""
    inputs = tl.arange(0, BLOCK_INPUTS)
    acc = tl.zeros((expert.shape[0], row.shape[0]), tl.float32)
    left = router + expert[:, None] * hidden + inputs[None, :]
    right = rows + row.to(tl.int64)[None, :] * hidden + inputs[:, None]
    for k in range(begin, end, BLOCK_INPUTS):
        k_mask = k + inputs < end
        weights = tl.load(left + k, mask=k_mask[None, :], other=0.0)
        values = tl.load(right + k, mask=k_mask[:, None], other=0.0)
        acc = dot(weights, values, acc)
    return acc


@triton.jit
def _keys(values):
    """Return int32 keys that are ordered like the float32 ``values``; zeros of both signs are equal. A warp reduces the
    maximum of its lanes' integers with one instruction, but needs ten shuffles for floats with their indices."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _values(keys):
    """Return the float32 values of keys: the inverse of _keys."""
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _first_best(keys, place):
    """Return, for each row of keys [SLABS, ROWS, LANES], the lowest index of the maximum, and the maximum. ``place``
    [SLABS, 1, LANES] has the index of each key in its row."""
    best = tl.max(tl.max(keys, 0), 1)
    places: tl.constexpr = keys.shape[0] * keys.shape[2]
    return tl.min(tl.min(tl.where(keys == best[None, :, None], place, places), 0), 1), best


@triton.jit
def _of_best_groups(
    keys, GROUPS: tl.constexpr, GROUP_COLUMNS: tl.constexpr, KEPT_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr,
):  # fmt: skip
    """Return keys [SLABS, ROWS, LANES] with _CHOSEN for experts outside of a row's best groups."""
    slabs: tl.constexpr = keys.shape[0]
    rows: tl.constexpr = keys.shape[1]
    lanes: tl.constexpr = keys.shape[2]
    # A group is a part of a slab's lanes, or several slabs.
    inner: tl.constexpr = min(GROUP_COLUMNS, lanes)
    deep: tl.constexpr = GROUP_COLUMNS // inner
    grouped = tl.reshape(keys, (slabs // deep, deep, rows, lanes // inner, inner))
    place = tl.arange(0, deep)[None, :, None, None, None] * inner + tl.arange(0, inner)[None, None, None, None, :]
    remaining = grouped
    total = tl.zeros((slabs // deep, rows, lanes // inner), tl.float32)
    for turn in tl.static_range(GROUP_BEST):
        best = tl.max(tl.max(remaining, 4), 1)
        total += _values(best)
        if turn + 1 < GROUP_BEST:
            is_best = remaining == best[:, None, :, :, None]
            first = tl.min(tl.min(tl.where(is_best, place, GROUP_COLUMNS), 4), 1)
            remaining = tl.where(place == first[:, None, :, :, None], _CHOSEN, remaining)
    group = tl.arange(0, slabs // deep)[:, None, None] * (lanes // inner) + tl.arange(0, lanes // inner)[None, None, :]
    totals = tl.where(group < GROUPS, _keys(total), _CHOSEN)
    kept = totals != totals
    for _ in tl.static_range(KEPT_GROUPS):
        index, _ = _first_best(totals, group)
        is_best = group == index[None, :, None]
        kept = kept | is_best
        totals = tl.where(is_best, _CHOSEN, totals)
    kept = tl.broadcast_to(kept[:, None, :, :, None], grouped.shape)
    return tl.where(tl.reshape(kept, (slabs, rows, lanes)), keys, _CHOSEN)


# fmt: off
@triton.jit
def _choose(
    products, column, real, biases,
    GROUP_COLUMNS: tl.constexpr, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, KEPT_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr, PER_TOKEN: tl.constexpr, PLACES: tl.constexpr, SIGMOID: tl.constexpr,
    CHOICE_BIAS: tl.constexpr,
):
    # fmt: on
    """Return the scores [ROWS, PLACES] of the best experts, and their ids. ``products`` [SLABS, ROWS, LANES] are the
    logits: -inf in columns that are not ``real``."""
    place = tl.arange(0, PLACES)[None, :]
    if SIGMOID:
        all_scores = tl.sigmoid(products)
    else:
        all_scores = tl.exp(products - tl.max(tl.max(products, 0), 1)[None, :, None])
        all_scores = all_scores / tl.sum(tl.sum(all_scores, 0), 1)[None, :, None]
    choices = all_scores
    if CHOICE_BIAS:
        choices += biases
    keys = tl.where(real, _keys(choices), _CHOSEN)
    if GROUPS > 1:
        keys = _of_best_groups(keys, GROUPS, GROUP_COLUMNS, KEPT_GROUPS, GROUP_BEST)
    scores = tl.zeros((products.shape[1], PLACES), tl.float32)
    numbers = tl.full((products.shape[1], PLACES), 0, tl.int32)
    for turn in tl.static_range(PER_TOKEN):
        index, best = _first_best(keys, column)
        is_best = column == index[None, :, None]
        if CHOICE_BIAS:
            # The chosen expert's score without bias: scores are not negative, so it is the maximum among zeros.
            best = tl.max(tl.max(tl.where(is_best, _keys(all_scores), 0), 0), 1)
        number = index // GROUP_COLUMNS * (EXPERTS // GROUPS) + index % GROUP_COLUMNS
        scores = tl.where(place == turn, _values(best)[:, None], scores)
        numbers = tl.where(place == turn, number[:, None], numbers)
        keys = tl.where(is_best, _CHOSEN, keys)
    return scores, numbers


@triton.jit
def _split_product(
    rows, router, logits, read, part, block, plane, hidden,
    EXPERTS: tl.constexpr, GROUPS: tl.constexpr, GROUP_COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
):  # fmt: skip
    """Compute one split of a tile's logits for one block of experts. Splits are ``plane`` values apart."""
    column = block * BLOCK_EXPERTS + tl.arange(0, BLOCK_EXPERTS)
    expert, _ = _expert_of(column, EXPERTS, GROUPS, GROUP_COLUMNS)
    begin = part * DEPTH
    acc = _partial_sums(rows, router, read, expert, begin, tl.minimum(begin + DEPTH, hidden), hidden, BLOCK_INPUTS)
    tl.store(logits[None, :] + part * plane + column[:, None], acc)


@triton.jit
def _whole_product(
    rows, router, gate, logits, gates, read, hidden,
    EXPERTS: tl.constexpr, GROUPS: tl.constexpr, GROUP_COLUMNS: tl.constexpr, GATE: tl.constexpr, PARTS: tl.constexpr,
    DEPTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
):  # fmt: skip
    """Compute all splits of a tile's logits and gate products, and add them up in order."""
    for block in range(COLUMNS // BLOCK_EXPERTS):
        column = block * BLOCK_EXPERTS + tl.arange(0, BLOCK_EXPERTS)
        expert, _ = _expert_of(column, EXPERTS, GROUPS, GROUP_COLUMNS)
        total = tl.zeros((BLOCK_EXPERTS, ROWS), tl.float32)
        for begin in range(0, PARTS * DEPTH, DEPTH):
            end = tl.minimum(begin + DEPTH, hidden)
            total += _partial_sums(rows, router, read, expert, begin, end, hidden, BLOCK_INPUTS)
        tl.store(logits[None, :] + column[:, None], total)
    if GATE:
        product = tl.zeros((ROWS,), tl.float32)
        for begin in range(0, PARTS * DEPTH, DEPTH):
            end = tl.minimum(begin + DEPTH, hidden)
            product += _gate_part(rows, gate, read, begin, end, hidden, ROWS, BLOCK_INPUTS)
        tl.store(gates, product)


@triton.jit
def _gate_part(rows, gate, row, begin, end, hidden, ROWS: tl.constexpr, BLOCK_INPUTS: tl.constexpr):
    """Return the sums over inputs ``begin`` .. ``end`` - 1 of the rows' products with the gate's vector, computed as a
    tile of ROWS equal experts, like the router's products."""
    index = tl.arange(0, ROWS)
    acc = _partial_sums(rows, gate, row, index * 0, begin, end, hidden, BLOCK_INPUTS)
    return tl.sum(tl.where((index == 0)[:, None], acc, 0.0), 0)


@triton.jit
def _always(
    gates, scores, chosen, row, tokens, counted, plane, own_begin, own_end, TYPE: tl.constexpr, EXPERTS: tl.constexpr,
    PER_TOKEN: tl.constexpr, ALWAYS: tl.constexpr, MORE: tl.constexpr, GATE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write scores and ids of the shared experts after those of the routed ones. Splits of the gate's products are
    ``plane`` values apart."""
    weight = tl.full((row.shape[0],), 1.0, tl.float32)
    if GATE:
        product = tl.zeros((row.shape[0],), tl.float32)
        for part in tl.static_range(PARTS):
            product += tl.load(gates + part * plane, mask=counted, other=0.0, cache_modifier=".cg")
        weight = tl.sigmoid(product.to(TYPE).to(tl.float32))
    place = tl.arange(0, MORE)[None, :]
    mask = (row < tokens)[:, None] & (place < ALWAYS)
    at = row.to(tl.int64)[:, None] * (PER_TOKEN + ALWAYS) + PER_TOKEN + place
    tl.store(scores + at, tl.where(counted[:, None], weight[:, None], 0.0), mask=mask)
    number = EXPERTS + place
    own = counted[:, None] & (number >= own_begin) & (number < own_end)
    tl.store(chosen + at, tl.where(own, number - own_begin, -1), mask=mask)


# fmt: off
@triton.jit
def _store_choices(
    parts, bias, choice_bias, factors, added, count, scores, chosen, begin, row, tokens, first, plane, scale,
    own_begin, own_end, ALWAYS: tl.constexpr, TYPE: tl.constexpr, EXPERTS: tl.constexpr, GROUPS: tl.constexpr,
    GROUP_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr, KEPT_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr, PER_TOKEN: tl.constexpr,
    PLACES: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, EXACT: tl.constexpr,
    BIAS: tl.constexpr, CHOICE_BIAS: tl.constexpr, FACTORS: tl.constexpr, ADDED: tl.constexpr, PARTS: tl.constexpr,
):
    # fmt: on
    """Add up the splits of a tile's logits, ``plane`` values apart, and write the scores and ids of the experts."""
    # A warp has whole rows, i.e. the lanes of all slabs, so that it finds their best experts alone. All releases of
    # Triton distribute a vector in its order, so that a slab's rows go to all warps; from a load with more dimensions,
    # Triton 3.6 distributes the slabs. Values common to all rows are loaded as vectors of the same size, too, since a
    # load of fewer values would get another layout.
    lanes: tl.constexpr = min(COLUMNS, SLAB_COLUMNS)
    slabs: tl.constexpr = COLUMNS // lanes
    rows: tl.constexpr = row.shape[0]
    cell = tl.arange(0, slabs * rows * lanes)
    column, each = cell // (rows * lanes) * lanes + cell % lanes, begin + cell // lanes % rows
    expert, real = _expert_of(column, EXPERTS, GROUPS, GROUP_COLUMNS)
    step_rows = tl.load(count)
    counted, mask = row + first < step_rows, each + first < step_rows
    products = tl.zeros(cell.shape, tl.float32)
    for part in tl.static_range(PARTS):
        # Written by other programs, so bypass the L1.
        at = parts + each.to(tl.int64) * COLUMNS + part * plane + column
        products += tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
    kind: tl.constexpr = tl.float32 if EXACT else TYPE
    if BIAS:
        products += tl.load(bias + expert).to(kind).to(tl.float32)
    products = products.to(kind).to(tl.float32)
    if ADDED:
        products += tl.load(added + each.to(tl.int64) * EXPERTS + expert, mask=mask & real, other=0.0)
    products = tl.where(real, products, float("-inf"))
    biases = tl.load(choice_bias + expert) if CHOICE_BIAS else products
    shape: tl.constexpr = (slabs, rows, lanes)
    products, biases = tl.reshape(products, shape), tl.reshape(biases, shape)
    column, real = tl.reshape(column, shape), tl.reshape(real, shape)
    values, numbers = _choose(
        products, column, real, biases, GROUP_COLUMNS, EXPERTS, GROUPS, KEPT_GROUPS, GROUP_BEST, PER_TOKEN,
        PLACES, SIGMOID, CHOICE_BIAS,
    )  # fmt: skip
    if NORMALIZE:
        values = values / tl.sum(values, 1)[:, None]
    if FACTORS:
        values *= tl.load(factors + numbers)
    values *= scale
    place = tl.arange(0, PLACES)[None, :]
    mask = (row < tokens)[:, None] & (place < PER_TOKEN)
    at = row.to(tl.int64)[:, None] * (PER_TOKEN + ALWAYS) + place
    tl.store(scores + at, tl.where(counted[:, None], values, 0.0), mask=mask)
    own = counted[:, None] & (numbers >= own_begin) & (numbers < own_end)
    tl.store(chosen + at, tl.where(own, numbers - own_begin, -1), mask=mask)


@triton.jit
def _sort_last(
    ticket, programs, chosen, order, pair_tiles, tile_count, pairs, tile_rows,
    OWN_COLUMNS: tl.constexpr, SORTED: tl.constexpr, COMPARED: tl.constexpr,
):  # fmt: skip
    """Sort the pairs of all tiles if this is the last of the ``programs`` that write pairs."""
    tl.debug_barrier()
    finished = programs * 0
    if programs > 1:
        finished = tl.atomic_add(ticket, 1, sem="acq_rel")
    if finished == programs - 1:
        tl.store(ticket, 0)
        sort_few(chosen, order, pair_tiles, tile_count, pairs, tile_rows, OWN_COLUMNS, SORTED, COMPARED)


# fmt: off
@triton.jit(do_not_specialize=["tokens", "first", "own_begin", "own_end", "tile_rows"])
def _route(
    rows, router, bias, choice_bias, factors, added, gate, count, parts, tickets, scores, chosen, order, pair_tiles,
    tile_count, tokens, first, hidden, scale, own_begin, own_end, tile_rows,
    EXPERTS: tl.constexpr, GROUPS: tl.constexpr, GROUP_COLUMNS: tl.constexpr, COLUMNS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr, PER_TOKEN: tl.constexpr, PLACES: tl.constexpr,
    SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, EXACT: tl.constexpr, BIAS: tl.constexpr,
    CHOICE_BIAS: tl.constexpr, FACTORS: tl.constexpr, ADDED: tl.constexpr, GATE: tl.constexpr, ALWAYS: tl.constexpr,
    MORE: tl.constexpr, PARTS: tl.constexpr, DEPTH: tl.constexpr, SPLIT_K: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
    SORTED: tl.constexpr, OWN_COLUMNS: tl.constexpr, COMPARED: tl.constexpr, TICKETS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    # fmt: on
    """Choose the experts of one tile of rows. With SPLIT_K, a program computes one split of the tile's logits for one
    block of experts. If SORTED is not 0, the launch also sorts its pairs, of which there are at most SORTED."""
    blocks: tl.constexpr = COLUMNS // BLOCK_EXPERTS
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    row = tile * ROWS + tl.arange(0, ROWS)
    read = tl.minimum(row, tokens - 1)
    # Partial logits are [splits, rows of all tiles, COLUMNS].
    logits = parts + row.to(tl.int64) * COLUMNS
    plane = tiles * ROWS * COLUMNS
    planes: tl.constexpr = PARTS if SPLIT_K else 1
    # Followed by the gate's partial products, [splits, rows of all tiles].
    gates = parts + planes * plane + row
    is_last = True
    wait_for_earlier(DEPENDENT)
    if SPLIT_K:
        part, block = tl.program_id(1), tl.program_id(2)
        # The gate is the block after the last one.
        if GATE and block == blocks:
            begin, end = part * DEPTH, tl.minimum(part * DEPTH + DEPTH, hidden)
            product = _gate_part(rows, gate, read, begin, end, hidden, ROWS, BLOCK_INPUTS)
            tl.store(gates + part * tiles * ROWS, product)
        else:
            _split_product(
                rows, router, logits, read, part, block, plane, hidden,
                EXPERTS, GROUPS, GROUP_COLUMNS, DEPTH, BLOCK_EXPERTS, BLOCK_INPUTS,
            )  # fmt: skip
        tl.debug_barrier()
        is_last = tl.atomic_add(tickets + tile, 1, sem="acq_rel") == PARTS * (blocks + GATE) - 1
    else:
        _whole_product(
            rows, router, gate, logits, gates, read, hidden, EXPERTS, GROUPS, GROUP_COLUMNS, GATE, PARTS, DEPTH, ROWS,
            COLUMNS, BLOCK_EXPERTS, BLOCK_INPUTS,
        )  # fmt: skip
        tl.debug_barrier()
    if is_last:
        if SPLIT_K:
            tl.store(tickets + tile, 0)
        _store_choices(
            parts, bias, choice_bias, factors, added, count, scores, chosen, tile * ROWS, row, tokens, first, plane,
            scale, own_begin, own_end, ALWAYS, rows.dtype.element_ty, EXPERTS, GROUPS, GROUP_COLUMNS, COLUMNS,
            KEPT_GROUPS, GROUP_BEST, PER_TOKEN, PLACES, SIGMOID, NORMALIZE, EXACT, BIAS, CHOICE_BIAS, FACTORS,
            ADDED, planes,
        )  # fmt: skip
        if ALWAYS:
            _always(
                gates, scores, chosen, row, tokens, row + first < tl.load(count), tiles * ROWS, own_begin, own_end,
                rows.dtype.element_ty, EXPERTS, PER_TOKEN, ALWAYS, MORE, GATE, planes,
            )  # fmt: skip
        if SORTED:
            _sort_last(
                tickets + TICKETS, tiles, chosen, order, pair_tiles, tile_count, tokens * (PER_TOKEN + ALWAYS),
                tile_rows, OWN_COLUMNS, SORTED, COMPARED,
            )  # fmt: skip


def parts_of(hidden: int) -> tuple[int, int]:
    """Return the number of splits of a router's inputs, and the inputs per split."""
    depth = cdiv(hidden, MAX_PARTS * PART_UNIT) * PART_UNIT
    return cdiv(hidden, depth), depth


class ExpertRouter:
    """Router of all layers of a model. Owns the workspace: partial logits, and tickets of tiles.

    A call neither allocates nor synchronizes, so that it can be captured in a CUDA graph.
    """

    def __init__(self, columns: int, hidden: int, max_rows: int, device: torch.device) -> None:
        """Allocate the workspace for rows [max_rows, hidden] and routers with at most ``columns``
        (RouteOptions.columns)."""
        tiles = cdiv(max_rows, ROWS)
        split_k_tiles = min(tiles, SPLIT_K_MAX_ROWS // ROWS) * parts_of(hidden)[0]
        # One more column for the gate's product.
        self._parts = torch.zeros(max(tiles, split_k_tiles) * ROWS * (columns + 1), dtype=torch.float32, device=device)
        self._tickets = torch.zeros(TICKETS + 1, dtype=torch.int32, device=device)

    def __call__(
        self,
        rows: torch.Tensor,
        router: torch.Tensor,
        how: RouteOptions,
        count: torch.Tensor,
        scores: torch.Tensor,
        chosen: torch.Tensor,
        *,
        first: int = 0,
        own: range | None = None,
        bias: torch.Tensor | None = None,
        choice_bias: torch.Tensor | None = None,
        factors: torch.Tensor | None = None,
        added: torch.Tensor | None = None,
        gate: torch.Tensor | None = None,
        into: PairOrder | None = None,
    ) -> None:
        """Route rows [T, H] by ``router`` [E, H] of their type: write expert ids to ``chosen`` int32 [T, k], and their
        scores to ``scores`` float32 [T, k]; k is ``how.choices``.

        count: int32 [1], rows without padding; later rows get expert -1 and score 0. first: index of the first row in
        its step. own: experts of this process, all by default; ``chosen`` numbers them from 0, and is -1 for others.
        bias, choice_bias, factors: float32 [E] or None: added to logits, added to scores for the choice only,
        multiplied with scores. added: float32 [T, E] or None: the adapters' logits. gate: [1, H] of the rows' type,
        gate of the shared experts; None for a score of 1. into: output of the sort of at most FEW_PAIRS pairs, None for
        no sort. Raises Internal for misshapen tensors.
        """
        tokens, hidden = rows.shape
        vector, pairs = (how.experts,), (tokens, how.choices)
        check_tensor("rows", rows, (None, None), FLOAT_DTYPES)
        check_tensor("router", router, (how.experts, hidden), rows.dtype, rows.device)
        check_tensor("count", count, (1,), torch.int32, rows.device)
        check_tensor("scores", scores, pairs, torch.float32, rows.device)
        check_tensor("chosen", chosen, pairs, torch.int32, rows.device)
        for name, tensor in (("bias", bias), ("choice_bias", choice_bias), ("factors", factors)):
            if tensor is not None:
                check_tensor(name, tensor, vector, torch.float32, rows.device)
        if added is not None:
            check_tensor("added", added, (tokens, how.experts), torch.float32, rows.device)
        if gate is not None:
            check_tensor("gate", gate, (1, hidden), rows.dtype, rows.device)
            check(how.always > 0, "a gate needs shared experts")
        check(tokens > 0 and how.experts <= MAX_EXPERTS, "{} rows and {} experts", tokens, how.experts)
        check(how.per_token <= how.experts // how.groups * how.kept_groups, "{} has too few experts left", how)
        constants = route_constants(how, hidden, tokens, rows.element_size(), arch_of(rows.device))
        optional = {"BIAS": bias, "CHOICE_BIAS": choice_bias, "FACTORS": factors, "ADDED": added, "GATE": gate}
        tiles, split_k = cdiv(tokens, ROWS), constants["SPLIT_K"]
        parts, blocks = constants["PARTS"], how.columns // constants["BLOCK_EXPERTS"] + (gate is not None)
        needed = tiles * ROWS * (how.columns + 1) * (parts if split_k else 1)
        check(needed <= len(self._parts), "the workspace is too small for {} rows", tokens)
        # Omitted tensors are not read, so any pointer will do.
        pointers = (scores if tensor is None else tensor for tensor in optional.values())
        flags: dict[str, int] = {name: tensor is not None for name, tensor in optional.items()}
        own = range(how.experts + how.always) if own is None else own
        flags |= {"SORTED": 0 if into is None else FEW_PAIRS, "OWN_COLUMNS": columns_of(len(own))}
        if into is not None:
            into.check(chosen, len(own))
            check(chosen.numel() <= FEW_PAIRS, "{} pairs are not few", chosen.numel())
        sorting = (chosen,) * 3 if into is None else (into.order, into.tiles, into.count)
        outs = self._parts, self._tickets, scores, chosen, *sorting
        numbers = tokens, first, hidden, how.scale, own.start, own.stop, 1 if into is None else into.tile_rows
        _route[(tiles, parts, blocks) if split_k else (tiles,)](
            rows, router, *pointers, count, *outs, *numbers, **constants, **flags
        )


def route_constants(how: RouteOptions, hidden: int, tokens: int, item_bytes: int, arch: int) -> dict[str, Any]:
    """Return the constexprs and launch options of :func:`_route`, except those of optional tensors and of the sort."""
    use = tuned("route_experts", arch, bytes=item_bytes)
    parts, depth = parts_of(hidden)
    return {
        "EXPERTS": how.experts,
        "GROUPS": how.groups,
        "GROUP_COLUMNS": how.group_columns,
        "COLUMNS": how.columns,
        "KEPT_GROUPS": how.kept_groups,
        "GROUP_BEST": how.group_best,
        "PER_TOKEN": how.per_token,
        "PLACES": next_power_of_2(how.per_token),
        "ALWAYS": how.always,
        "MORE": next_power_of_2(max(1, how.always)),
        "SIGMOID": how.sigmoid,
        "NORMALIZE": how.normalize,
        "EXACT": how.exact,
        "PARTS": parts,
        "DEPTH": depth,
        "SPLIT_K": tokens <= SPLIT_K_MAX_ROWS,
        "ROWS": ROWS,
        "BLOCK_EXPERTS": min(BLOCK_EXPERTS, how.columns),
        "BLOCK_INPUTS": use["inputs"],
        "COMPARED": COMPARED,
        "TICKETS": TICKETS,
        # Scores of more experts need the registers of more threads.
        "num_warps": min(ROWS, use["num_warps"] * max(1, how.columns // WARPS_EXPERTS)),
        "num_stages": use["num_stages"],
        **dependent(arch),
    }
