"""Selection of the tokens that each query attends to, by an indexer (DeepSeek's sparse attention, DSA, arXiv
2512.02556).

The index key of a token is the last part of its row of latents. A query's score of a token is the weighted sum over its
index queries of relu(index query * index key); the ``top`` visible tokens with the largest scores are selected, of
equal ones the first. So a row's selection depends on its text alone, not on the step.
"""

from __future__ import annotations

from dataclasses import dataclass

from pillion.kernels.cpu.attention.attention_rows import AttentionShape, PoolLines
from pillion.kernels.cpu.attention.cpu_attention_plan import MAX_SELECTED_TOKENS
from pillion.kernels.cpu.language.emit import VECTOR_BYTES, Int, Kernel, Ptr
from pillion.kernels.cpu.language.isa import LANES
from pillion.kernels.cpu.language.module import SCRATCH_BYTES, KernelCall, KernelSpec
from pillion.kernels.cpu.language.records import RecordLayout
from pillion.kernels.cpu.rows.rotate import rotate

# Bytes of the selection's bits for a group of 16 tokens.
GROUP_BYTES = 2


@dataclass(frozen=True, slots=True)
class SelectTokens(KernelSpec):
    """Top-k selection for the step's T rows, whose index keys are in the pool.

    queries    [T, heads, dim] of the model's type; their first ``rotary`` values are rotated here
    weights    [T, heads] float32, multiplied by ``factor``
    selected   [T, groups] of 16 bits, one per token, in rows of ``selected_stride`` bytes; groups after the row's own
               token are not written

    ``rotated``: whether queries are rotated.
    """

    layout = RecordLayout(
        "select_tokens",
        pointers=("queries", "weights", "selected", "cos", "sin"),
        numbers=("queries_stride", "weights_stride", "selected_stride", "layer_offset", "slot_bytes"),
        reals=("factor",),
    )

    shape: AttentionShape
    heads: int
    dim: int
    top: int
    rotary: int
    rotated: bool = True

    def emit(self, call: KernelCall) -> None:
        assert self._at_scores + 4 * MAX_SELECTED_TOKENS <= SCRATCH_BYTES
        k, args = call.k, call.args
        with call.shared_range(call.step.number("num_tokens"), 1) as (row, _):
            end = k.load_int(call.step.pointer("positions") + row * 4, 32) + 1
            groups = (end + (LANES - 1)) // LANES
            selected = args.pointer("selected") + row * args.number("selected_stride")
            with k.when(end <= self.top), k.range(groups) as group:
                k.store_int(selected + group * GROUP_BYTES, -1, 16)
            with k.when(end > self.top):
                self._queries(call, row)
                self._store_scores(call, row, end, groups)
                self._select(k, call.scratch + self._at_scores, selected, groups)

    @property
    def _at_weights(self) -> int:
        return self.heads * self.dim * 4

    @property
    def _at_scores(self) -> int:
        return self._at_weights + -(-self.heads // LANES) * VECTOR_BYTES

    def _queries(self, call: KernelCall, row: Int) -> None:
        """Store a row's index queries, rotated, and their scaled weights in the scratch."""
        k, args, bf16 = call.k, call.args, self.shape.bf16
        size, lines = (2 if bf16 else 4), PoolLines(k, self.shape)
        to_size, vectors, rotary = (2 if lines.bf16_rows else 4), self.dim // LANES, self.rotary // LANES
        angles = k.load_int(call.step.pointer("rope_rows") + row * 4, 32) * (self.rotary * 2)
        with k.range(self.heads) as head:
            source = args.pointer("queries") + row * args.number("queries_stride") + head * (self.dim * size)
            target = call.scratch + head * (self.dim * to_size)
            values = [k.load_float(source + i * (LANES * size), bf16) for i in range(vectors)]
            if self.rotated:
                cos, sin = args.pointer("cos") + angles, args.pointer("sin") + angles
                values[:rotary] = rotate(k, values[:rotary], cos, sin)
            for vector, value in enumerate(values):
                k.store_float(target + vector * (LANES * to_size), value, lines.bf16_rows)
        weights = args.pointer("weights") + row * args.number("weights_stride")
        with k.range(-(-self.heads // LANES)) as i:
            scaled = k.load(weights + i * VECTOR_BYTES) * args.real("factor")
            k.store(call.scratch + self._at_weights + i * VECTOR_BYTES, scaled)

    def _store_scores(self, call: KernelCall, row: Int, end: Int, groups: Int) -> None:
        """Store the scores of the tokens up to the row's own, as integers that order like them."""
        k, args, shape, lines = call.k, call.args, self.shape, PoolLines(call.k, self.shape)
        sequence = k.load_int(call.step.pointer("row_seqs") + row * 4, 32)
        table = call.step.pointer("block_tables") + sequence * call.step.number("table_stride") * 4
        pool, per_block = call.step.pointer("pool") + args.number("layer_offset"), shape.block_size // LANES
        row_bytes, weights = self.dim * (2 if lines.bf16_rows else 4), call.scratch + self._at_weights
        # The sums of up to 8 index queries stay in registers.
        width = max(count for count in range(1, 8 + 1) if self.heads % count == 0)
        with k.range(groups) as group:
            slot = k.load_int(table + group // per_block * 4, 32)
            offset = slot * args.number("slot_bytes") + group % per_block * shape.group_bytes
            keys, total = pool + offset + shape.lines_bytes, k.variable(k.vector(0.0))
            with k.range(self.heads, step=width) as head:
                sums = [[k.variable(k.vector(0.0))] for _ in range(width)]
                with k.range(row_bytes // lines.step_bytes) as line:
                    query = call.scratch + head * row_bytes + line * lines.step_bytes
                    lines.add(sums, [lines.load(keys + line * VECTOR_BYTES)], query, row_bytes)
                for i, (product,) in enumerate(sums):
                    weight = k.broadcast(weights + (head + i) * 4)
                    total.value = k.fma(k.maximum(product.value, 0.0), weight, total.value)
            visible = k.below(group * LANES, end)
            k.store_quads(call.scratch + self._at_scores + group * VECTOR_BYTES, k.sortable(total.value, visible))

    def _select(self, k: Kernel, scores: Ptr, selected: Ptr, groups: Int) -> None:
        """Store the bits of the ``top`` largest scores, of equal ones the first."""

        def count(threshold: Int) -> Int:
            """Return the number of scores of at least ``threshold``."""
            total = k.variable(k.int(0))
            with k.range(groups) as group:
                total.value = total.value + k.popcount(
                    k.bits(k.at_least(k.load_quads(scores + group * VECTOR_BYTES), threshold))
                )
            return k.int(total.value)

        # Find the top-th largest score, bit by bit.
        threshold, step = k.variable(k.int(-(2**31))), k.variable(k.int(2**31))
        with k.range(32):
            raised = threshold.value + step.value
            threshold.value = k.select(count(raised) >= self.top, raised, threshold.value)
            step.value = step.value // 2
        smallest = threshold.value
        left = k.variable(k.int(self.top) - count(smallest + 1))
        with k.range(groups) as group:
            group_scores = k.load_quads(scores + group * VECTOR_BYTES)
            chosen = k.variable(k.bits(k.at_least(group_scores, smallest + 1)))
            equal = k.variable(k.bits(k.at_least(group_scores, smallest)) - chosen.value)
            num_equal = k.min(left.value, k.popcount(equal.value))
            left.value = left.value - num_equal
            with k.range(num_equal):
                first = equal.value & (k.int(0) - equal.value)
                equal.value, chosen.value = equal.value - first, chosen.value + first
            k.store_int(selected + group * GROUP_BYTES, chosen.value, 16)
