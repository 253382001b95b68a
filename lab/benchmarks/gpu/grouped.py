"""Products of rows by their experts' matrices, plain and quantized, in the shapes of deployed models.

Few rows are compared with reading the chosen experts (counted) at the copy bandwidth; a chunk with the rate of a plain
product of equally many rows. Rows choose experts evenly at random. Plain matrices are also measured with adapters,
which rows use in turn: ``of_plain`` is their time over that without.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lab.benchmarks.gpu.bench import Bench, Row, rotations, spread
from lab.benchmarks.gpu.calls import ATOL, RTOL, KernelCase
from lab.benchmarks.gpu.products import ADAPTER_RANK, ADAPTERS, random_matrix

if TYPE_CHECKING:
    from pillion.kernels.gpu.experts.expert_adapters import PairAdapters


class ExpertShape(NamedTuple):
    """One product of a mixture: experts, choices per row, inputs, outputs (gates and values if ``gated``), and a kind
    of matrices of ``products.KINDS``, or "bf16"."""

    experts: int
    choices: int
    inputs: int
    outputs: int
    gated: bool
    kind: str


SHAPES = {
    "Qwen3-30B-A3B, up": ExpertShape(128, 8, 2048, 1536, True, "bf16"),
    "Qwen3-30B-A3B, down": ExpertShape(128, 8, 768, 2048, False, "bf16"),
    "Qwen3-30B-A3B in int4, up": ExpertShape(128, 8, 2048, 1536, True, "int4 in groups of 128"),
    "Qwen3-30B-A3B in fp8, up": ExpertShape(128, 8, 2048, 1536, True, "fp8 in blocks of 128"),
    "Qwen3-30B-A3B in nvfp4, up": ExpertShape(128, 8, 2048, 1536, True, "nvfp4"),
    "gpt-oss-20b, up": ExpertShape(32, 4, 2880, 5760, True, "mxfp4"),
    "gpt-oss-20b, down": ExpertShape(32, 4, 2880, 2880, False, "mxfp4"),
}
TINY_SHAPES = {
    "tiny, up": ExpertShape(4, 2, 64, 96, True, "bf16"),
    "tiny in mxfp4, down": ExpertShape(4, 2, 96, 64, False, "mxfp4"),
}
FEW_ROWS, CHUNK = (1, 8, 32), 2048
SMOKE_ROWS, SMOKE_CHUNK = (2,), 20
# Limit of a tile's rows, which otherwise are those of an average expert.
LARGEST_TILE = 128
FEW_TARGET, CHUNK_TARGET = ">= 0.80", ">= 0.50"
# Distinct matrices, shared by experts, since packing on the host takes longer than a measurement.
PACKED_MATRICES = 4


def run(bench: Bench) -> None:
    """Measure each product with each number of rows."""
    few, chunk = (SMOKE_ROWS, SMOKE_CHUNK) if bench.smoke else (FEW_ROWS, CHUNK)
    for name, shape in (TINY_SHAPES if bench.smoke else SHAPES).items():

        def measure(name: str = name, shape: ExpertShape = shape) -> None:
            stacks = expert_stacks(shape, bench.device, bench.smoke)
            for rows in (*few, chunk):
                case = grouped_case(bench, shape, rows, stacks)
                case.verify()
                times, title = bench.time(case.calls), f"{name}, {rows} rows"
                if shape.kind == "bf16":
                    adapted = grouped_case(bench, shape, rows, stacks, ADAPTERS)
                    adapted.verify()
                    took = bench.time(adapted.calls)
                    share = adapted.moved_bytes / bench.bandwidth / took.median_s
                    more = {**spread(took), "of_plain": took.median_s / times.median_s}
                    name_of = f"{title}, {ADAPTERS} adapters of rank {ADAPTER_RANK}"
                    bench.report(Row(name_of, took.median_s * 1e6, "us", share, "copy bandwidth", more=more))
                if rows in few:
                    bench.report_bytes(title, times, case.moved_bytes, FEW_TARGET)
                    continue
                pairs = rows * shape.choices
                rate = bench.product_rate(pairs, shape.inputs, shape.outputs)
                bench.report_flops(title, times, 2.0 * pairs * shape.inputs * shape.outputs, rate, CHUNK_TARGET)

        bench.attempt(name, measure)


def grouped_case(
    bench: Bench, shape: ExpertShape, rows: int, stacks: list[tuple[Any, torch.Tensor]], adapters: int = 0
) -> KernelCase:
    """Make a case of random rows that choose experts at random and use ``adapters`` in turn. ``stacks``: experts'
    matrices, and the weights of the first expert."""
    from pillion.kernels.gpu.experts.grouped_product import GroupedGemm

    pairs = rows * shape.choices
    chosen = torch.rand(rows, shape.experts).topk(shape.choices).indices.flatten()
    counts = torch.bincount(chosen, minlength=shape.experts).tolist()
    order = torch.argsort(chosen, stable=True).int().to(bench.device)
    tile = next(size for size in (16, 32, 64, LARGEST_TILE) if size >= min(pairs // shape.experts, LARGEST_TILE))
    tiles, begin = [], 0
    for expert, held in enumerate(counts):
        tiles += [(expert, begin + first, min(tile, held - first)) for first in range(0, held, tile)]
        begin += held
    count = torch.tensor([len(tiles)], dtype=torch.int32, device=bench.device)
    made = torch.tensor(tiles, dtype=torch.int32, device=bench.device)
    x = torch.randn(rows, shape.inputs, device=bench.device).bfloat16()
    width = shape.outputs // 2 if shape.gated else shape.outputs
    out = torch.zeros(pairs, width, dtype=torch.bfloat16, device=bench.device)
    product = GroupedGemm(torch.bfloat16, bench.device)
    activation = "silu" if shape.gated else None
    own = _random_adapters(shape, rows, adapters, x) if adapters else None

    def call(stack: Any) -> torch.Tensor:
        return product(
            x, order, shape.choices, made, count, stack, None, activation, gated=shape.gated, out=out, scatter=True,
            tile_rows=tile, adapters=own,
        )  # fmt: skip

    def verify() -> None:
        call(stacks[0][0])
        first = tiles[0][0]
        mine = (chosen == first).nonzero().flatten().to(bench.device)
        found = x[mine // shape.choices].float() @ stacks[0][1][first % len(stacks[0][1])].float().T
        if own is not None:
            found += _added(own, first, x, mine)
        found = found.bfloat16()
        if shape.gated:
            found = torch.nn.functional.silu(found[:, :width]) * found[:, width:]
        wanted = found.float()
        torch.testing.assert_close(out[mine].float(), wanted, rtol=RTOL, atol=ATOL * float(wanted.abs().max()))

    size = _bytes(stacks[0][0]) / shape.experts
    moved = sum(count > 0 for count in counts) * size + 2.0 * pairs * (shape.inputs + width)
    if own is not None:
        each = {(expert, pair // shape.choices % adapters) for pair, expert in enumerate(chosen.tolist())}
        moved += len(each) * 2.0 * own.layer.values / shape.experts
    return KernelCase([functools.partial(call, stack) for stack, _ in stacks], moved, verify)


def _random_adapters(shape: ExpertShape, rows: int, adapters: int, x: torch.Tensor) -> PairAdapters:
    """Make adapters that rows use in turn."""
    from pillion.kernels.gpu.experts.expert_adapters import PairAdapters
    from pillion.kernels.gpu.products.low_rank_product import LayerSlot

    ends = (shape.outputs // 2, shape.outputs) if shape.gated else (shape.outputs,)
    b_at = shape.experts * len(ends) * ADAPTER_RANK * shape.inputs
    layer = LayerSlot(0, b_at, shape.inputs, shape.outputs, ends, ADAPTER_RANK, shape.experts)
    slots = torch.randn(adapters, layer.values, device=x.device).bfloat16()
    slots[:, :b_at] /= shape.inputs**0.5
    row_slots = torch.arange(rows, dtype=torch.int32, device=x.device) % adapters
    shrunk = torch.zeros(rows * shape.choices, len(ends) * ADAPTER_RANK, dtype=x.dtype, device=x.device)
    return PairAdapters(slots, layer, row_slots, shape.choices, shrunk)


def _added(adapters: PairAdapters, expert: int, x: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """Return the adapters' contribution to an expert's products of some pairs: [P, outputs] float32."""
    layer, found = adapters.layer, []
    a, b = adapters.slots[:, : layer.b_at], adapters.slots[:, layer.b_at :]
    for row in (pairs // adapters.per_token).tolist():
        slot = int(adapters.row_slots[row])
        matrix = a[slot].view(layer.experts, len(layer.ends), layer.rank, -1)[expert].float()
        shrunk = (matrix @ x[row].float()).bfloat16().float()
        parts = b[slot].view(layer.experts, len(layer.ends), -1, layer.rank)[expert].float()
        found.append(torch.einsum("sor,sr->so", parts, shrunk).flatten())
    return torch.stack(found)


def _bytes(stack: Any) -> int:
    parts = [stack] if isinstance(stack, torch.Tensor) else stack.parts.values()
    return sum(part.numel() * part.element_size() for part in parts)


@functools.lru_cache(maxsize=1)
def expert_stacks(shape: ExpertShape, device: torch.device, smoke: bool) -> list[tuple[Any, torch.Tensor]]:
    """Make enough stacks of experts' matrices to sweep the cache, with plain weights of the first experts, which the
    others repeat."""
    from pillion.kernels.gpu.products.gpu_packing import PackedMatrix, pack

    if shape.kind == "bf16":
        size = (shape.experts, shape.outputs, shape.inputs)
        first = (torch.randn(size, device=device) / shape.inputs**0.5).bfloat16()
        copies = rotations(_bytes(first), smoke)
        return [(first if not number else first.clone(), first) for number in range(copies)]
    matrices = [random_matrix(shape.kind, shape.inputs, shape.outputs) for _ in range(PACKED_MATRICES)]
    packed = [pack(matrix, torch.bfloat16) for matrix in matrices]
    plain = torch.stack([matrix.dequantize(torch.bfloat16) for matrix in matrices]).to(device)
    repeats = -(-shape.experts // PACKED_MATRICES)
    parts = {
        name: torch.stack([each.parts[name] for each in packed] * repeats)[: shape.experts].to(device)
        for name in packed[0].parts
    }
    stack = PackedMatrix(packed[0].kind, **parts)
    copies = rotations(_bytes(stack), smoke)
    clones = ({name: part.clone() for name, part in parts.items()} for _ in range(copies - 1))
    return [(stack, plain), *((PackedMatrix(packed[0].kind, **clone), plain) for clone in clones)]
