"""Products with adapters against plain torch; a row's bits depend only on the row and its adapter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pillion.engine.adapters.cpu_adapters import AdapterRows
from pillion.kernels.cpu.adapters.adapter_tiles import RANK_MULTIPLE, pack_tiles
from pillion.kernels.cpu.adapters.low_rank import ADAPTED, SLOT, AdapterGemm, ExpertShrink, Shrink, run_rows
from pillion.kernels.cpu.language.isa import BY_NAME, TABLE
from pillion.kernels.cpu.products.gemm import Gemm
from pillion.kernels.cpu.products.tiles import TILE_COLUMNS
from pillion.kernels.cpu.quantized.matrix_packing import pack_gated, pack_linear
from pillion.kernels.cpu.runtime.program import CpuStepRecord
from tests.kernels.cpu.test_gemm import FACTOR, SPILL
from tests.support.batches import Sequences
from tests.support.cpu_references import BENDS, CLAMPED, reference_gemm
from tests.support.kernel_runner import MODES, TILE_MODES, normal, padded, registers_of, rows_step, runner_of, stride
from tests.support.machine_code import assembly

DEPTH, COLUMNS = 80, 96
# Only for products with a matrix per head, which tests of whole steps run.
SIZES = {"a_stride": 0, "b_stride": 0}
# Weights of the base, type of the rows, epilogue, and which rows.
CASES = [
    ("bf16", "bf16", "store", "tokens"),
    ("bf16", "bf16", "gated_silu", "samples"),
    ("fp32", "fp32", "add", "tokens"),
]
SHRINKS = [Shrink("bf16"), Shrink("bf16", "samples"), Shrink("fp32")]
PRODUCTS = [AdapterGemm(*case[:3], f"num_{case[3]}") for case in CASES]
PLAIN = [Gemm(*case[:3], f"num_{case[3]}") for case in CASES]

EXPERTS, CHOSEN = 3, 2
EXPERT_SHRINKS = [ExpertShrink(rows, "tokens", CHOSEN) for rows in ("bf16", "fp32")]
EXPERT_PRODUCTS = [AdapterGemm(rows, rows, "store", grouped=True) for rows in ("bf16", "fp32")]

runner = runner_of([*SHRINKS, *PRODUCTS, *PLAIN, *EXPERT_SHRINKS, *EXPERT_PRODUCTS], [*MODES, TILE_MODES[0]])


class LayerCase:
    """A layer with adapters: ``ranks`` by slot; 0 is a slot without an adapter. The two halves of the outputs have
    separate pairs, but in slots of odd numbers the second half has none."""

    def __init__(self, case: tuple[str, ...], ranks: tuple[int, ...]) -> None:
        self.case, self.ranks = case, ranks
        weights, self.rows, self.epilogue, self.rows_of = case
        self.dtype = torch.bfloat16 if self.rows == "bf16" else torch.float32
        both = [normal(COLUMNS // 2, DEPTH, seed=seed) / DEPTH**0.5 for seed in (1, 2)]
        gated = self.epilogue == "gated_silu"
        self.packed = pack_gated(*both, weights) if gated else pack_linear(torch.cat(both), weights)
        self.words = np.zeros((len(ranks), SLOT.num_words), np.int64)
        # Contribution of each slot, in the order of the packed outputs: x -> A x, rounded -> B A x.
        self.a: list[torch.Tensor] = []
        self.b: list[torch.Tensor] = []
        self.kept: list[Any] = []
        for slot, rank in enumerate(ranks):
            self._add(slot, rank, gated=gated)
        self.width = max(2 * (rank + -rank % RANK_MULTIPLE) for rank in (*ranks, TILE_COLUMNS))

    def _add(self, slot: int, rank: int, *, gated: bool) -> None:
        wide, pairs = rank + -rank % RANK_MULTIPLE, 1 if slot % 2 else 2
        a = torch.zeros(wide * pairs + -wide * pairs % TILE_COLUMNS, DEPTH)
        b, first = torch.zeros(COLUMNS, wide), torch.zeros(COLUMNS // TILE_COLUMNS, dtype=torch.int32)
        owner = torch.arange(COLUMNS) // TILE_COLUMNS % 2 if gated else torch.arange(COLUMNS) // (COLUMNS // 2)
        full = torch.zeros(COLUMNS, len(a))
        for pair in range(pairs if rank else 0):
            a[pair * wide : pair * wide + rank] = normal(rank, DEPTH, seed=10 * slot + pair) / DEPTH**0.5
            mine = owner == pair
            b[mine, :rank] = normal(int(mine.sum()), rank, seed=50 + 10 * slot + pair)
            first[mine[::TILE_COLUMNS]] = pair * wide * self.dtype.itemsize
            full[mine, pair * wide : (pair + 1) * wide] = b[mine].to(self.dtype).float()
        self.a.append(a.to(self.dtype).float())
        self.b.append(full)
        if rank:
            parts = self._tiles(a), self._tiles(b), first
            steps = wide // (2 if self.rows == "bf16" else 1)
            values = {"a": parts[0], "b": parts[1], "first_ranks": parts[2]}
            SLOT.fill(self.words[slot], {**values, **SIZES, "a_tiles": len(a) // TILE_COLUMNS, "b_steps": steps})
            self.kept.append(parts)

    def _tiles(self, matrix: torch.Tensor) -> Any:
        rounded = matrix.to(self.dtype)
        return pack_tiles(rounded.view(torch.int16 if self.rows == "bf16" else torch.int32).numpy())

    def inputs(self, rows: int) -> torch.Tensor:
        return normal(rows, DEPTH, seed=4).to(self.dtype)

    def out(self, numbers: list[int]) -> torch.Tensor:
        """The output before the product: rows of random values, by their number."""
        width = COLUMNS // 2 if self.epilogue == "gated_silu" else COLUMNS
        wanted = self.dtype if self.epilogue == "gated_silu" else torch.float32
        return torch.stack([normal(width, seed=100 + number) for number in numbers]).to(wanted)

    def run(self, runner: Any, x: torch.Tensor, slots: list[int], out: torch.Tensor, threads: int = 3) -> torch.Tensor:
        rows = len(x)
        step = rows_step(0, rows) if self.rows_of == "samples" else rows_step(rows)
        sequences = Sequences(2 * rows + 1, 16)
        numbers = [sequences.add(adapter=slot)[0] for slot in slots]
        batch = sequences.step([(number, [0]) for number in numbers])
        adapted = CpuStepRecord(ADAPTED)
        tables = {"slots": self.words, "adapted": adapted.words}
        product_tables = {**tables, "place_slots": None}
        if batch.adapters is not None:
            AdapterRows(len(self.ranks), run_rows(runner.isa)).fill(adapted, batch, batch.sample_rows)
        else:
            adapted.point(f"{self.rows_of}_slots", np.array(slots, np.int32))
        source = padded(x, extra=1, filler=torch.nan)
        shrunk = torch.full((rows + 1, -(-self.width // 32) * 32), torch.nan, dtype=self.dtype)
        given = {"x": source, **tables, "shrunk": shrunk[:rows], "x_stride": stride(source), "depth": DEPTH}
        shrink = Shrink(self.rows, self.rows_of)
        runner.run(shrink, {**given, "shrunk_stride": stride(shrunk)}, step, threads)
        assert shrunk[rows].isnan().all()
        values = self.product_values(source, out) | product_tables
        values |= {"shrunk": shrunk[:rows], "shrunk_stride": stride(shrunk)}
        runner.run(AdapterGemm(*self.case[:3], f"num_{self.rows_of}"), values, step, threads)
        return out

    def product_values(self, x: torch.Tensor, out: torch.Tensor) -> dict[str, Any]:
        return {
            "x": x,
            "weights": self.packed.data,
            "input_sums": None,
            "bias": None,
            "out": out,
            "group_starts": None,
            "x_stride": stride(x),
            "depth": self.packed.depth,
            "pairs": self.packed.pairs,
            "out_stride": stride(out),
            "num_groups": 0,
            "group_bytes": self.packed.nbytes,
            "inputs": 0,
            "input_sums_stride": 0,
            "factor": FACTOR,
            "alpha": CLAMPED.alpha,
            "limit": CLAMPED.limit,
            "above": BENDS[0],
            "below": BENDS[1],
        }

    def expected(self, x: torch.Tensor, slots: list[int], out: torch.Tensor) -> torch.Tensor:
        """The product in plain torch, each row by itself."""
        found = []
        for number, slot in enumerate(slots):
            added = None
            if slot >= 0:
                added = (x[number].float() @ self.a[slot].T).to(self.dtype).float() @ self.b[slot].T
            one = x[number : number + 1]
            found.append(reference_gemm(one, self.packed, self.epilogue, added, out[number : number + 1], FACTOR))
        return torch.cat(found)


@pytest.fixture(params=CASES, ids="-".join)
def layer(request):
    return LayerCase(request.param, (16, 5, 24, 0))


# Interleaved, all of one, some without, none, and more rows than a run or a tile.
MIXES = ([0, 1, 2, 3, -1, 0, 1, 2], [1] * 5, [-1, 0, -1], [-1, -1], [2], [0, -1, 2] * 15)


@pytest.mark.parametrize("slots", MIXES, ids=len)
def test_rows_with_different_adapters_share_a_batch(runner, layer, slots):
    x, numbers = layer.inputs(len(slots)), list(range(len(slots)))
    found = layer.run(runner, x, slots, layer.out(numbers))
    wanted = layer.expected(x, slots, layer.out(numbers))
    # A shrunk value near the middle of two bfloat16 numbers may round to the other one.
    tolerance = 2e-2 if layer.rows == "bf16" else 2e-5
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


def test_a_row_has_the_same_bits_in_every_batch(runner, layer):
    slots = [0, -1, 2, 1, 3, 0, 2] * 6
    x, numbers = layer.inputs(len(slots)), list(range(len(slots)))
    together = layer.run(runner, x, slots, layer.out(numbers))
    for rows in ([3], [2, 6], [0, 5, 7, 12, 14, 19, 21, 26, 2], [1, 4], numbers[::-1]):
        for threads in (1, 3):
            found = layer.run(runner, x[rows], [slots[row] for row in rows], layer.out(rows), threads)
            assert torch.equal(found, together[rows])


def test_a_row_without_an_adapter_equals_the_plain_product(runner, layer):
    slots = [0, -1, 2, -1, 3]
    x = layer.inputs(5)
    mixed = layer.run(runner, x, slots, layer.out([0, 1, 2, 3, 4]))
    plain, source = layer.out([0, 1, 2, 3, 4]), padded(x)
    step = rows_step(0, 5) if layer.rows_of == "samples" else rows_step(5)
    spec = Gemm(*layer.case[:3], f"num_{layer.rows_of}")
    runner.run(spec, layer.product_values(source, plain), step)
    for row in (1, 3, 4):
        assert torch.equal(mixed[row], plain[row])
    assert not torch.equal(mixed[0], plain[0])


class ExpertCase:
    """Experts with adapters of the ranks RANKS by slot; 0 is a slot without an adapter."""

    RANKS = (24, 0, 5)

    def __init__(self, rows: str) -> None:
        self.rows, self.dtype = rows, torch.bfloat16 if rows == "bf16" else torch.float32
        self.packed = [pack_linear(normal(COLUMNS, DEPTH, seed=n) / DEPTH**0.5, rows) for n in range(EXPERTS)]
        self.words = np.zeros((len(self.RANKS), SLOT.num_words), np.int64)
        self.a = [normal(EXPERTS, rank, DEPTH, seed=slot).to(self.dtype) / 8 for slot, rank in enumerate(self.RANKS)]
        self.b = [normal(EXPERTS, COLUMNS, rank, seed=9 + slot).to(self.dtype) for slot, rank in enumerate(self.RANKS)]
        self.kept: list[Any] = []
        for words, rank, a, b in zip(self.words, self.RANKS, self.a, self.b, strict=True):
            if not rank:
                continue
            wide = rank + -rank % RANK_MULTIPLE
            tall = wide + -wide % TILE_COLUMNS
            parts = (
                self._tiles(torch.nn.functional.pad(a, (0, 0, 0, tall - rank))),
                self._tiles(torch.nn.functional.pad(b, (0, wide - rank))),
                torch.zeros(EXPERTS * COLUMNS // TILE_COLUMNS, dtype=torch.int32),
            )
            values = dict(zip(("a", "b", "first_ranks"), parts, strict=True))
            steps = wide // (2 if rows == "bf16" else 1)
            SLOT.fill(words, {**values, **SIZES, "a_tiles": tall // TILE_COLUMNS, "b_steps": steps})
            self.kept.append(parts)

    def _tiles(self, matrices: torch.Tensor) -> Any:
        bits = matrices.flatten(0, 1).view(torch.int16 if self.rows == "bf16" else torch.int32)
        return pack_tiles(bits.numpy())

    def run(self, runner: Any, x: torch.Tensor, chosen: torch.Tensor, slots: list[int], threads: int) -> torch.Tensor:
        """Return the products [rows, CHOSEN, COLUMNS] of rows [rows, DEPTH] with their ``chosen`` experts [rows,
        CHOSEN]."""
        order = chosen.view(-1).argsort(stable=True)
        places = torch.empty_like(order, dtype=torch.int32)
        places[order] = torch.arange(len(order), dtype=torch.int32)
        starts = torch.tensor([0, *chosen.view(-1).bincount(minlength=EXPERTS).cumsum(0)], dtype=torch.int32)
        grouped = padded(x[order // CHOSEN], extra=1, filler=torch.nan)
        adapted = CpuStepRecord(ADAPTED)
        adapted.point("tokens_slots", np.array(slots, np.int32))
        shrunk = torch.full((len(order) + 1, 32), torch.nan, dtype=self.dtype)
        own = torch.full((len(order),), 77, dtype=torch.int32)
        both = {"slots": self.words, "adapted": adapted.words, "place_slots": own, "shrunk": shrunk[: len(order)]}
        both |= {"x": grouped, "x_stride": stride(grouped), "shrunk_stride": stride(shrunk)}
        experts = {"experts": chosen.to(torch.int32), "places": places, "most_tiles": 3, "depth": DEPTH}
        runner.run(ExpertShrink(self.rows, "tokens", CHOSEN), both | experts, rows_step(len(x)), threads)
        assert own[places.long()].tolist() == [slot for slot in slots for _ in range(CHOSEN)]
        assert shrunk[-1].isnan().all()
        out, one = torch.zeros(len(order), COLUMNS), self.packed[0]
        plain = dict.fromkeys(("input_sums", "bias"), None) | dict.fromkeys(("inputs", "input_sums_stride"), 0)
        plain |= dict.fromkeys(("factor", "alpha", "limit", "above", "below"), 0.0)
        weights = torch.stack([each.data for each in self.packed])
        sizes = {"depth": one.depth, "pairs": one.pairs, "out_stride": stride(out), "group_bytes": one.nbytes}
        values = {**both, **plain, **sizes, "weights": weights, "out": out, "group_starts": starts}
        spec = AdapterGemm(self.rows, self.rows, "store", grouped=True)
        runner.run(spec, {**values, "num_groups": EXPERTS}, rows_step(len(x)), threads)
        return out[places.long()].view(len(x), CHOSEN, COLUMNS)

    def expected(self, x: torch.Tensor, chosen: torch.Tensor, slots: list[int]) -> torch.Tensor:
        found = []
        for row, experts, slot in zip(x, chosen.tolist(), slots, strict=True):
            for expert in experts:
                added = None
                if slot >= 0 and self.RANKS[slot]:
                    shrunk = (self.a[slot][expert].float() @ row.float()).to(self.dtype).float()
                    added = (self.b[slot][expert].float() @ shrunk)[None]
                out = torch.zeros(1, COLUMNS)
                found.append(reference_gemm(row[None], self.packed[expert], "store", added, out, 1.0))
        return torch.cat(found).view(len(x), CHOSEN, -1)


@pytest.mark.parametrize("rows", ["bf16", "fp32"])
@pytest.mark.parametrize("slots", [[0, 1, 2, -1, 2, 0], [-1, -1], [2], [0, -1, 2] * 9], ids=len)
def test_rows_of_experts(runner, rows, slots):
    """Each expert has separate matrices, and a row has the same bits for any other rows and experts."""
    case, count = ExpertCase(rows), len(slots)
    x = normal(count, DEPTH, seed=4).to(case.dtype)
    # One expert may have all rows, and another one none.
    for chosen in (torch.tensor([[2, 0]] * count), torch.tensor([[n % 3, (n // 3 + n + 1) % 3] for n in range(count)])):
        found = case.run(runner, x, chosen, slots, 3)
        tolerance = 2e-2 if rows == "bf16" else 2e-5
        wanted = case.expected(x, chosen, slots)
        torch.testing.assert_close(found.double(), wanted.double(), rtol=tolerance, atol=tolerance)
        alone = [case.run(runner, x[n : n + 1], chosen[n : n + 1], slots[n : n + 1], 1) for n in range(min(count, 4))]
        assert torch.equal(torch.cat(alone), found[: len(alone)])


@pytest.mark.parametrize("isa", [registers_of(isa.name) for isa in TABLE])
def test_low_rank_tiles_do_not_spill(isa):
    for name, text in assembly(SHRINKS, BY_NAME[isa]).items():
        if name.startswith("shrink_tile"):
            assert not SPILL.search(text), name
