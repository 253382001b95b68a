"""Models with quantized matrices: the CPU kernels against torch with the dequantized ones."""

from __future__ import annotations

import itertools
import zlib

import pytest
import torch

from lab.testbed.tiny_model import save_model
from pillion.config import ModelFlags
from pillion.engine.backends.cpu.cpu_weights import CpuWeights, load_cpu_weights
from pillion.engine.checkpoints.checkpoint import Checkpoint
from pillion.engine.checkpoints.model_cache import ModelCache
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.models.config_parser import load_config
from pillion.errors import ConfigError
from pillion.kernels.cpu.quantized.input_rows import SumInputs
from pillion.kernels.torch.quantized_matrix import CODINGS, QuantizedMatrix
from tests.support.covering import covering_rows
from tests.support.cpu_model import CpuDriver, cpu_backend, needs_kernels
from tests.support.kernel_runner import rounding_tiles
from tests.support.torch_model import BackendDriver

pytestmark = needs_kernels

MODELS = {
    "llama": {"hidden_size": 64, "intermediate_size": 112},
    "qwen3_moe": {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
}
# The coding, the group, offsets or not, and reordered inputs or not.
KINDS = (
    ("uint4", 32, True, False),
    ("int4", 16, False, True),
    ("nf4", 64, False, False),
    ("int8", 10_000, False, False),
    ("fp8_e4m3", 32, False, False),
    ("uint4", 16, True, True),
)


def quantized(weight: torch.Tensor, coding: str, group: int, shifted: bool, ordered: bool) -> QuantizedMatrix:
    """Return a matrix [N, K] whose groups each span the values of ``coding``."""
    columns = weight.shape[1]
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(3)) if ordered else None
    weight = weight.float() if order is None else weight.float()[:, order]
    values = CODINGS[coding].nan_to_num()
    scales, offsets, codes = [], [], []
    for part in weight.split(group, 1):
        offset = part.amin(1, keepdim=True) if shifted else torch.zeros(len(part), 1)
        scale = ((part - offset).abs().amax(1, keepdim=True) / values.max()).clamp(min=1e-6)
        codes.append((((part - offset) / scale)[:, :, None] - values).abs().argmin(-1).to(torch.uint8))
        scales.append(scale)
        offsets.append(offset)
    return QuantizedMatrix(
        coding, torch.cat(codes, 1), torch.cat(scales, 1), group, torch.cat(offsets, 1) if shifted else None, order
    )


@pytest.fixture
def quantized_checkpoint(monkeypatch, tmp_path):
    """Let checkpoints return quantized matrices, of several kinds in one model; some stay plain."""
    monkeypatch.setenv("PILLION_CACHE", str(tmp_path / "cache"))
    take = Checkpoint.load_matrix

    def taken(self: Checkpoint, key: str, dtype: torch.dtype):
        number = zlib.crc32(key.split("experts.")[0].encode()) % (len(KINDS) + 1)
        if "norm" in key or key.endswith("bias") or key == "embedding" or "router" in key or number == len(KINDS):
            return take(self, key, dtype)
        return quantized(take(self, key, torch.float32), *KINDS[number])

    monkeypatch.setattr(Checkpoint, "load_matrix", taken)


SHORT = covering_rows((tuple(MODELS), ("float32", "bfloat16"), ("auto", "avx2")))


@pytest.mark.parametrize(
    ("model", "dtype", "kernels"),
    [
        row if row in SHORT else pytest.param(*row, marks=pytest.mark.long)
        for row in itertools.product(MODELS, ("float32", "bfloat16"), ("auto", "avx2"))
    ],
)
def test_logits_match_the_dequantized_model(quantized_checkpoint, tmp_path, model, dtype, kernels):
    folder = str(save_model(tmp_path / model, num_hidden_layers=3, **MODELS[model]))
    prepared, exact = (prepare(ModelFlags(model=folder, dtype=kind)) for kind in (dtype, "float32"))
    try:
        backend = cpu_backend(prepared, threads=2, kernels=kernels)
    except ConfigError as error:
        pytest.skip(error.message)
    text = torch.randint(0, 258, (50,), generator=torch.Generator().manual_seed(1)).tolist()
    oracle, widened, driver = BackendDriver(exact), BackendDriver(prepared), CpuDriver(prepared, backend=backend)
    wanted = oracle.run_all(oracle.sequences.add()[0], text, [])
    found = driver.run_all(driver.sequences.add()[0], text, [1] * 20)
    if dtype == "float32":
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    else:
        plain = widened.run_all(widened.sequences.add()[0], text, [])
        assert (found - wanted).abs().mean() <= (plain - wanted).abs().mean()
    again = driver.run_all(driver.sequences.add()[0], text, [])
    assert torch.equal(found, again)
    weights = CpuWeights(ModelCache().packed_weights(prepared.fingerprint, "cpu"))
    kinds = {weights.numbers[name] for name in weights.numbers if name.endswith(".kind")}
    assert len(kinds) >= 3
    driver.backend.check_integrity()
    driver.backend.close()


@pytest.mark.parametrize("model", MODELS)
def test_rounded_weights_are_as_close_as_dequantized_ones(quantized_checkpoint, tmp_path, model):
    """They include offsets, so no sums of inputs are computed."""
    folder = str(save_model(tmp_path / model, num_hidden_layers=3, **MODELS[model]))
    prepared, exact = (prepare(ModelFlags(model=folder, dtype=kind)) for kind in ("bfloat16", "float32"))
    backend = cpu_backend(prepared, threads=2, kernels=rounding_tiles())
    texts = torch.randint(0, 258, (4, 50), generator=torch.Generator().manual_seed(1)).tolist()
    oracle, widened, driver = BackendDriver(exact), BackendDriver(prepared), CpuDriver(prepared, backend=backend)
    wanted, plain, found = (
        torch.stack([one.run_all(one.sequences.add()[0], text, []) for text in texts])
        for one in (oracle, widened, driver)
    )
    assert (found - wanted).abs().mean() < 1.5 * (plain - wanted).abs().mean()
    assert torch.equal(driver.run_all(driver.sequences.add()[0], texts[0], [1] * 20), found[0])
    assert not any(isinstance(one.spec, SumInputs) for one in backend.model.plan.operations)
    backend.close()


def test_an_out_of_range_input_order_is_refused(quantized_checkpoint, tmp_path):
    """Kernels trust it."""
    prepared = prepare(ModelFlags(model=str(save_model(tmp_path / "m", num_hidden_layers=3)), dtype="bfloat16"))
    weights = load_cpu_weights(prepared, load_config(prepared.folder), print, ModelCache())
    name = next(name for name in weights.tensors if name.endswith(".order")).removesuffix(".order")
    assert weights.linear(name).order is not None
    for wrong in (-1, weights.linear(name).depth):
        order = weights.tensors[f"{name}.order"].clone()
        order[3] = wrong
        weights.tensors[f"{name}.order"] = order
        with pytest.raises(ConfigError, match="are inconsistent"):
            weights.linear(name)
