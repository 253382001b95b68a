"""Launches of the small kernels as the engine makes them, on random data of a model's shapes, to time and to tune.

Each case rotates through copies of its data, so that they come from memory as in a step, where weights and KV sweep the
caches in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lab.benchmarks.gpu.bench import Bench, rotations
from lab.benchmarks.gpu.shapes import LlamaShape
from pillion.kernels.step import SamplingRows
from pillion.types import SamplingParams

EPS = 1e-5
BLOCK_SIZE = 16
# Tolerances for bfloat16 roundings in a different order.
RTOL, ATOL = 2.0**-6, 2.0**-6


@dataclass(frozen=True, slots=True)
class KernelCase:
    """A kernel's calls on some shape.

    ``calls`` do the same work on different data, each moving ``moved_bytes``. ``verify`` runs the first call and raises
    AssertionError if its result differs from the reference's.
    """

    calls: Sequence[Callable[[], object]]
    moved_bytes: float
    verify: Callable[[], None]


Make = Callable[[Bench, LlamaShape, int], KernelCase]


@dataclass(frozen=True, slots=True)
class Maker:
    """A function that makes a kernel's case, and the numbers of rows to measure."""

    make: Make
    rows: tuple[int, ...]
    smoke_rows: tuple[int, ...] = (2,)

    def __call__(self, bench: Bench, shape: LlamaShape, rows: int) -> KernelCase:
        """Make the case of ``rows`` rows."""
        return self.make(bench, shape, rows)


TOKEN_ROWS = (1, 64, 256, 2048)
MIXED_ROWS = (1, 32, 2048)
# Experts of Qwen3-30B-A3B, and those per row.
EXPERTS, PER_TOKEN = 128, 8
SAMPLED_ROWS = (1, 64, 256)
BLOCK_ROWS = (1, 16, 256)


def embed_case(bench: Bench, shape: LlamaShape, rows: int) -> KernelCase:
    """Make a case of the embedding's rows."""
    from lab.testbed.gpu_reference import embed as reference
    from pillion.kernels.gpu.rows.embedding import embed

    table = _random(bench, shape.vocab, shape.hidden)
    size = 2 * rows * shape.hidden * 2
    count = rotations(size, bench.smoke)
    ids = [torch.randint(0, shape.vocab, (rows,), dtype=torch.int32, device=bench.device) for _ in range(count)]
    out = [torch.empty(rows, shape.hidden, dtype=torch.bfloat16, device=bench.device) for _ in range(count)]
    sampled = torch.zeros(1, dtype=torch.int32, device=bench.device)

    def verify() -> None:
        embed(ids[0], sampled, table, out[0])
        _close(out[0], reference(ids[0], sampled, table))

    return KernelCase([_bound(embed, i, sampled, table, o) for i, o in zip(ids, out, strict=True)], size, verify)


def norm_case(bench: Bench, shape: LlamaShape, rows: int) -> KernelCase:
    """Make a case of the sum with the residual stream and the next norm."""
    from lab.testbed import gpu_reference as reference
    from pillion.kernels.gpu.rows.norms import add_rms_norm

    size = 4 * rows * shape.hidden * 2
    weight = _random(bench, shape.hidden)
    count = rotations(size, bench.smoke)
    residual, found, out = ([_random(bench, rows, shape.hidden) for _ in range(count)] for _ in range(3))

    def verify() -> None:
        total, normed = reference.add_rms_norm(residual[0], found[0], 1.0, None, weight, EPS, False)
        _one(residual[0], found[0], out[0])
        assert normed is not None
        _close(residual[0], total)
        _close(out[0], normed)

    def _one(into: torch.Tensor, added: torch.Tensor, target: torch.Tensor) -> None:
        add_rms_norm(into, added, target, weight=weight, eps=EPS, wide=False)

    return KernelCase([_bound(_one, *each) for each in zip(residual, found, out, strict=True)], size, verify)


def gated_case(bench: Bench, shape: LlamaShape, rows: int) -> KernelCase:
    """Make a case of the MLP's gated activation."""
    from lab.testbed import gpu_reference as reference
    from pillion.kernels.gpu.rows.gated import gated

    size = 3 * rows * shape.inner * 2
    count = rotations(size, bench.smoke)
    both = [_random(bench, rows, 2 * shape.inner) for _ in range(count)]
    out = [torch.empty(rows, shape.inner, dtype=torch.bfloat16, device=bench.device) for _ in range(count)]

    def verify() -> None:
        gated(both[0], out[0], "silu")
        _close(out[0], reference.gated(both[0], "silu"))

    return KernelCase([_bound(gated, b, o, "silu") for b, o in zip(both, out, strict=True)], size, verify)


def route_case(bench: Bench, shape: LlamaShape, rows: int) -> KernelCase:
    """Make a case of a router's product and its choice."""
    from pillion.kernels.gpu.experts.expert_routing import ExpertRouter, RouteOptions

    how = RouteOptions(EXPERTS, PER_TOKEN, True, exact=True)
    size = 2 * shape.hidden * (rows + EXPERTS)
    copies = rotations(size, bench.smoke)
    values, routers = ([_random(bench, each, shape.hidden) for _ in range(copies)] for each in (rows, EXPERTS))
    route = ExpertRouter(how.columns, shape.hidden, rows, bench.device)
    count = torch.full((1,), rows, dtype=torch.int32, device=bench.device)
    scores = torch.empty(rows, PER_TOKEN, device=bench.device)
    chosen = torch.empty_like(scores, dtype=torch.int32)

    def one(left: torch.Tensor, router: torch.Tensor) -> None:
        route(left, router, how, count, scores, chosen)

    def verify() -> None:
        one(values[0], routers[0])
        best = (values[0].float() @ routers[0].float().T).topk(PER_TOKEN, -1).values.softmax(-1)
        torch.testing.assert_close(scores, best, rtol=RTOL, atol=ATOL)

    return KernelCase([_bound(one, *each) for each in zip(values, routers, strict=True)], size, verify)


def sort_case(bench: Bench, shape: LlamaShape, rows: int) -> KernelCase:
    """Make a case of sorting pairs of rows and random experts."""
    from pillion.kernels.gpu.experts.pair_sorting import PairOrder, PairSorter, most_tiles, tile_rows_of

    pairs = rows * PER_TOKEN
    tile_rows = tile_rows_of(EXPERTS, pairs)
    chosen = torch.rand(rows, EXPERTS, device=bench.device).argsort(1)[:, :PER_TOKEN].int().contiguous()
    order, count = (torch.empty(size, dtype=torch.int32, device=bench.device) for size in (pairs, 1))
    tiles = torch.empty(most_tiles(EXPERTS, pairs, tile_rows), 3, dtype=torch.int32, device=bench.device)
    sort, into = PairSorter(EXPERTS, pairs, bench.device), PairOrder(order, tiles, count, tile_rows)

    def verify() -> None:
        sort(chosen, into)
        assert torch.equal(order.long(), chosen.flatten().argsort(stable=True))

    return KernelCase([_bound(sort, chosen, into)], 8.0 * pairs, verify)


def sums_case(bench: Bench, shape: LlamaShape, rows: int) -> KernelCase:
    """Make a case of the sums of rows' expert outputs."""
    from pillion.kernels.gpu.experts.expert_sums import PairResults, add_up

    size = 2 * rows * (PER_TOKEN + 1) * shape.hidden
    scores = torch.rand(rows, PER_TOKEN, device=bench.device)
    chosen, out = torch.zeros_like(scores, dtype=torch.int32), _random(bench, rows, shape.hidden)
    found = [_random(bench, rows * PER_TOKEN, shape.hidden) for _ in range(rotations(size, bench.smoke))]

    def verify() -> None:
        add_up(PairResults(found[0], scores, chosen), out)
        terms = found[0].float().view(rows, PER_TOKEN, -1) * scores[..., None]
        _close(out, terms.sum(1).bfloat16())

    return KernelCase([_bound(add_up, PairResults(each, scores, chosen), out) for each in found], size, verify)


def kv_write_case(bench: Bench, shape: LlamaShape, rows: int) -> KernelCase:
    """Make a case of rotating queries and keys and writing K and V into the pool's blocks."""
    from pillion.kernels.gpu.attention.kv_write import Rotary, kv_write

    heads, kv_heads, width = shape.heads, shape.kv_heads, shape.head_dim
    columns = (heads + 2 * kv_heads) * width
    # All of qkv is read once; queries are written in place, keys and values to the pool.
    size = 2 * rows * columns * 2
    count = rotations(size, bench.smoke)
    slots = -(-rows // BLOCK_SIZE)
    pool = torch.zeros(slots, count, 2, kv_heads, BLOCK_SIZE, width, dtype=torch.bfloat16, device=bench.device)
    qkv = [_random(bench, rows, columns) for _ in range(count)]
    positions = torch.arange(rows, dtype=torch.int32, device=bench.device)
    place = torch.from_numpy(np.random.default_rng(0).permutation(slots * BLOCK_SIZE)[:rows].astype(np.int32))
    place = place.to(bench.device)
    angles = torch.arange(rows, device=bench.device)[:, None] * torch.rand(width // 2, device=bench.device)
    rotary = Rotary(angles.cos().bfloat16(), angles.sin().bfloat16(), positions)

    def one(layer: int) -> None:
        kv_write(qkv[layer], pool, place, layer, heads=heads, rotary=rotary)

    def verify() -> None:
        keys = qkv[0][:, heads * width :].reshape(rows, 2 * kv_heads, width)[:, :kv_heads].float()
        values = qkv[0][:, (heads + kv_heads) * width :].reshape(rows, kv_heads, width).clone()
        low, high = keys.chunk(2, -1)
        cos, sin = rotary.cos.float(), rotary.sin.float()
        turned = torch.cat((low * cos[:, None] - high * sin[:, None], high * cos[:, None] + low * sin[:, None]), -1)
        one(0)
        written = pool[(place // BLOCK_SIZE).long(), 0, :, :, (place % BLOCK_SIZE).long()]
        _close(written[:, 1], values)
        _close(written[:, 0], turned.bfloat16())

    return KernelCase([_bound(one, layer) for layer in range(count)], size, verify)


def _blocks_case(way: str) -> Make:
    """Make cases that move whole blocks, to or from a transfer's buffer, or within the pool."""

    def make(bench: Bench, shape: LlamaShape, rows: int) -> KernelCase:
        from pillion.kernels.gpu import blocks

        size = shape.layers * shape.kv_bytes * BLOCK_SIZE
        count = rotations(2 * rows * size, bench.smoke)
        slots = 2 * rows * count
        pool = torch.randint(0, 256, (slots, size), dtype=torch.uint8, device=bench.device)
        order = torch.randperm(slots, device=bench.device).int().view(count, 2, rows)
        pairs = order.transpose(1, 2).contiguous()
        buffer = torch.zeros(rows, size, dtype=torch.uint8, device=bench.device)

        def one(turn: int) -> None:
            if way == "gathered":
                blocks.gather(pool, order[turn, 0], buffer)
            elif way == "scattered":
                blocks.scatter(buffer, order[turn, 0], pool)
            else:
                blocks.copy(pool, pairs[turn])

        def verify() -> None:
            one(0)
            source, target = pool[order[0, 0].long()], pool[order[0, 1].long()]
            assert torch.equal(source, target if way == "copied" else buffer)

        return KernelCase([_bound(one, turn) for turn in range(count)], 2.0 * rows * size, verify)

    return make


def _flat(bench: Bench, rows: int, vocab: int) -> torch.Tensor:
    """Return normal logits: thousands of tokens are similarly probable, as at high temperatures."""
    return 2.0 * torch.randn(rows, vocab, device=bench.device)


def _peaked(bench: Bench, rows: int, vocab: int) -> torch.Tensor:
    """Return logits like a language model's: the token of rank r has a probability of about r ** -1.5."""
    ranks = torch.rand(rows, vocab, device=bench.device).argsort(1) + 1
    return -1.5 * ranks.float().log()


def _sampling_case(temperature: float, top_p: float, logits_of: Callable[[Bench, int, int], torch.Tensor]) -> Make:
    def make(bench: Bench, shape: LlamaShape, rows: int) -> KernelCase:
        from pillion.kernels.gpu.sampling.gpu_sampling import choose
        from pillion.kernels.gpu.sampling.sampling_device import SamplerScratch
        from pillion.kernels.gpu.sampling.sampling_record import pack_rows

        size = rows * shape.vocab * 4
        count = rotations(size, bench.smoke)
        logits = [logits_of(bench, rows, shape.vocab) for _ in range(count)]
        sampling = sampled_rows(rows, temperature, top_p)
        record = torch.from_numpy(pack_rows(sampling)).to(bench.device)
        scratch = SamplerScratch(rows, shape.vocab, bench.device)
        out = torch.zeros(rows, dtype=torch.int32, device=bench.device)

        def one(which: torch.Tensor) -> None:
            choose(which, record, out, scratch)

        def verify() -> None:
            # Check only the range of sampled tokens here; the kernels' tests compare them.
            one(logits[0])
            if temperature:
                assert bool(((out >= 0) & (out < shape.vocab)).all())
            else:
                assert torch.equal(out.long(), logits[0].argmax(1))

        return KernelCase([_bound(one, each) for each in logits], size, verify)

    return make


def sampled_rows(count: int, temperature: float = 0.0, top_p: float = 1.0) -> SamplingRows:
    """Return rows with the same sampling parameters and different seeds."""
    params = [SamplingParams(temperature=temperature, top_p=top_p)] * count
    return SamplingRows.of(params, range(count), [1024] * count)


def _random(bench: Bench, *sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, device=bench.device).bfloat16()


def _bound(call: Callable[..., object], *values: object) -> Callable[[], object]:
    return lambda: call(*values)


def _close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=RTOL, atol=ATOL)


CASES: dict[str, Maker] = {
    "embed": Maker(embed_case, TOKEN_ROWS),
    "kv_write": Maker(kv_write_case, TOKEN_ROWS),
    "add_rms_norm": Maker(norm_case, TOKEN_ROWS),
    "gated": Maker(gated_case, TOKEN_ROWS),
    "route experts": Maker(route_case, MIXED_ROWS),
    "sort pairs": Maker(sort_case, MIXED_ROWS),
    "sum experts": Maker(sums_case, MIXED_ROWS),
    "blocks, gathered": Maker(_blocks_case("gathered"), BLOCK_ROWS),
    "blocks, scattered": Maker(_blocks_case("scattered"), BLOCK_ROWS),
    "blocks, copied": Maker(_blocks_case("copied"), BLOCK_ROWS),
    "sampling, greedy": Maker(_sampling_case(0.0, 1.0, _flat), SAMPLED_ROWS),
    "sampling, temperature 1": Maker(_sampling_case(1.0, 1.0, _peaked), SAMPLED_ROWS),
    "sampling, temperature 1, flat": Maker(_sampling_case(1.0, 1.0, _flat), SAMPLED_ROWS),
    "sampling, top_p 0.9": Maker(_sampling_case(1.0, 0.9, _peaked), SAMPLED_ROWS),
    "sampling, top_p 0.9, flat": Maker(_sampling_case(1.0, 0.9, _flat), SAMPLED_ROWS),
}
