"""The tunable kernels with candidate constants and cases, in Llama 3 8B's shapes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from lab.benchmarks.gpu.bench import Bench, rotations
from lab.benchmarks.gpu.calls import CASES, KernelCase
from lab.benchmarks.gpu.grouped import SHAPES as EXPERTS
from lab.benchmarks.gpu.grouped import TINY_SHAPES, expert_stacks, grouped_case
from lab.benchmarks.gpu.pools import AttentionPool, verify_rows
from lab.benchmarks.gpu.products import ADAPTERS, plain_case, product_case
from lab.benchmarks.gpu.shapes import BatchEntry, decodes, shape_of
from lab.benchmarks.gpu.states import CONTEXT, rule_case
from pillion.kernels.gpu.attention.paged_attention import PlainOrFloat8
from pillion.kernels.gpu.products.dense_gemm import ROW_TILES

BLOCK_SIZE = 16
Build = Callable[[], KernelCase]
Cases = Callable[[Bench], list[Build]]
Use = dict[str, int]


@dataclass(frozen=True, slots=True)
class Tunable:
    """A kernel with tunable constants.

    ``kernel`` and ``facts`` are arguments of ``pillion.kernels.gpu.tuned.tuned``; ``cases`` are timed. ``chosen``
    candidates are tried first in order, then all combinations of ``grid``; constants not named stay as they are.
    """

    kernel: str
    cases: Cases
    grid: dict[str, tuple[int, ...]]
    facts: dict[str, int | str] = field(default_factory=dict)
    chosen: tuple[Use, ...] = ()

    def candidates(self, now: Use) -> Iterator[Use]:
        """Yield all candidates, starting from the constants in use."""
        for use in self.chosen:
            yield {**now, **use}
        for values in itertools.product(*self.grid.values()):
            yield {**now, **dict(zip(self.grid, values, strict=True))}


def _small(*wanted: tuple[str, int]) -> Cases:
    def cases(bench: Bench) -> list[Build]:
        shape = shape_of(bench.smoke)

        def build(name: str, rows: int) -> Build:
            return lambda: CASES[name](bench, shape, rows)

        return [build(name, 2 if bench.smoke else rows) for name, rows in wanted]

    return cases


def _attended(kv: PlainOrFloat8, *wanted: tuple[list[BatchEntry], list[BatchEntry]], invariant: bool = False) -> Cases:
    """Make attention cases of steps, each for a real and a smoke run. ``invariant``: in parts."""

    def cases(bench: Bench) -> list[Build]:
        return [_attention(bench, tiny if bench.smoke else entries, kv, invariant) for entries, tiny in wanted]

    return cases


def _attention(bench: Bench, entries: list[BatchEntry], kv: PlainOrFloat8, invariant: bool) -> Build:
    def build() -> KernelCase:
        shape = shape_of(bench.smoke)
        tokens = sum(-(-(entry.prefix + entry.tokens) // BLOCK_SIZE) * BLOCK_SIZE for entry in entries)
        layers = rotations(tokens * shape.kv_bytes, bench.smoke, most=8)
        # Candidates share a pool, since filling a large one takes longer than the measurement.
        pool = _pool(bench, tokens, layers, kv)
        attended = pool.attend(entries, invariant=invariant)
        return KernelCase(attended.calls, attended.read_bytes, lambda: verify_rows(pool, attended))

    return build


_POOLS: dict[tuple[int, int, str], AttentionPool] = {}


def _pool(bench: Bench, tokens: int, layers: int, kv: PlainOrFloat8) -> AttentionPool:
    key = (tokens, layers, kv)
    if key not in _POOLS:
        shape = shape_of(bench.smoke)
        _POOLS[key] = AttentionPool(bench, shape, block_size=BLOCK_SIZE, tokens=tokens, layers=layers, kv=kv)
    return _POOLS[key]


def _products(*wanted: tuple[str, str, int]) -> Cases:
    """Make cases of products: kind of the matrix, name of the product and rows."""

    def cases(bench: Bench) -> list[Build]:
        shapes = shape_of(bench.smoke).products

        def build(kind: str, product: str, rows: int) -> Build:
            return lambda: product_case(bench, kind, *shapes[product], rows)

        return [build(*each) for each in wanted]

    return cases


def _quantized(rows: int, bits: int, kind: str) -> Tunable:
    """Make the tile of products of ``rows`` rows by matrices of ``bits``."""
    large = rows == ROW_TILES[-1]
    count = 2048 if large else rows
    return Tunable(
        "quantized_product",
        _products((kind, "gate_up", count), (kind, "down", count)),
        {"outputs": (64, 128), "num_warps": (4, 8), "num_stages": (2, 3) if large else (3, 4, 5)},
        {"rows": rows, "bits": bits, "bytes": 2},
    )


def _grouped(name: str, rows: int, tile: int, facts: dict[str, int | str]) -> Tunable:
    """Make the tile of one product of a mixture, whose experts have ``tile`` of ``rows`` rows on average."""

    def cases(bench: Bench) -> list[Build]:
        shape, count = (TINY_SHAPES["tiny, up"], 2) if bench.smoke else (EXPERTS[name], rows)
        return [lambda: grouped_case(bench, shape, count, expert_stacks(shape, bench.device, bench.smoke))]

    large = tile == ROW_TILES[-1]
    grid = {
        "outputs": (64, 128),
        "num_warps": (4, 8),
        "num_stages": (2, 3, 4),
        "programs": (1,) if large else (2, 3, 4),
    }
    return Tunable("grouped_product", cases, grid, {"rows": tile, "bytes": 2, **facts})


def _shrink(rows: int, tile: int) -> Tunable:
    """Make the tile of an adapter's shrink in a mixture, in tiles of ``tile`` rows."""

    def cases(bench: Bench) -> list[Build]:
        shape, count = (TINY_SHAPES["tiny, up"], 2) if bench.smoke else (EXPERTS["Qwen3-30B-A3B, up"], rows)
        return [lambda: grouped_case(bench, shape, count, expert_stacks(shape, bench.device, bench.smoke), ADAPTERS)]

    grid: dict[str, tuple[int, ...]] = {"inputs": (64, 128), "num_warps": (4, 8), "num_stages": (2, 3, 4)}
    return Tunable("shrink_pairs", cases, grid, {"rows": tile, "bytes": 2})


def _plain(rows: int) -> Tunable:
    """Make the tile of plain products of ``rows`` rows."""
    large = rows == ROW_TILES[-1]

    def cases(bench: Bench) -> list[Build]:
        shapes, count = shape_of(bench.smoke).products, 2048 if large and not bench.smoke else rows

        def build(name: str) -> Build:
            return lambda: plain_case(bench, *shapes[name], count)[0]

        return [build(name) for name in ("qkv", "o", "down")]

    # A tile of few rows uses the instruction of one group of 4 warps: others would give other bits than the large tile.
    few: dict[str, tuple[int, ...]] = {"outputs": (64, 128), "num_stages": (3, 4, 5, 6), "prefetched": (0, 4, 8)}
    many: dict[str, tuple[int, ...]] = {"num_warps": (4, 8), "num_stages": (2, 3)}
    return Tunable("plain_product", cases, many if large else few, {"rows": rows, "bytes": 2})


def _rules(*wanted: tuple[list[int], int]) -> Cases:
    """Make cases of delta rules, each by the lengths of texts and the tokens before them."""

    def cases(bench: Bench) -> list[Build]:
        def build(lengths: list[int], context: int) -> Build:
            return lambda: rule_case(bench, lengths, context)

        return [build(*each) for each in wanted]

    return cases


_BLOCKS = (512, 1024, 2048, 4096)
_WIDE, _LONG = (decodes(64, 4096), decodes(2, 20)), (decodes(1, 32768), decodes(1, 40))
_CHUNK = ([BatchEntry(2048, 8192)], [BatchEntry(8, 16)])


def _chunk_tile(keys: int, num_stages: int, overlap: int, *, rows: int = 128, programs: int = 1) -> Use:
    """Return a tile of chunk attention, with 16 rows per warp."""
    tile = {"rows": rows, "keys": keys, "num_warps": rows // 16, "num_stages": num_stages}
    return {**tile, "programs": programs, "overlap": overlap}


# Tiles without spills, the most promising first (counts: lab/docs/gpu-measurements.md). In Triton's kernel the slots'
# loads take two stages, so 3 and 4 stages are the same code.
_CHUNK_TILES = (
    _chunk_tile(128, 3, 1),
    _chunk_tile(128, 2, 1),
    _chunk_tile(128, 5, 0),
    _chunk_tile(64, 7, 0),
    _chunk_tile(64, 3, 1),
    _chunk_tile(64, 4, 1),
    _chunk_tile(128, 3, 0),
    _chunk_tile(64, 5, 0),
    _chunk_tile(128, 2, 0),
    _chunk_tile(64, 4, 0, rows=64, programs=2),
    _chunk_tile(64, 3, 1, rows=64, programs=2),
)

TUNABLES: dict[str, Tunable] = {
    "attention_decode": Tunable(
        "attention_decode",
        _attended("plain", _WIDE, _LONG),
        {"keys": (64, 128), "num_stages": (3, 4, 5), "programs": (2, 3, 4)},
        {"head_dim": 128, "kv": "plain", "bytes": 2},
    ),
    "attention_decode_fp8": Tunable(
        "attention_decode",
        _attended("fp8_e4m3", _WIDE, _LONG),
        {"keys": (64, 128), "num_stages": (3, 5, 7), "programs": (2, 3)},
        {"head_dim": 128, "kv": "fp8_e4m3", "bytes": 2},
    ),
    "attention_chunk": Tunable(
        "attention_chunk",
        _attended("plain", _CHUNK),
        {},
        {"head_dim": 128, "kv": "plain", "bytes": 2},
        _CHUNK_TILES,
    ),
    # Decodes and chunks keep 64 rows per 4 warps.
    "attention_parts": Tunable(
        "attention_parts",
        _attended("plain", _WIDE, _LONG, _CHUNK, invariant=True),
        {"keys": (64, 128), "num_stages": (3, 4, 5), "part_keys": (512, 1024)},
        {"head_dim": 128, "kv": "plain", "bytes": 2},
    ),
    "attention_merge": Tunable(
        "attention_merge",
        _attended("plain", _LONG, invariant=True),
        {"num_warps": (1, 2, 4), "programs": (8, 16)},
    ),
    "attention_join": Tunable("attention_join", _attended("plain", _LONG), {"rows": (4, 8, 16), "parts": (4, 8, 16)}),
    "embed": Tunable("embed", _small(("embed", 64), ("embed", 2048)), {"block": _BLOCKS, "num_warps": (2, 4, 8)}),
    "gated": Tunable("gated", _small(("gated", 64), ("gated", 2048)), {"block": _BLOCKS, "num_warps": (2, 4, 8)}),
    "route_experts": Tunable(
        "route_experts",
        _small(("route experts", 1), ("route experts", 32), ("route experts", 2048)),
        {"inputs": (64, 128), "num_warps": (4, 8), "num_stages": (2, 3, 4)},
        {"bytes": 2},
    ),
    "sort_pairs": Tunable(
        "sort_pairs",
        _small(("sort pairs", 2048)),
        {"num_warps": (4, 8), "sum_warps": (4, 8)},
    ),
    "shrink_pairs_16": _shrink(32, 16),
    "shrink_pairs_128": _shrink(2048, 128),
    "expert_sums": Tunable(
        "expert_sums",
        _small(("sum experts", 32), ("sum experts", 2048)),
        {"block": (256, 512, 1024, 2048), "num_warps": (1, 2, 4)},
    ),
    "norms": Tunable(
        "norms",
        _small(("add_rms_norm", 64), ("add_rms_norm", 2048)),
        {"rows": (1, 2), "num_warps": (4, 8, 16)},
        {"columns": 4096},
    ),
    "kv_write": Tunable(
        "kv_write",
        _small(("kv_write", 64), ("kv_write", 2048)),
        {"tile_values": (256, 512, 1024, 2048), "num_warps": (1, 2, 4)},
    ),
    "blocks": Tunable(
        "blocks", _small(("blocks, gathered", 16)), {"part_words": (1024, 2048, 4096), "num_warps": (4, 8)}
    ),
    "sample_survey": Tunable(
        "sample_survey",
        _small(("sampling, greedy", 64), ("sampling, top_p 0.9", 1), ("sampling, temperature 1", 256)),
        {"slice_groups": (16, 32, 64), "num_warps": (4, 8)},
    ),
    "sample_settle": Tunable(
        "sample_settle",
        _small(("sampling, top_p 0.9", 1), ("sampling, temperature 1", 256), ("sampling, top_p 0.9, flat", 64)),
        {"gathered_groups": (8, 16), "raced_groups": (2, 4, 8), "num_warps": (4, 8)},
    ),
    "delta_rule": Tunable(
        "delta_rule",
        _rules(([2048], 0), ([1] * 32, CONTEXT)),
        {"columns": (8, 16), "num_warps": (1, 2, 4), "num_stages": (1, 2), "programs": (4, 8)},
        {"exact": 0, "by_rows": 0},
    ),
    "delta_solve": Tunable(
        "delta_solve",
        _rules(([2048], 0), ([1] * 32, CONTEXT)),
        {"num_warps": (1, 2), "programs": (8, 16)},
        {"by_rows": 0},
    ),
    **{f"quantized_product_int4_{rows}": _quantized(rows, 4, "int4 in groups of 128") for rows in ROW_TILES},
    **{f"quantized_product_8_bits_{rows}": _quantized(rows, 8, "int8") for rows in ROW_TILES},
    "grouped_product_16": _grouped("Qwen3-30B-A3B, up", 8, 16, {"coding": "", "bits": 16}),
    "grouped_product_128": _grouped("Qwen3-30B-A3B, up", 2048, 128, {"coding": "", "bits": 16}),
    "grouped_product_mxfp4_16": _grouped("gpt-oss-20b, up", 8, 16, {"coding": "fp4_e2m1", "bits": 4}),
    "grouped_product_mxfp4_128": _grouped("gpt-oss-20b, up", 2048, 128, {"coding": "fp4_e2m1", "bits": 4}),
    **{f"plain_product_{rows}": _plain(rows) for rows in ROW_TILES},
    "quantized_sum": Tunable(
        "quantized_sum",
        _products(("int8", "o", 1), ("int8", "o", 64)),
        {"block": (256, 512, 1024), "num_warps": (1, 2, 4)},
    ),
}
