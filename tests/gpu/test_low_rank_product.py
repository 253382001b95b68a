"""Adapters on the GPU: the kernels against plain torch, and whole steps beside the torch backend."""

from __future__ import annotations

from tests.support.gpu import DEVICE, NATIVE, rounded  # isort: skip  (before the kernels)

from dataclasses import replace

import numpy as np
import pytest
import torch

from lab.testbed.tiny_model import save_model
from pillion.config import ModelFlags
from pillion.engine.adapters.adapter_rows import adapted_runs
from pillion.engine.backends.backend import bound_adapters
from pillion.engine.backends.gpu.gpu_graphs import StepGraphs
from pillion.engine.checkpoints.prepare import prepare
from pillion.errors import Internal
from pillion.kernels.gpu.products.low_rank_product import RUN_ROWS, LayerSlot, RunRecord, add_low_rank, padded_rank
from tests.support.families import FAMILIES, make_model, tokens_of
from tests.support.gpu_model import GpuDriver, gpu_backend
from tests.support.mixed_adapters import RANKS, mixed_steps, place_adapters, with_adapters
from tests.support.torch_model import BackendDriver

pytestmark = pytest.mark.usefixtures("own_cache")

# Slots begin behind the buffer's start, and contain two adapters.
AT, SLOTS = 32, 2
LAYERS = {
    "qkv": LayerSlot(AT, AT + 3 * 16 * 48, 48, 96, (64, 80, 96), 16),
    "gate_up": LayerSlot(AT, AT + 2 * 32 * 200, 200, 320, (160, 320), 32),
    "linear.in": LayerSlot(AT, AT + 4 * 16 * 48, 48, 128, (32, 48, 96, 128), 16),
    "down": LayerSlot(AT, AT + 16 * 80, 80, 70, (70,), 16),
}


def random_slots(layer: LayerSlot, dtype: torch.dtype) -> torch.Tensor:
    values = torch.randn(SLOTS, AT + layer.values + 16, generator=torch.Generator().manual_seed(1))
    values[:, layer.a_at : layer.b_at] /= layer.inputs**0.5
    values[:, layer.b_at : AT + layer.values] /= layer.rank**0.5
    return values.to(dtype)


def expected(x: torch.Tensor, out: torch.Tensor, slots: torch.Tensor, layer: LayerSlot, row: int, slot: int):
    """One row of the result, in float64 except for the rounding of the shrunk values."""
    begin, found = 0, out[row].double()
    a = slots[slot, layer.a_at : layer.b_at].view(len(layer.ends), layer.rank, -1).double()
    b = slots[slot, layer.b_at : layer.b_at + layer.outputs * layer.rank].view(layer.outputs, -1).double()
    for number, end in enumerate(layer.ends):
        shrunk = (a[number] @ x[row].double()).to(x.dtype).double()
        found[begin:end] += b[begin:end] @ shrunk
        begin = end
    return found


def run(x, out, slots, layer, row_slots, padding=0):
    """Add to a copy of ``out`` on the device; ``padding``: runs of no rows after the others."""
    rows, runs = adapted_runs(np.array(row_slots, np.int32), RUN_ROWS)
    padded = np.concatenate((runs, np.full((padding, 3), -1, np.int32)))
    record = RunRecord(torch.from_numpy(padded).to(DEVICE), torch.from_numpy(rows).to(DEVICE))
    found = out.clone().to(DEVICE)
    shrunk = torch.full((len(x), 4 * 64), torch.nan, dtype=slots.dtype, device=DEVICE)
    add_low_rank(x.to(DEVICE), slots.to(DEVICE), layer, record, shrunk, found)
    return found.cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_rows_with_different_adapters_share_a_batch(name, dtype):
    layer, row_slots = LAYERS[name], [1, -1, 0, 1, -1] + [1] * 17 + [0]
    generator = torch.Generator().manual_seed(2)
    x, out = (
        torch.randn(len(row_slots), width, generator=generator).to(dtype) for width in (layer.inputs, layer.outputs)
    )
    slots = random_slots(layer, dtype)
    found = run(x, out, slots, layer, row_slots, padding=2)
    for row, slot in enumerate(row_slots):
        if slot < 0:
            assert torch.equal(found[row], out[row])
        else:
            wanted = expected(x, out, slots, layer, row, slot)
            torch.testing.assert_close(found[row].double(), wanted, **rounded(dtype, 8))
    # A row has the same bits alone and among others.
    assert torch.equal(run(x[3:4], out[3:4], slots, layer, [1])[0], found[3])


def test_matrices_that_are_wider_than_rows():
    """Those of routers and gates are float32; results have that type, or the rows'."""
    layer = replace(LAYERS["down"], exact=True)
    x, slots = torch.randn(3, 80).bfloat16(), random_slots(layer, torch.float32)
    for out in (torch.zeros(3, 70), torch.zeros(3, 70).bfloat16()):
        found = run(x, out, slots, layer, [1, -1, 0])
        for row, slot in ((0, 1), (2, 0)):
            wanted = expected(x.float(), out.float(), slots, layer, row, slot)
            torch.testing.assert_close(found[row].double(), wanted, **rounded(out.dtype, 8))
        assert not found[1].any()


def test_wrong_calls_are_refused():
    layer = LAYERS["down"]
    x, out, slots = torch.zeros(2, 80), torch.zeros(2, 70), random_slots(layer, torch.float32)
    for wrong in (replace(layer, inputs=81), replace(layer, outputs=69, ends=(69,)), replace(layer, rank=24)):
        with pytest.raises(Internal):
            run(x, out, slots, wrong, [0, 1])
    assert [padded_rank(rank) for rank in (1, 16, 17, 64)] == [16, 16, 32, 64]


@pytest.mark.long
def test_mixed_adapter_steps_match_torch(tmp_path):
    """Slots may change between launches."""
    _, flags = make_model(tmp_path / "model", FAMILIES["llama-gqa-tied"])
    prepared, text = prepare(flags), tokens_of(20, 3)
    backend = gpu_backend(prepared)
    assert backend.adapters is None
    with pytest.raises(Internal, match="before bind_adapters"):
        bound_adapters(backend.adapters).build("", [], np.zeros(0, np.uint8))
    backend.bind_adapters(len(RANKS), 16)
    driver = GpuDriver(prepared, backend=backend)
    place_adapters(backend, prepared)
    found, wanted = (mixed_steps(each, text) for each in (driver, with_adapters(BackendDriver(prepared))))
    tolerance = 1e-3 if NATIVE else 1e-4
    torch.testing.assert_close(found.cpu(), wanted, atol=tolerance, rtol=tolerance)
    with pytest.raises(Internal, match="adapter slots"):
        driver.step((driver.sequences.add(adapter=3)[0], text[:13]))


def test_projections_that_fill_no_tile(tmp_path):
    """Each has separate ranks in one slice of all outputs."""
    folder = save_model(tmp_path / "model", intermediate_size=100)
    prepared, text = prepare(ModelFlags(model=str(folder), dtype="float32")), tokens_of(18, 2)
    wanted = mixed_steps(with_adapters(BackendDriver(prepared)), text)
    found = mixed_steps(with_adapters(GpuDriver(prepared, num_slots=16)), text)
    torch.testing.assert_close(found.cpu(), wanted, atol=1e-3, rtol=1e-3)


def test_a_matrix_for_each_head(tmp_path):
    """In a model of latents, whose rows have more values than those that a product by heads reads or writes."""
    prepared, text = prepare(make_model(tmp_path / "model", FAMILIES["youtu"])[1]), tokens_of(18, 2)
    wanted = mixed_steps(with_adapters(BackendDriver(prepared)), text)
    found = mixed_steps(with_adapters(GpuDriver(prepared, num_slots=16)), text)
    torch.testing.assert_close(found.cpu(), wanted, atol=1e-3, rtol=1e-3)
    assert (wanted[:, 1] - wanted[:, 0]).abs().mean() > 0.1 * wanted.std()


def test_steps_with_adapters_have_graphs_of_their_own():
    graphs = StepGraphs(lambda shape: torch.zeros(0), 4, 4, torch.device("cpu"), eager=False, adapters=True)
    assert {shape.adapters for shape in graphs.shapes()} == {True, False}
    assert len(set(graphs.shapes())) == len(list(graphs.shapes()))
    for adapters in (True, False):
        assert graphs.shape_of(3, 3, False, adapters).adapters == adapters
    without = StepGraphs(lambda shape: torch.zeros(0), 4, 4, torch.device("cpu"), eager=False)
    assert {shape.adapters for shape in without.shapes()} == {False}
