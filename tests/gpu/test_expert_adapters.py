"""Products that adapters add to experts, routers and gates: grouped products beside plain torch, and whole models."""

from __future__ import annotations

from tests.support.gpu import DEVICE, NATIVE, add_up_in_one_order, rounded  # isort: skip  (before the kernels)

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from pillion.engine.adapters.adapter_weights import AdapterWeights, shard_adapter
from pillion.engine.backends.gpu import gpu_experts
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.gpu_adapters.gpu_adapters import GpuAdapters, MixtureAdapters
from pillion.engine.models.config_parser import load_config
from pillion.engine.models.families import layers_of
from pillion.engine.models.layer_operations import Experts
from pillion.engine.models.layers import RouterBiases, expert_activation, mix_experts
from pillion.engine.models.model_shard import ModelShard, whole_model
from pillion.errors import ConfigError, Internal
from pillion.kernels.gpu.experts.expert_adapters import PairAdapters
from pillion.kernels.gpu.experts.grouped_product import GroupedGemm
from pillion.kernels.gpu.products.low_rank_product import LayerSlot
from tests.gpu.test_gpu_experts import EXPERTS, HIDDEN, INNER, OPERATIONS, made, number
from tests.gpu.test_grouped_product import CHOICES, CLAMPED, activation_of, experts_of, routed
from tests.support.families import FAMILIES, make_model, tokens_of
from tests.support.gpu_model import GpuDriver, gpu_backend
from tests.support.guarded import MARK, Guarded
from tests.support.mixed_adapters import mixed_steps, place_adapters, with_adapters
from tests.support.torch_model import BackendDriver

pytestmark = [pytest.mark.usefixtures("own_cache"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]
RANK, SLOTS, AT = 16, 3, 32


def slot_of(experts: int, inputs: int, outputs: int, *, halves: bool, rank: int = RANK) -> LayerSlot:
    ends = (outputs // 2, outputs) if halves else (outputs,)
    return LayerSlot(AT, AT + experts * len(ends) * rank * inputs, inputs, outputs, ends, rank, experts)


def random_slots(layer: LayerSlot, dtype: torch.dtype, slots: int = SLOTS) -> torch.Tensor:
    """Slots whose last one no row has: its content is never read."""
    values = torch.randn(slots, AT + layer.values + 16, generator=torch.Generator().manual_seed(layer.inputs))
    values[:, layer.a_at : layer.b_at] /= layer.inputs**0.5
    values[:, layer.b_at :] /= layer.rank**0.5
    values[-1] = torch.nan
    return values.to(dtype)


def added(slots: torch.Tensor, layer: LayerSlot, slot: int, expert: int, row: torch.Tensor) -> torch.Tensor:
    """A slot's addition to one row [inputs] of an expert, in float64 except for the rounding of the shrunk values."""
    a = slots[slot, layer.a_at : layer.b_at].view(layer.experts, len(layer.ends), layer.rank, -1)[expert].double()
    b = slots[slot, layer.b_at : AT + layer.values].view(layer.experts, layer.outputs, -1)[expert].double()
    shrunk = (a @ row.double()).to(row.dtype).double()
    return torch.cat(
        [b[begin:end] @ one for begin, end, one in zip((0, *layer.ends), layer.ends, shrunk, strict=False)]
    )


def pair_adapters(slots: torch.Tensor, layer: LayerSlot, row_slots: list[int], per_token: int) -> PairAdapters:
    ranks = len(layer.ends) * layer.rank
    shrunk = torch.full((len(row_slots) * per_token, ranks), torch.nan, dtype=slots.dtype, device=DEVICE)
    numbers = torch.tensor(row_slots, dtype=torch.int32, device=DEVICE)
    return PairAdapters(slots.to(DEVICE), layer, numbers, per_token, shrunk)


# Kind of the matrix, type, activation, gated, biased, whether each pair has a separate row, and the padded rank.
CASES = [
    ("plain", torch.float32, "silu", True, False, False, 16),
    ("plain", torch.bfloat16, CLAMPED, True, True, False, 32),
    ("plain", torch.float32, "relu2", False, True, False, 16),
    ("plain", torch.bfloat16, None, False, True, True, 64),
    ("int4 32 signed", torch.bfloat16, "silu", True, False, False, 16),
    ("int4 32 float16", torch.bfloat16, "silu", True, False, False, 16),
    ("fp4_e2m1 32 powers", torch.bfloat16, None, False, True, True, 16),
]


@pytest.mark.parametrize(("name", "dtype", "activation", "gated", "biased", "own", "rank"), CASES)
def test_a_product_with_adapters(name, dtype, activation, gated, biased, own, rank):
    """An expert with several tiles, one with none; rows with the slots of three adapters but the last, and without."""
    width, inputs = 40, 96
    outputs = 2 * width if gated else width
    matrix, weights = experts_of(name, outputs, inputs, dtype)
    order, tiles, count = routed([3, 0, 18, 1], 16)
    tokens = len(order) // CHOICES
    rows = torch.randn(len(order) if own else tokens, inputs).to(dtype)
    bias = torch.randn(len(weights), outputs).to(dtype) if biased else None
    layer = slot_of(len(weights), inputs, outputs, halves=gated, rank=rank)
    slots, row_slots = random_slots(layer, dtype), [(-1, 1, 0)[row % 3] for row in range(tokens)]
    out = Guarded((len(order), width), dtype)
    GroupedGemm(dtype, DEVICE)(
        rows.to(DEVICE), order.to(DEVICE), CHOICES, tiles.to(DEVICE), count.to(DEVICE), matrix,
        None if bias is None else bias.to(DEVICE), activation, gated=gated, out=out.inside, scatter=own,
        tile_rows=16, gathered=not own, adapters=pair_adapters(slots, layer, row_slots, CHOICES),
    )  # fmt: skip
    wanted = torch.full(out.inside.shape, MARK, dtype=dtype)
    for expert, first, held in tiles[: int(count)].tolist():
        for place in range(first, first + held):
            token = int(order[place]) // CHOICES
            row = rows[place if own else token]
            found = weights[expert] @ row.double() + (0 if bias is None else bias[expert].double())
            if row_slots[token] >= 0:
                found += added(slots, layer, row_slots[token], expert, row)
            target = int(order[place]) if own else place
            wanted[target] = activation_of(activation, gated)(found.to(dtype)[None])[0]
    slack, size = rounded(dtype, 8 if dtype == torch.float32 else 4), wanted.abs().max().double()
    torch.testing.assert_close(out.inside.cpu().double() / size, wanted.double() / size, **slack)
    assert out.margins_are_whole()


def test_a_rows_bits_do_not_depend_on_its_tile(monkeypatch):
    """Rows of two adapters and none, in tiles of every size, and alone with those of the same adapter."""
    add_up_in_one_order(monkeypatch)
    dtype = torch.bfloat16 if NATIVE else torch.float32
    matrix, _ = experts_of("plain", 24, 96, dtype)
    layer = slot_of(len(matrix), 96, 24, halves=True)
    slots, counts = random_slots(layer, dtype), [40, 7, 0, 70]
    order, _, _ = routed(counts, 16)
    rows, every = torch.randn(len(order), 96, device=DEVICE).to(dtype), [(-1, 1, 0)[row % 3] for row in range(117)]

    def found(tile_rows: int, row_slots: list[int], **adapters: object) -> torch.Tensor:
        _, tiles, count = routed(counts, tile_rows)
        out = torch.zeros(len(order), 12, dtype=dtype, device=DEVICE)
        own = {"adapters": pair_adapters(slots, layer, row_slots, 1), **adapters}
        GroupedGemm(dtype, DEVICE)(
            rows, order.to(DEVICE), 1, tiles.to(DEVICE), count.to(DEVICE), matrix, None, "silu", gated=True, out=out,
            scatter=True, tile_rows=tile_rows, **own,
        )  # fmt: skip
        return out

    together = found(16, every)
    for tile_rows in (32, 64, 128):
        assert torch.equal(found(tile_rows, every), together)
    for slot in (0, 1):
        mine = torch.tensor(every) == slot
        alone = found(16, [slot if one == slot else -1 for one in every])
        assert torch.equal(alone[mine], together[mine])
    without = torch.tensor(every) < 0
    assert torch.equal(found(16, every, adapters=None)[without], together[without])


def test_wrong_adapters_are_refused():
    product, none = GroupedGemm(torch.float32, DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    layer = slot_of(2, 32, 8, halves=True)
    adapters = pair_adapters(random_slots(layer, torch.float32), layer, [0, 1, -1], 1)

    def run(adapters: PairAdapters) -> None:
        out, matrix = torch.zeros(3, 4, device=DEVICE), torch.zeros(2, 8, 32, device=DEVICE)
        product(
            torch.zeros(3, 32, device=DEVICE), none.new_zeros(3), 1, none.new_zeros(1, 3), none, matrix, None, "silu",
            gated=True, out=out, scatter=True, tile_rows=16, adapters=adapters,
        )  # fmt: skip

    run(adapters)
    for wrong in (
        {"layer": replace(layer, experts=3)},
        {"layer": replace(layer, rank=24)},
        {"slots": adapters.slots.bfloat16()},
        {"row_slots": adapters.row_slots.long()},
        {"shrunk": adapters.shrunk[:2]},
    ):
        with pytest.raises(Internal):
            run(replace(adapters, **wrong))


class LayerAdapters:
    """Stands for the adapters of one layer of random matrices."""

    def __init__(self, how, row_slots: list[int]) -> None:
        self.layers = {
            how.gate_up.name: slot_of(EXPERTS, HIDDEN, how.gate_up.shape[0], halves=how.gated),
            how.down.name: slot_of(EXPERTS, INNER, HIDDEN, halves=False),
        }
        self.slots = {name: random_slots(layer, torch.float32) for name, layer in self.layers.items()}
        self.row_slots, self.router = row_slots, torch.randn(EXPERTS) * (torch.arange(len(row_slots)) % 2)[:, None]

    def routed(self, tensor, rows) -> torch.Tensor:
        return self.router[: len(rows)].to(DEVICE).contiguous()

    def of_pairs(self, tensor, first, per_token) -> PairAdapters:
        name = tensor.name
        own = pair_adapters(self.slots[name], self.layers[name], self.row_slots, per_token)
        return replace(own, row_slots=own.row_slots[first:])


@pytest.mark.parametrize("name", ["silu", "no gates", "clamped", "sigmoid", "two scaled inputs"])
def test_mixed_rows_of_a_layer(name, monkeypatch):
    """Random rows, some of which pad the step, beside the decoder's own mixture; in one part and in several."""
    experts, how, layer = made(OPERATIONS[name], biases=name == "clamped")
    rows, real = torch.randn(21, HIDDEN), 19
    adapters = LayerAdapters(how, [(-1, 1, 0, 0)[row % 4] for row in range(real)] + [-1, -1])
    act = expert_activation(how)

    def product(tensor: str, expert: int, values: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        bias = layer.biases[tensor]
        found = values @ layer.matrices[tensor][expert].T.cpu() + (0 if bias is None else bias[expert].cpu())
        for at, row in enumerate(numbers.tolist()):
            if (slot := adapters.row_slots[row]) >= 0:
                found[at] += added(adapters.slots[tensor], adapters.layers[tensor], slot, expert, values[at]).float()
        return found

    def run(expert: int, values: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        inner = act(product(how.gate_up.name, expert, values, numbers))
        return product(how.down.name, expert, inner, numbers)

    vectors = (
        None if one is None else layer.matrices[one.name].cpu()
        for one in (how.router_bias, how.choice_bias, how.expert_scales)
    )

    def change(_: torch.Tensor, products: torch.Tensor, first: int) -> None:
        products += adapters.router[first : first + len(products)]

    router = layer.matrices[how.router.name].cpu()
    wanted = mix_experts(rows[:real], router, run, how, RouterBiases(*vectors, change))
    rows[real:] = torch.nan
    for most in (8192, 16):
        monkeypatch.setattr(gpu_experts, "MAX_MIXED_ROWS", most)
        found = experts.run(layer, how, rows.to(DEVICE), number(real), adapters=adapters).cpu()
        torch.testing.assert_close(found[:real], wanted, rtol=1e-3, atol=1e-3)
        assert bool((found[real:] == 0).all())


def test_a_tokens_bits_are_equal_in_any_batch(monkeypatch):
    """For any other rows and adapters."""
    add_up_in_one_order(monkeypatch)
    experts, how, layer = made(OPERATIONS["silu"], rows=45)
    rows, every = torch.randn(45, HIDDEN).to(DEVICE), [(-1, 1, 0, 0, 1)[row % 5] for row in range(45)]
    adapters = LayerAdapters(how, every)
    together = experts.run(layer, how, rows, number(45), adapters=adapters).clone()
    router = adapters.router
    for numbers in (torch.randperm(45), torch.tensor([7]), torch.arange(3, 33)):
        adapters.row_slots, adapters.router = [every[row] for row in numbers.tolist()], router[numbers]
        found = experts.run(layer, how, rows[numbers.to(DEVICE)], number(len(numbers)), adapters=adapters)
        assert torch.equal(found, together[numbers.to(DEVICE)])


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if NATIVE else pytest.mark.long)
        for family in ("gpt-oss", "deepseek-v3", "qwen3-moe-some-dense", "qwen2-moe", "llama4", "afmoe", "gemma4-moe")
    ],
)
def test_mixed_adapter_steps_match_torch(family, tmp_path):
    """Experts, routers and gates beside them; the adapters' ranks differ, and one skips some layers."""
    prepared, text = prepare(make_model(tmp_path / "model", FAMILIES[family])[1]), tokens_of(18, 3)
    driver = with_adapters(GpuDriver(prepared, backend=gpu_backend(prepared, join=False)), experts=True)
    found, wanted = (mixed_steps(each, text) for each in (driver, with_adapters(BackendDriver(prepared), experts=True)))
    tolerance = 1e-3 if NATIVE else 2e-4
    torch.testing.assert_close(found.cpu(), wanted, atol=tolerance, rtol=tolerance)
    plain = mixed_steps(with_adapters(BackendDriver(prepared)), text)
    assert float((wanted - plain).std()) > 0.05 * float(plain.std())


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return prepare(make_model(tmp_path_factory.mktemp("mixture") / "model", FAMILIES["qwen2-moe"])[1])


def mixed_adapters(prepared) -> list[AdapterWeights]:
    """The adapters of RANKS, with pairs for experts and routers."""
    found: list[AdapterWeights] = []
    keep = SimpleNamespace(pack=found.append, place=lambda *_: None)
    place_adapters(SimpleNamespace(adapters=keep), prepared, experts=True)
    return found


def test_a_rank_packs_its_own_experts(mixture):
    """Ranks that have whole experts have all of these experts' pairs."""
    config = load_config(mixture.folder)
    weights, parts = mixed_adapters(mixture)[1], []
    name, count = "layers.0.experts.down", config.moe.num_experts
    for rank in range(2):
        shard = replace(ModelShard.of(config, rank, 2), whole_experts=True)
        parts.append(shard_adapter(weights, config, shard, {}).layers[name][0])
        slots = GpuAdapters(config, shard, {}, torch.float32, DEVICE, 2, 16, 4)
        assert slots._layers[name].experts == len(shard.experts(count)) == len(parts[-1].a)
        slots.place(0, slots.pack(weights))
    pair = weights.layers[name][0]
    assert torch.equal(torch.cat([part.a for part in parts]), pair.a)
    assert torch.equal(torch.cat([part.b for part in parts]), pair.b)


def test_slots_that_do_not_fit_are_refused(mixture, monkeypatch):
    config = load_config(mixture.folder)

    def too_much(*sizes, **_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "zeros", too_much)
    with pytest.raises(ConfigError, match=r"8 adapters of 0.0 GiB each do not fit .* lower --max-loras or"):
        GpuAdapters(config, whole_model(config), None, torch.float32, DEVICE, 8, 16, 4)


def test_slots_cover_only_the_named_layers(mixture):
    """A step with an adapter of attention only computes nothing for experts."""
    config = load_config(mixture.folder)
    sizes = {}
    for targets in ((), ("q_proj", "o_proj"), ("experts.down_proj",)):
        adapters = GpuAdapters(config, whole_model(config), None, torch.float32, DEVICE, 2, 16, 4, targets)
        sizes[targets] = [slots.shape[1] for slots in adapters.slots]
        own = MixtureAdapters(adapters, "layers.0.", sampled=False)
        experts = next(one for one in layers_of(config)[0] if isinstance(one, Experts))
        found = own.of_pairs(experts.gate_up, 0, 2), own.of_pairs(experts.down, 0, 2)
        added = own.routed(experts.router, torch.zeros(2, config.hidden_size, device=DEVICE))
        have = [each is not None for each in (*found, added)]
        assert have == [not targets, not targets or "experts.down_proj" in targets, not targets]
    assert 0 < sizes["q_proj", "o_proj"][0] < sizes[()][0] / 2
    assert [exact for _, exact in sizes.values()] == [sizes[()][1], 0, 0]
