"""Gated delta rule (arXiv 2412.06464) over the rows of each sequence, chunk by chunk (arXiv 2406.06484).

    mixed, rates   --queries and keys of unit length, in place; learns; forgets--> mixed, learns, forgets
                   (KDA) output of a product --forgets, of each row of a head's matrix--> forgets
    each chunk and head     mixed, learns, forgets --products of keys, solved, with the factors' sums--> solved
    each sequence, head and piece of columns      all of these, the state before --> out, the state after

With G the sum of the logarithms of a chunk's factors up to each row, S the matrix at the begin of the chunk, and u the
learned values, the rule is (each product of rows t and j decays by exp(G_t - G_j), which for KDA is a factor of each of
the key's values):

    u_t = learns_t (v_t - k_t exp(G_t) S - sum over j < t of (k_t . k_j) u_j)
    out_t = q_t exp(G_t) S + sum over j <= t of (q_t . k_j) u_j

So u = T (v - k exp(G) S), where T = (1 + learns (k . k) below the diagonal)^-1 learns depends on the chunk alone. A
first kernel computes T and (q . k) of all chunks at once, row after row, which is stable for similar keys. A second one
iterates over the chunks of a sequence with some columns of a head's matrix [key_dim, head_dim] in the registers of a
warp: five products per chunk. Columns are independent, so fewer columns per program let more programs share a text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pillion.kernels.gpu.dot import dot
from pillion.kernels.gpu.launch import FLOAT_DTYPES, arch_of, cdiv, check, check_tensor, next_power_of_2
from pillion.kernels.gpu.tuned import tuned
from pillion.kernels.gpu_states.gpu_chunks import across, chunk_of, chunk_rows, running, wide_dot
from pillion.kernels.gpu_states.state_places import (
    READS,
    WRITES,
    StepOfStates,
    check_places,
    columns_of,
    most_chunks,
    piece_of,
    programs_for,
    softplus,
)
from pillion.kernels.state_pieces import CHUNK, PIECE_COLUMNS

# Epsilon of the L2 norm of queries and keys.
_L2_EPS = tl.constexpr(1e-6)


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """The heads of a delta rule: those of queries and keys (neighbouring heads of values share one), of ``key_dim``
    values, and those of values, of ``head_dim``. ``doubled``: learning rates are doubled. ``by_rows``: each row of a
    matrix has a separate decay (KDA)."""

    key_heads: int
    heads: int
    key_dim: int
    head_dim: int
    doubled: bool = False
    by_rows: bool = False

    @property
    def mixed(self) -> int:
        """Values of a row's queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.head_dim

    @property
    def factors(self) -> int:
        """Decay factors of a row."""
        return self.heads * (self.key_dim if self.by_rows else 1)

    @property
    def pieces(self) -> int:
        """Number of pieces of all matrices."""
        return self.heads * columns_of(self.head_dim)

    @property
    def sides(self) -> int:
        """Number of pieces of keys and rates of a partial chunk in a state."""
        return self.key_heads + self.heads

    def solved_values(self, tokens: int, seqs: int) -> int:
        """Return the max values of the solved chunks of a step of ``tokens`` tokens and ``seqs`` sequences."""
        return most_chunks(tokens, seqs) * self.heads * (2 * CHUNK + 1) * CHUNK

    def check(self) -> None:
        """Raise Internal for an inconsistent shape."""
        check(self.key_dim > 0 and self.heads % self.key_heads == 0, "{} does not fit together", self)
        check(not self.by_rows or self.heads == self.key_heads, "{} has heads that share factors", self)


@triton.jit
def _prepare(
    mixed, rates, decay, shift, learns, forgets, scale,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, MIXED: tl.constexpr, DOUBLED: tl.constexpr,
    BY_ROWS: tl.constexpr, BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr,
):  # fmt: skip
    """Norm a query or a key per program, first all queries, which are also scaled. The last program of a row computes
    its rates."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    RATES: tl.constexpr = HEADS if BY_ROWS else 2 * HEADS
    if head < 2 * KEY_HEADS:
        column = tl.arange(0, BLOCK)
        at = mixed + row * MIXED + head * KEY_DIM + column
        values = tl.load(at, mask=column < KEY_DIM, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(values * values, 0) + _L2_EPS)
        factor = tl.where(head < KEY_HEADS, factor * scale, factor)
        tl.store(at, (values * factor).to(mixed.dtype.element_ty), mask=column < KEY_DIM)
    else:
        every = tl.arange(0, HEAD_BLOCK)
        inside = every < HEADS
        learnt = tl.sigmoid(tl.load(rates + row * RATES + every, mask=inside, other=0.0).to(tl.float32))
        tl.store(learns + row * HEADS + every, learnt * 2.0 if DOUBLED else learnt, mask=inside)
        if not BY_ROWS:
            times = tl.load(rates + row * RATES + HEADS + every, mask=inside, other=0.0).to(tl.float32)
            times = softplus(times + tl.load(shift + every, mask=inside, other=0.0))
            rate = tl.exp(tl.load(decay + every, mask=inside, other=0.0))
            tl.store(forgets + row * HEADS + every, -rate * times, mask=inside)


@triton.jit
def _forget_factors(made, decay, shift, out, values, parts, KEY_DIM: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // parts).to(tl.int64)
    column = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    inside = column < values
    made_here = tl.load(made + row * values + column, mask=inside, other=0.0).to(tl.float32)
    times = softplus(made_here + tl.load(shift + column, mask=inside, other=0.0))
    rate = tl.exp(tl.load(decay + column // KEY_DIM, mask=inside, other=0.0))
    tl.store(out + row * values + column, -rate * times, mask=inside)


@triton.jit
def _keys(
    mixed, side, origin, begin, end, head,
    KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, MIXED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Load a chunk's queries (of the step only) and keys of a head of keys, [CHUNK, BLOCK] each."""
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < KEY_DIM
    at = mixed + head * KEY_DIM + column
    rows = origin + tl.arange(0, CHUNK)[:, None]
    mine = (rows >= begin) & (rows < end)
    query = tl.load(at + rows.to(tl.int64) * MIXED, mask=mine & inside, other=0.0)
    key = chunk_rows(at + KEY_HEADS * KEY_DIM, side + column, origin, begin, end, inside, MIXED, KEY_DIM, CHUNK)
    return query, key


@triton.jit
def _factors(
    forgets, side, origin, begin, end, head,
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, BY_ROWS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Load the logarithms of a head's factors of a chunk's rows, [CHUNK, 1], or [CHUNK, BLOCK] with BY_ROWS. In a state
    they follow the learning rates."""
    WIDTH: tl.constexpr = KEY_DIM if BY_ROWS else 1
    column = tl.arange(0, BLOCK if BY_ROWS else 1)[None, :]
    at = forgets + head * WIDTH + column
    return chunk_rows(at, side + CHUNK + column, origin, begin, end, column < WIDTH, HEADS * WIDTH, WIDTH, CHUNK)


@triton.jit
def _likeness(query, key, sums, BY_ROWS: tl.constexpr, CHUNK: tl.constexpr):
    """Return the products of each of a chunk's queries and keys with the keys up to it, with decay, [CHUNK, CHUNK]
    each. ``sums`` are those of the factors' logarithms up to each row."""
    place, other = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    reads, alike = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, CHUNK), tl.float32)
    if BY_ROWS:
        # Each of a key's values has its own decay, and factors since the chunk's begin have no inverse in float32.
        query, key = query.to(tl.float32), key.to(tl.float32)
        for row in range(CHUNK):
            since = sums - tl.sum(tl.where(place == row, sums, 0.0), 0)[None, :]
            left = tl.exp(tl.where(place >= row, since, float("-inf")))
            left *= tl.sum(tl.where(place == row, key, 0.0), 0)[None, :]
            reads = tl.where(other == row, tl.sum(query * left, 1)[:, None], reads)
            alike = tl.where(other == row, tl.sum(key * left, 1)[:, None], alike)
    else:
        left = tl.exp(tl.where(place >= other, sums - across(sums, CHUNK), float("-inf")))
        reads = dot(query, tl.trans(key), reads) * left
        alike = dot(key, tl.trans(key), alike) * left
    return reads, alike


@triton.jit
def _solve(
    mixed, learns, forgets, solved, pool, starts, count, firsts, chunk_starts, chunk_owners, slots, sides,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, MIXED: tl.constexpr, BY_ROWS: tl.constexpr,
    PAGES: tl.constexpr, SLOT_VALUES: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = KEY_DIM if BY_ROWS else 1
    place, other = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    one, wide = tl.arange(0, 1)[None, :], tl.arange(0, BLOCK if BY_ROWS else 1)[None, :]
    key_column = tl.arange(0, BLOCK)[None, :]
    for item in range(tl.program_id(0), tl.load(chunk_starts + tl.load(count)) * HEADS, tl.num_programs(0)):
        chunk, head = item // HEADS, item % HEADS
        key_head = head // (HEADS // KEY_HEADS)
        sequence = tl.load(chunk_owners + chunk)
        number = chunk - tl.load(chunk_starts + sequence)
        origin, begin, end = chunk_of(starts, firsts, sequence, number, CHUNK)
        key_side, _ = piece_of(pool, slots, sides, sequence, key_head, READS, PAGES, SLOT_VALUES)
        side, _ = piece_of(pool, slots, sides, sequence, KEY_HEADS + head, READS, PAGES, SLOT_VALUES)
        query, key = _keys(mixed, key_side, origin, begin, end, key_head, KEY_HEADS, KEY_DIM, MIXED, CHUNK, BLOCK)
        learnt = chunk_rows(learns + head + one, side + one, origin, begin, end, one < 1, HEADS, 1, CHUNK)
        factors = _factors(forgets, side, origin, begin, end, head, HEADS, KEY_DIM, BY_ROWS, CHUNK, BLOCK)
        sums = tl.cumsum(factors, 0) if BY_ROWS else running(factors, CHUNK)
        reads, alike = _likeness(query, key, sums, BY_ROWS, CHUNK)
        # Becomes the inverse without its diagonal: each row needs those before it.
        inverse = tl.where(place > other, -learnt * alike, 0.0)
        for row in range(1, CHUNK):
            mine = tl.sum(tl.where(place == row, inverse, 0.0), 0)
            mine += tl.sum(mine[:, None] * inverse, 0)
            inverse = tl.where(place == row, mine[None, :], inverse)
        inverse = tl.where(place == other, 1.0, inverse) * across(learnt, CHUNK)
        at = solved + tl.cast(item, tl.int64) * ((2 * CHUNK + 1) * CHUNK)
        tl.store(at + place * CHUNK + other, inverse)
        tl.store(at + CHUNK * CHUNK + place * CHUNK + other, reads)
        if not BY_ROWS:
            tl.store(at + 2 * CHUNK * CHUNK + place + one, sums)
        if origin + CHUNK > end:
            # Store the rows of a partial chunk, once each.
            side_after, there = piece_of(pool, slots, sides, sequence, KEY_HEADS + head, WRITES, PAGES, SLOT_VALUES)
            kept = (origin + place < end) & there
            tl.store(side_after + place + one, learnt, mask=kept)
            tl.store(side_after + CHUNK + place * WIDTH + wide, factors, mask=kept & (wide < WIDTH))
            if head % (HEADS // KEY_HEADS) == 0:
                key_after, _ = piece_of(pool, slots, sides, sequence, key_head, WRITES, PAGES, SLOT_VALUES)
                keys_at = key_after + place * KEY_DIM + key_column
                tl.store(keys_at, key.to(tl.float32), mask=kept & (key_column < KEY_DIM))


@triton.jit
def _delta_rule(
    mixed, forgets, solved, out, pool, starts, count, firsts, chunk_starts, slots, places, sides,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, HEAD_DIM: tl.constexpr, MIXED: tl.constexpr,
    BY_ROWS: tl.constexpr, EXACT: tl.constexpr, PAGES: tl.constexpr, SLOT_VALUES: tl.constexpr, CHUNK: tl.constexpr,
    PIECE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = HEAD_DIM // COLUMNS
    place, other = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    key_row = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = key_row < KEY_DIM
    nothing = tl.zeros((CHUNK, COLUMNS), tl.float32)
    for item in range(tl.program_id(0), tl.load(count) * HEADS * PARTS, tl.num_programs(0)):
        sequence, head = item // (HEADS * PARTS), item // PARTS % HEADS
        first = item % PARTS * COLUMNS
        number, within = head * (HEAD_DIM // PIECE) + first // PIECE, first % PIECE + column
        key_head = head // (HEADS // KEY_HEADS)
        old, known = piece_of(pool, slots, places, sequence, number, READS, PAGES, SLOT_VALUES)
        new, there = piece_of(pool, slots, places, sequence, number, WRITES, PAGES, SLOT_VALUES)
        key_side, _ = piece_of(pool, slots, sides, sequence, key_head, READS, PAGES, SLOT_VALUES)
        side, _ = piece_of(pool, slots, sides, sequence, KEY_HEADS + head, READS, PAGES, SLOT_VALUES)
        memory = tl.load(old + key_row * PIECE + within, mask=inside & known, other=0.0)
        values = mixed + 2 * KEY_HEADS * KEY_DIM + head * HEAD_DIM + first + column
        origin, begin, end = chunk_of(starts, firsts, sequence, 0, CHUNK)
        at = solved + (tl.load(chunk_starts + sequence).to(tl.int64) * HEADS + head) * ((2 * CHUNK + 1) * CHUNK)
        for row in tl.range(origin, end, CHUNK, disable_licm=True):
            rows = row + place
            mine = (rows >= begin) & (rows < end)
            query, key = _keys(mixed, key_side, row, begin, end, key_head, KEY_HEADS, KEY_DIM, MIXED, CHUNK, BLOCK)
            if BY_ROWS:
                factors = _factors(forgets, side, row, begin, end, head, HEADS, KEY_DIM, BY_ROWS, CHUNK, BLOCK)
                sums = tl.cumsum(factors, 0)
            else:
                sums = tl.load(at + 2 * CHUNK * CHUNK + place + tl.arange(0, 1)[None, :])
            kept_values = old + KEY_DIM * PIECE + within
            value = chunk_rows(values, kept_values, row, begin, end, column < COLUMNS, MIXED, PIECE, CHUNK)
            inverse = tl.load(at + place * CHUNK + other)
            reads = tl.load(at + CHUNK * CHUNK + place * CHUNK + other)
            at += HEADS * (2 * CHUNK + 1) * CHUNK
            left = tl.exp(sums)
            if BY_ROWS:
                remembered = wide_dot(key.to(tl.float32) * left, memory, nothing, EXACT)
                found = wide_dot(query.to(tl.float32) * left, memory, nothing, EXACT)
            else:
                remembered = wide_dot(key, memory, nothing, EXACT) * left
                found = wide_dot(query, memory, nothing, EXACT) * left
            new_values = wide_dot(inverse, value.to(tl.float32) - remembered, nothing, EXACT)
            found = wide_dot(reads, new_values, found, EXACT)
            found_at = out + rows.to(tl.int64) * (HEADS * HEAD_DIM) + head * HEAD_DIM + first + column
            tl.store(found_at, found, mask=mine)
            if row + CHUNK <= end:
                last = tl.sum(tl.where(place == CHUNK - 1, sums, 0.0), 0)
                since = tl.exp(last[None, :] - sums)
                if BY_ROWS:
                    memory *= tl.exp(last)[:, None]
                    memory = wide_dot(tl.trans(key.to(tl.float32) * since), new_values, memory, EXACT)
                else:
                    memory *= tl.exp(last)[None, :]
                    memory = wide_dot(tl.trans(key), new_values * since, memory, EXACT)
            else:
                # The first kernel has stored the other rows of a partial chunk.
                kept_at = new + KEY_DIM * PIECE + place * PIECE + within
                tl.store(kept_at, value.to(tl.float32), mask=(rows < end) & there)
        tl.store(new + key_row * PIECE + within, memory, mask=inside & there)


def prepare_rows(
    mixed: torch.Tensor,
    rates: torch.Tensor,
    decay: torch.Tensor,
    shift: torch.Tensor,
    learns: torch.Tensor,
    forgets: torch.Tensor,
    shape: DeltaShape,
) -> None:
    """Norm the queries and keys of ``mixed`` [T, shape.mixed] to unit length, in place, and divide queries by the root
    of key_dim. From ``rates`` [T, 2 * heads], first the inputs of each head's learning rate and then those of its
    decay, compute ``learns`` float32 [T, heads] and the logarithms ``forgets`` float32 [T, shape.factors].

    decay, shift: float32 [heads], the logarithm of a head's decay, and the bias of its rate. With ``by_rows`` rates are
    [T, heads], and :func:`forget_factors` computes ``forgets``.

    Raises Internal for misshapen tensors.
    """
    shape.check()
    tokens, device = len(mixed), mixed.device
    check_tensor("mixed", mixed, (None, shape.mixed), FLOAT_DTYPES)
    check_tensor("rates", rates, (tokens, (1 if shape.by_rows else 2) * shape.heads), FLOAT_DTYPES, device)
    check_tensor("learns", learns, (tokens, shape.heads), torch.float32, device)
    check_tensor("forgets", forgets, (tokens, shape.factors), torch.float32, device)
    if not shape.by_rows:
        check_tensor("decay", decay, (shape.heads,), torch.float32, device)
        check_tensor("shift", shift, (shape.heads,), torch.float32, device)
    constants = prepare_constants(shape, arch_of(device))
    _prepare[(tokens, 2 * shape.key_heads + 1)](
        *(mixed, rates, decay, shift, learns, forgets, shape.key_dim**-0.5), **constants
    )


def forget_factors(
    made: torch.Tensor, decay: torch.Tensor, shift: torch.Tensor, out: torch.Tensor, shape: DeltaShape
) -> None:
    """Compute the logarithms of the factors of the rows of each head's matrix, ``out`` float32 [T, heads * key_dim],
    from a product's output ``made`` [T, heads * key_dim]. decay, shift: float32 [heads], logarithms, and [heads *
    key_dim]. Raises Internal for misshapen tensors."""
    values = shape.heads * shape.key_dim
    check_tensor("made", made, (None, values), FLOAT_DTYPES)
    check_tensor("out", out, (len(made), values), torch.float32, made.device)
    check_tensor("decay", decay, (shape.heads,), torch.float32, made.device)
    check_tensor("shift", shift, (values,), torch.float32, made.device)
    constants = factor_constants(shape, arch_of(made.device))
    parts = cdiv(values, constants["BLOCK"])
    _forget_factors[(len(made) * parts,)](made, decay, shift, out, values, parts, **constants)


def delta_rule(
    mixed: torch.Tensor,
    learns: torch.Tensor,
    forgets: torch.Tensor,
    solved: torch.Tensor,
    out: torch.Tensor,
    step: StepOfStates,
    places: torch.Tensor,
    sides: torch.Tensor,
    shape: DeltaShape,
) -> None:
    """Run the rule over the rows of each sequence, from its state to its next state.

    mixed, learns, forgets: output of :func:`prepare_rows`, and of :func:`forget_factors` with ``by_rows``.
    solved: float32, ``shape.solved_values`` values of scratch.
    out: float32 [T, heads * head_dim]. places: int32 [heads * head_dim / PIECE_COLUMNS, 2]. sides: int32
    [shape.sides, 2], pieces of a partial chunk's keys, and of its learning rates and decays.

    Raises Internal for misshapen tensors.
    """
    shape.check()
    tokens, device = len(mixed), mixed.device
    check_tensor("mixed", mixed, (None, shape.mixed), FLOAT_DTYPES)
    check_tensor("learns", learns, (tokens, shape.heads), torch.float32, device)
    check_tensor("forgets", forgets, (tokens, shape.factors), torch.float32, device)
    check_tensor("out", out, (tokens, shape.heads * shape.head_dim), torch.float32, device)
    check_tensor("solved", solved, (None,), torch.float32, device)
    check(len(solved) >= shape.solved_values(tokens, len(step.slots)), "solved has {} values", len(solved))
    step.check(tokens)
    check_places(places, shape.pieces, step)
    check_places(sides, shape.sides, step)
    arch, chunked = arch_of(device), (step.pool, step.starts, step.count, step.firsts, step.chunk_starts)
    constants, each = solve_constants(shape, arch)
    _solve[programs_for(most_chunks(tokens, len(step.slots)) * shape.heads, each, device)](
        *(mixed, learns, forgets, solved, *chunked, step.chunk_owners, step.slots, sides),
        **step.constants,
        **constants,
    )
    constants, each = delta_constants(shape, mixed.dtype == torch.float32, arch)
    parts = shape.heads * shape.head_dim // constants["COLUMNS"]
    _delta_rule[programs_for(min(tokens, len(step.slots)) * parts, each, device)](
        *(mixed, forgets, solved, out, *chunked, step.slots, places, sides),
        **step.constants,
        **constants,
    )


def prepare_constants(shape: DeltaShape, arch: int) -> dict[str, int]:
    """Return the constants of the kernel of :func:`prepare_rows`."""
    use = tuned("prepare_rows", arch)
    return {
        "HEADS": shape.heads,
        "KEY_HEADS": shape.key_heads,
        "KEY_DIM": shape.key_dim,
        "MIXED": shape.mixed,
        "DOUBLED": shape.doubled,
        "BY_ROWS": shape.by_rows,
        # A head is normed in place, so no two threads may have the same value.
        "BLOCK": max(32 * use["num_warps"], next_power_of_2(shape.key_dim)),
        "HEAD_BLOCK": next_power_of_2(shape.heads),
        "num_warps": use["num_warps"],
    }


def factor_constants(shape: DeltaShape, arch: int) -> dict[str, int]:
    """Return the constants of the kernel of :func:`forget_factors`."""
    use = tuned("forget_factors", arch)
    return {"KEY_DIM": shape.key_dim, "BLOCK": use["block"], "num_warps": use["num_warps"]}


def solve_constants(shape: DeltaShape, arch: int) -> tuple[dict[str, int], int]:
    """Return the constants of the kernel that solves chunks, and its programs per multiprocessor."""
    use = tuned("delta_solve", arch, by_rows=int(shape.by_rows))
    return {**_chunk_constants(shape), "num_warps": use["num_warps"]}, use["programs"]


def delta_constants(shape: DeltaShape, exact: bool, arch: int) -> tuple[dict[str, int], int]:
    """Return the constants of the kernel that iterates over chunks, and its programs per multiprocessor. ``exact``:
    products are exact, as in float32 models."""
    use = tuned("delta_rule", arch, exact=int(exact), by_rows=int(shape.by_rows))
    return {
        **_chunk_constants(shape),
        "HEAD_DIM": shape.head_dim,
        "EXACT": exact,
        "PIECE": PIECE_COLUMNS,
        "COLUMNS": use["columns"],
        "num_warps": use["num_warps"],
        "num_stages": use["num_stages"],
    }, use["programs"]


def _chunk_constants(shape: DeltaShape) -> dict[str, int]:
    return {
        "HEADS": shape.heads,
        "KEY_HEADS": shape.key_heads,
        "KEY_DIM": shape.key_dim,
        "MIXED": shape.mixed,
        "BY_ROWS": shape.by_rows,
        "CHUNK": CHUNK,
        "BLOCK": next_power_of_2(shape.key_dim),
    }
