"""Mixtures of experts on the GPU kernels against the decoder's own, and whole models of families with experts."""

from __future__ import annotations

from tests.support.gpu_model import GpuDriver, make_family  # isort: skip  (before the kernels)

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from pillion.engine.backends.gpu import gpu_experts
from pillion.engine.backends.gpu.gpu_experts import GpuExperts
from pillion.engine.backends.gpu.shared_experts import JoinedExperts, join_operations, join_weights
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.models import families
from pillion.engine.models.layer_operations import (
    AddToLayerSum,
    AddToResidual,
    ClampedSwiglu,
    Entries,
    Experts,
    LayerTensor,
    Mlp,
    Norm,
    RestoreRows,
    Role,
    SaveRows,
    Share,
    matrix,
)
from pillion.engine.models.layer_weights import LayerWeights
from pillion.engine.models.layers import RouterBiases, expert_activation, mix_experts
from pillion.engine.models.model_shard import ModelShard
from pillion.kernels.torch.torch_linear import Linear
from tests.gpu.test_backend import close
from tests.support.families import mixed, tokens_of
from tests.support.gpu import DEVICE, NATIVE, add_up_in_one_order
from tests.support.torch_model import BackendDriver

pytestmark = [pytest.mark.usefixtures("own_cache"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]
HIDDEN, INNER, EXPERTS, ROWS = 40, 24, 5, 21


def vector(name: str) -> LayerTensor:
    return LayerTensor(name=name, role=Role.EXACT_VECTOR, rows=(Entries(EXPERTS),), checkpoint_names=())


PLAIN = mixed(2, True)
OPERATIONS = {
    "silu": PLAIN,
    "gelu": replace(PLAIN, activation="gelu_tanh", scale=1.5, normalize=False),
    "no gates": replace(PLAIN, activation="relu2", gated=False),
    "clamped": replace(PLAIN, clamped=ClampedSwiglu(1.3, 0.7), router_bias=vector("router.bias")),
    "sigmoid": replace(PLAIN, sigmoid=True, choice_bias=vector("choice_bias"), per_token=3),
    "scaled inputs": replace(PLAIN, sigmoid=True, normalize=False, per_token=1, scaled_inputs=True),
    "two scaled inputs": replace(PLAIN, scaled_inputs=True, expert_scales=vector("expert_scales")),
}


def layer_of(how: Experts, biases: bool) -> tuple[Experts, SimpleNamespace]:
    """A mixture, and random tensors of its layer."""
    torch.manual_seed(3)
    wide = (2 if how.gated else 1) * INNER
    shapes = {"router": (HIDDEN,), "experts.gate_up": (wide, HIDDEN), "experts.down": (HIDDEN, INNER)}
    tensors = {
        name: LayerTensor(
            name=name,
            role=Role.MATRIX,
            rows=(Entries(shape[0] if shape[1:] else EXPERTS),),
            inputs=(Entries(shape[-1]),),
            checkpoint_names=(),
        )
        for name, shape in shapes.items()
    }
    how = replace(how, router=tensors["router"], gate_up=tensors["experts.gate_up"], down=tensors["experts.down"])
    matrices = {name: torch.randn(EXPERTS, *shape).to(DEVICE) / 5 for name, shape in shapes.items()}
    for each in (how.router_bias, how.choice_bias, how.expert_scales):
        if each is not None:
            matrices[each.name] = torch.randn(EXPERTS).to(DEVICE) / 2
    added = {name: torch.randn(EXPERTS, shape[0]).to(DEVICE) / 2 if biases else None for name, shape in shapes.items()}
    return how, SimpleNamespace(operations=(how,), matrices=matrices, biases=added)


WHOLE = ModelShard(range(1))


def made(
    how: Experts, biases: bool = False, rows: int = ROWS, shard: ModelShard = WHOLE
) -> tuple[GpuExperts, Experts, SimpleNamespace]:
    """The experts of a process, an operation, and the process's tensors."""
    how, layer = layer_of(how, biases)
    mine = shard.experts(EXPERTS)
    for stacks in (layer.matrices, layer.biases):
        for name in (how.gate_up.name, how.down.name):
            stacks[name] = None if stacks[name] is None else stacks[name][mine.start : mine.stop].contiguous()
    return GpuExperts(model_of(layer, rows, shard)), how, layer


def model_of(layer: SimpleNamespace, rows: int, shard: ModelShard) -> SimpleNamespace:
    return SimpleNamespace(
        config=SimpleNamespace(hidden_size=HIDDEN),
        layers={0: layer},
        shard=shard,
        max_tokens=rows,
        dtype=torch.float32,
        device=DEVICE,
        projected=torch.full((rows, HIDDEN), torch.nan, device=DEVICE),
        residual=torch.zeros(rows, HIDDEN, device=DEVICE),
    )


def number(count: int) -> torch.Tensor:
    return torch.tensor([count], dtype=torch.int32, device=DEVICE)


def expected(how: Experts, layer: SimpleNamespace, rows: torch.Tensor) -> torch.Tensor:
    act = expert_activation(how)

    def product(name: str, expert: int, values: torch.Tensor) -> torch.Tensor:
        bias = layer.biases[name]
        return values @ layer.matrices[name][expert].T + (0 if bias is None else bias[expert])

    def run(expert: int, values: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return product(how.down.name, expert, act(product(how.gate_up.name, expert, values)))

    vectors = (
        None if one is None else layer.matrices[one.name]
        for one in (how.router_bias, how.choice_bias, how.expert_scales)
    )
    return mix_experts(rows, layer.matrices[how.router.name], run, how, RouterBiases(*vectors))


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_expert_layer_matches_the_decoder(name, monkeypatch):
    """All rows at once, and in parts."""
    experts, how, layer = made(OPERATIONS[name], biases=name == "clamped")
    rows = torch.randn(ROWS, HIDDEN).to(DEVICE)
    wanted = expected(how, layer, rows)
    torch.testing.assert_close(experts.run(layer, how, rows, number(ROWS)), wanted, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(gpu_experts, "MAX_MIXED_ROWS", 16)
    torch.testing.assert_close(experts.run(layer, how, rows, number(ROWS)), wanted, rtol=1e-4, atol=1e-4)


def test_ranks_with_whole_experts_add_up_to_the_layer():
    how, layer = layer_of(OPERATIONS["clamped"], True)
    rows = torch.randn(ROWS, HIDDEN).to(DEVICE)
    wanted, total = expected(how, layer, rows), torch.zeros(ROWS, HIDDEN, device=DEVICE)
    for rank in range(2):
        shard = ModelShard(range(1), rank, 2, whole_experts=True)
        experts, how, own = made(OPERATIONS["clamped"], True, shard=shard)
        assert len(own.matrices["experts.down"]) == (3, 2)[rank]
        found = experts.run(own, how, rows, number(ROWS))
        assert isinstance(found, torch.Tensor)
        total += found
    torch.testing.assert_close(total, wanted, rtol=1e-4, atol=1e-4)


def test_padding_rows_have_no_experts(monkeypatch):
    experts, how, layer = made(PLAIN)
    rows = torch.randn(ROWS, HIDDEN).to(DEVICE)
    rows[9:] = torch.nan
    wanted = expected(how, layer, rows[:9])
    found = experts.run(layer, how, rows, number(9))
    torch.testing.assert_close(found[:9], wanted, rtol=1e-4, atol=1e-4)
    assert bool((found[9:] == 0).all())
    assert int(experts._buffers.tiles.view(-1, 3)[: int(experts._buffers.count), 2].sum()) == 9 * how.per_token


def test_a_tokens_bits_are_equal_in_any_batch(monkeypatch):
    """For any other rows, number of rows and padding, and hence any tiles."""
    add_up_in_one_order(monkeypatch)
    experts, how, layer = made(PLAIN, rows=96)
    rows = torch.randn(96, HIDDEN).to(DEVICE)
    together = experts.run(layer, how, rows, number(96)).clone()
    order = torch.randperm(96)
    assert torch.equal(experts.run(layer, how, rows[order], number(96)), together[order])
    for begin, count, real in ((7, 1, 1), (3, 40, 33)):
        found = experts.run(layer, how, rows[begin : begin + count], number(real))
        assert torch.equal(found[:real], together[begin : begin + real])


def test_every_kernel_is_compiled_ahead(monkeypatch):
    """Steps of any size launch only with constants with which kernels were compiled ahead."""
    experts, how, layer = made(PLAIN, rows=96)
    seen: set[tuple[object, ...]] = set()
    for name in ("_route", "_sort", "_product"):
        one = getattr(experts, name)

        def spy(*args, one=one, name=name, **options):
            own = (args[0].shape[0] <= 64,) if name == "_route" else (options.get("tile_rows", args[-1]),)
            seen.add((name, *own))
            return one(*args, **options)

        monkeypatch.setattr(experts, name, spy)
    monkeypatch.setattr(gpu_experts, "SPLIT_K_MAX_ROWS", 64)
    experts.compile()
    ahead = set(seen)
    for count in (1, 9, 30, 50, 96):
        experts.run(layer, how, torch.zeros(count, HIDDEN, device=DEVICE), number(0))
    assert seen == ahead


def test_sums_of_an_expert_layer_match_the_decoder(tmp_path, monkeypatch):
    """Of experts and the MLP beside them in both orders, each normed before or not, and fused into one mixture."""
    family = families.FAMILIES["afmoe"]

    def layer(config, index):
        whole = family.layer(config, index)
        weights = (one.weight for one in whole if isinstance(one, Norm))
        norms = [AddToLayerSum(replace(one, name=f"of_sums.{place}")) for place, one in enumerate(weights)]
        match list(whole):
            case [
                *before,
                SaveRows() as keep,
                mixed,
                AddToLayerSum() as add,
                again,
                beside,
                AddToLayerSum(),
                after,
            ] if index == 1:
                return *before, keep, beside, norms[0], again, mixed, norms[1], after
            case [
                *before,
                SaveRows() as keep,
                mixed,
                AddToLayerSum() as add,
                again,
                beside,
                AddToLayerSum(),
                after,
            ] if index == 2:
                return *before, keep, mixed, add, again, beside, norms[0], after
        return whole

    monkeypatch.setitem(families.FAMILIES, "afmoe", replace(family, layer=layer))
    _, flags = make_family(tmp_path / "model", "afmoe", hidden_size=32, intermediate_size=32)
    prepared, text = prepare(flags), tokens_of(19, 2)
    found = []
    for kind in (GpuDriver, BackendDriver):
        driver = kind(prepared, num_slots=8)
        one, two = driver.sequences.add(2)
        first = driver.step((one, text[:17]), (two, text[:3]), sample=[3, 17])
        found.append(torch.cat((first, driver.step((two, text[3:4]), (one, text[17:])))).cpu())
    close(*found)


def shared(name: str, joined: int, gated: bool, shard: ModelShard = WHOLE, rows: int = ROWS):
    """The experts of a process with an MLP beside them, as wide as the given number of experts (0: another width);
    their operation, the process's tensors, and the expected results of all processes together."""
    how, layer = layer_of(replace(OPERATIONS[name], per_token=min(2, OPERATIONS[name].per_token)), False)
    inner, pieces = INNER * joined or INNER + 8, 2 if how.gated else 1
    wide, hidden = Entries(inner, Share.INNER), (Entries(HIDDEN),)
    gate = matrix("shared.gate", (Entries(1),), hidden) if gated else None
    mlp = Mlp(
        matrix("shared.gate_up", (wide,) * pieces, hidden),
        matrix("shared.down", hidden, (wide,)),
        how.activation,
        gated=how.gated,
        row_gate=gate,
    )
    own = {each.name: torch.randn(each.shape).to(DEVICE) / 5 for each in (mlp.gate_up, mlp.down, gate) if each}
    add = AddToResidual(None, 1.0)
    operations = (SaveRows(), how, add, RestoreRows(), mlp, add)
    weights = LayerWeights({one: Linear.plain(own[one], None) for one in (mlp.gate_up.name, mlp.down.name)})
    for tensor in (how.gate_up, how.down):
        weights[tensor.name] = tuple(Linear.plain(each, None) for each in layer.matrices[tensor.name])
    stacked, _ = join_weights(weights, operations, shard)
    mine = shard.experts(EXPERTS)
    (mixture, _) = join_operations(operations, lambda *_: joined if shard.whole else 0)
    matrices = layer.matrices | own

    def wanted(x: torch.Tensor) -> torch.Tensor:
        inside = expert_activation(how)(x @ own[mlp.gate_up.name].T) @ own[mlp.down.name].T
        return expected(how, layer, x) + inside * ((x @ own[gate.name].T).sigmoid() if gate else 1)

    def beside(x: torch.Tensor) -> torch.Tensor | None:
        if mixture.joined:
            return None
        # Each rank has some inner values.
        some = torch.arange(shard.rank, inner, shard.size)
        ups = torch.cat([some + inner * piece for piece in range(pieces)])
        return expert_activation(how)(x @ own[mlp.gate_up.name][ups].T) @ own[mlp.down.name][:, some].T

    for tensor in (how.gate_up, how.down):
        experts = torch.stack([one.weight for one in stacked.experts(tensor)])
        assert len(experts) == EXPERTS + mixture.joined
        matrices[tensor.name] = experts if shard.whole else experts[mine.start : mine.stop].contiguous()
    namespace = SimpleNamespace(operations=(mixture,), matrices=matrices, biases=dict.fromkeys(matrices))
    return GpuExperts(model_of(namespace, rows, shard)), mixture, namespace, wanted, beside


@pytest.mark.parametrize("joined", [0, 1, 3])
@pytest.mark.parametrize(("name", "gated"), [("silu", True), ("sigmoid", False), ("no gates", True)])
def test_an_mlp_beside_the_experts_is_in_their_sum(name, gated, joined, monkeypatch):
    """As experts of their stack, without additional launches, or as rows; also in a step computed in parts."""
    experts, how, layer, wanted, beside = shared(name, joined, gated)
    rows = torch.randn(ROWS, HIDDEN).to(DEVICE)
    rows[17:] = torch.nan
    launches = launched(monkeypatch)
    found = experts.run(layer, how, rows, number(17), shared=beside(rows))
    assert launches == ["_route", "_grouped", "_grouped", "_add_up"]
    torch.testing.assert_close(found[:17], wanted(rows[:17]), rtol=1e-4, atol=1e-4)
    assert bool((found[17:] == 0).all()) or not joined
    together = found.clone()
    monkeypatch.setattr(gpu_experts, "MAX_MIXED_ROWS", 16)
    found = experts.run(layer, how, rows, number(17), shared=beside(rows))
    torch.testing.assert_close(found[:17], together[:17], rtol=1e-5, atol=1e-5)


def test_input_scores_do_not_scale_the_mlp():
    experts, how, layer, wanted, beside = shared("scaled inputs", 1, False)
    rows = torch.randn(ROWS, HIDDEN).to(DEVICE)
    found = experts.run(layer, how, rows, number(ROWS), shared=beside(rows))
    torch.testing.assert_close(found, wanted(rows), rtol=1e-4, atol=1e-4)


def test_ranks_with_whole_experts_add_the_mlp_once():
    total, rows = torch.zeros(ROWS, HIDDEN, device=DEVICE), torch.randn(ROWS, HIDDEN).to(DEVICE)
    for rank in range(2):
        shard = ModelShard(range(1), rank, 2, whole_experts=True)
        experts, how, layer, wanted, beside = shared("silu", 1, True, shard)
        total += experts.run(layer, how, rows, number(ROWS), shared=beside(rows))
    torch.testing.assert_close(total, wanted(rows), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("joined", [0, 2])
def test_bits_beside_an_mlp_are_equal_in_any_batch(joined, monkeypatch):
    add_up_in_one_order(monkeypatch)
    experts, how, layer, _, _ = shared("silu", joined, True, rows=96)
    rows, other = torch.randn(2, 96, HIDDEN).to(DEVICE)
    together = experts.run(layer, how, rows, number(96), shared=None if joined else other).clone()
    for begin, count, real in ((7, 1, 1), (3, 40, 33)):
        part = slice(begin, begin + count)
        found = experts.run(layer, how, rows[part], number(real), shared=None if joined else other[part])
        assert torch.equal(found[:real], together[begin : begin + real])


def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List the names of the kernels that are launched from now on."""
    names: list[str] = []
    kind = JITFunction if NATIVE else InterpretedFunction
    run = kind.run

    def spy(self, *args, **options):
        names.append(self.fn.__name__)
        return run(self, *args, **options)

    monkeypatch.setattr(kind, "run", spy)
    return names


@pytest.mark.parametrize(
    ("family", "joined"), [("qwen2-moe", 0), ("qwen2-moe-window", 3), ("deepseek-v3", 2), ("afmoe", 2)]
)
def test_launches_of_a_layer_with_shared_experts(family, joined, tmp_path, monkeypatch):
    _, flags = make_family(tmp_path / "model", family, hidden_size=32, intermediate_size=32)
    driver = GpuDriver(prepare(flags), num_slots=8)
    layers = driver.backend._model.layers.values()
    mixtures = [one for layer in layers for one in layer.operations if isinstance(one, JoinedExperts)]
    assert {one.joined for one in mixtures} == {joined}
    (one,) = driver.sequences.add(1)
    names = launched(monkeypatch)
    driver.step((one, tokens_of(3, 2)), sample=[2])
    # The MLP has its own activation if it is not one of the experts, and never a separate sum.
    dense = len(layers) - len(mixtures)
    assert names.count("_gated") == dense + (0 if joined else len(mixtures))
    assert names.count("_add_rms_norm") == 2 * len(layers)
    assert names.count("_route") == len(mixtures)
