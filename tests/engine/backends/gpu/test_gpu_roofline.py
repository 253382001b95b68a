"""Expected costs of steps by a GPU's rates, and the resulting budget."""

from __future__ import annotations

import json
import pathlib
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from pillion.config import DecodeFlags, PrefillFlags
from pillion.engine.backends.backend import kv_layout
from pillion.engine.backends.devices import with_budgets
from pillion.engine.backends.gpu import gpu_devices, gpu_roofline
from pillion.engine.backends.gpu.gpu_loading import gpu_layout
from pillion.engine.backends.gpu.gpu_roofline import (
    ARITHMETIC_SHARE,
    MEMORY_SHARE,
    DeviceRates,
    device_rates,
    expected_cost,
    expected_on_gpu,
    suitable_budget,
)
from pillion.engine.backends.step_memory import step_bytes
from pillion.engine.checkpoints.prepare import PreparedModel, prepare
from pillion.engine.models.config_parser import load_config
from pillion.engine.models.layer_operations import MAX_MIXED_ROWS
from pillion.engine.models.model_work import model_weights
from pillion.engine.scheduling.step_cost import AUTO_TARGET_STEPS, TokenBudget, suitable_tokens
from tests.engine.scheduling.test_step_cost import decodes
from tests.support.families import make_model
from tests.support.hybrids import HYBRIDS

GB = 10**9
H100 = DeviceRates(bytes_per_s=3.35e12, operations_per_s=989e12, memory_bytes=80 * GB)
A10 = DeviceRates(bytes_per_s=600e9, operations_per_s=125e12, memory_bytes=24 * GB)
# Shapes of Hugging Face configs, and their parameters without embeddings.
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "num_key_value_heads": 8,
}
SHAPES: dict[str, dict[str, Any]] = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
MIXTRAL = {
    **LLAMA,
    **SHAPES["8b"],
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}


def model_of(folder: pathlib.Path, config: dict[str, Any]) -> PreparedModel:
    (folder / "config.json").write_text(json.dumps(config))
    return PreparedModel(
        folder=folder,
        name="m",
        fingerprint="",
        dtype="bfloat16",
        max_model_len=8192,
        vocab_size=config["vocab_size"],
        eos_token_ids=(),
        bos_token_id=None,
    )


def test_the_weights_of_known_models_are_counted(tmp_path: pathlib.Path) -> None:
    """Llama 3 8B has 8.03 billion parameters, 1.05 of them in two vocabulary tables; Mixtral 8x7B has 46.7, 12.9 of
    them active per token."""
    assert model_weights(load_config(model_of(tmp_path, LLAMA | SHAPES["8b"]).folder))[0] == pytest.approx(
        6.98e9, rel=0.01
    )
    found, met = model_weights(load_config(model_of(tmp_path, MIXTRAL).folder))
    assert (found, met) == (pytest.approx(46.4e9, rel=0.01), pytest.approx(12.6e9, rel=0.01))


@pytest.mark.parametrize(
    ("rates", "shape", "target", "tokens"),
    [
        (H100, "1b", "auto", 8192),
        (H100, "8b", "auto", 8192),
        (H100, "8b", 25.0, 8192),
        # A target of seconds allows more, up to the bound; with 0, streams get only the budget.
        (H100, "70b", "auto", 512),
        (H100, "70b", 1500.0, 4096),
        (H100, "8b", 0.0, 512),
        (A10, "1b", "auto", 4096),
        (A10, "8b", "auto", 1024),
    ],
)
def test_a_budget_suits_device_model_and_target(
    tmp_path: pathlib.Path, rates: DeviceRates, shape: str, target: float | str, tokens: int
) -> None:
    """Another test covers the memory left by the weights of 70 billion parameters."""
    model, rates = model_of(tmp_path, LLAMA | SHAPES[shape]), replace(rates, memory_bytes=1000 * GB)
    cost = expected_cost(rates, model, 131_072)
    assert suitable_budget(cost, rates, DecodeFlags(target_itl_ms=target), model) == tokens
    assert suitable_tokens(cost, target) == tokens
    if target == "auto":
        assert suitable_budget(cost, rates, PrefillFlags(), model) == tokens


def test_buffers_take_an_eighth_of_what_weights_leave_at_most(tmp_path: pathlib.Path) -> None:
    model = model_of(tmp_path, LLAMA | SHAPES["8b"])
    for gigabytes, tokens in ((80, 8192), (24, 4096), (20, 2048), (16, 512)):
        rates = replace(H100, memory_bytes=gigabytes * GB)
        assert suitable_budget(expected_cost(rates, model, 131_072), rates, DecodeFlags(), model) == tokens


def test_ranks_share_the_work(tmp_path: pathlib.Path) -> None:
    model = model_of(tmp_path, LLAMA | SHAPES["70b"])
    one, four = (expected_cost(H100, model, 327_680, devices) for devices in (1, 4))
    assert four.token_s == pytest.approx(one.token_s / 4)
    assert suitable_budget(four, H100, DecodeFlags(), model, 4) == 2048


@dataclass
class DriverAttributes:
    """Fake driver of one device with these attributes."""

    values: dict[int, int] = field(default_factory=dict)

    def read(self, kind: Any, name: str, *arguments: int) -> int:
        return 0 if name == "cuDeviceGet" else self.values[arguments[0]]

    def device(self, index: int) -> Any:
        return SimpleNamespace(memory_info=lambda: (70 * GB, 80 * GB), close=lambda: None)


@pytest.mark.parametrize(
    ("capability", "processors", "clock_mhz", "memory_mhz", "bits", "terabytes", "teraflops"),
    [
        # NVIDIA's data sheets: H100 SXM, A100 80 GB, A10, L40S, and one newer than the table.
        ((9, 0), 132, 1830, 2619, 5120, 3.35, 989),
        ((8, 0), 108, 1410, 1593, 5120, 2.04, 312),
        ((8, 6), 72, 1695, 6251, 384, 0.600, 125),
        ((8, 9), 142, 2520, 9001, 384, 0.864, 366),
        ((13, 0), 100, 2000, 8000, 512, 1.024, 205),
    ],
)
def test_roofline_rates_match_data_sheets(
    capability: tuple[int, int],
    processors: int,
    clock_mhz: int,
    memory_mhz: int,
    bits: int,
    terabytes: float,
    teraflops: float,
) -> None:
    values = {75: capability[0], 76: capability[1], 16: processors}
    values |= {13: clock_mhz * 1000, 36: memory_mhz * 1000, 37: bits}
    found = device_rates(DriverAttributes(values))  # type: ignore[arg-type]
    assert found.bytes_per_s == pytest.approx(terabytes * 1e12, rel=0.01)
    assert found.operations_per_s == pytest.approx(teraflops * 1e12, rel=0.01)
    assert found.memory_bytes == 80 * GB


@pytest.fixture
def gpu(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> PreparedModel:
    """A machine with an H100, and Llama 3 8B."""
    model = model_of(tmp_path, LLAMA | SHAPES["8b"])
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(gpu_devices, "device_count", lambda: 1)
    monkeypatch.setattr(gpu_roofline, "CudaDriver", lambda: None)
    monkeypatch.setattr(gpu_roofline, "device_rates", lambda driver: H100)
    monkeypatch.setattr(gpu_roofline, "prepare", lambda flags: model)
    return model


def test_a_worker_on_a_gpu_settles_its_budget(gpu: PreparedModel) -> None:
    assert with_budgets(DecodeFlags()).max_num_batched_tokens == 8192
    assert with_budgets(PrefillFlags()).max_num_batched_prefill_tokens == 8192
    assert with_budgets(DecodeFlags(max_num_batched_tokens=300)).max_num_batched_tokens == 300
    assert with_budgets(DecodeFlags(target_itl_ms=0.0, max_num_seqs=600)).max_num_batched_tokens == 600
    assert with_budgets(DecodeFlags(device="cpu", cpu_kernels="torch")).max_num_batched_tokens == 256


def test_a_sequences_state_is_read_and_written_as_the_kernels_keep_it(
    gpu: PreparedModel, tmp_path: pathlib.Path, own_cache: pathlib.Path
) -> None:
    """On a GPU a state has its matrices and the rows of an unfinished chunk."""
    prepared = prepare(make_model(tmp_path / "hybrid", HYBRIDS["qwen3-5"])[1])
    config, states = load_config(prepared.folder), gpu_layout(prepared, 16).state_bytes
    assert states > kv_layout(prepared, 16).state_bytes
    cost, _ = expected_on_gpu(DecodeFlags(), prepared, 1)
    logits_s = 2 * config.vocab_size * config.hidden_size / (H100.operations_per_s * ARITHMETIC_SHARE)
    assert cost.sequence_s == pytest.approx(logits_s + 2 * states / (H100.bytes_per_s * MEMORY_SHARE))


def test_buffers_of_a_mixture_do_not_grow_with_all_tokens(tmp_path: pathlib.Path) -> None:
    """Experts compute 8,192 rows at a time, so more tokens need no more memory for experts."""
    config = load_config(model_of(tmp_path, MIXTRAL).folder)
    few, many, more = (
        step_bytes(config, "bfloat16", tokens, 0, mixed_rows=MAX_MIXED_ROWS) for tokens in (8192, 16_384, 24_576)
    )
    assert more - many == many - few < few
    assert step_bytes(config, "bfloat16", 8192, 0) == few


def test_the_interpreter_has_the_budgets_of_a_cpu(gpu: PreparedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_devices, "interpreted", lambda: True)
    assert with_budgets(DecodeFlags()).max_num_batched_tokens == 256
    assert with_budgets(PrefillFlags()).max_num_batched_prefill_tokens == 512


def test_the_first_prompt_step_uses_the_expected_cost(tmp_path: pathlib.Path) -> None:
    """An H100 needs 30 ms for an eighth of the whole budget, more than 2.5 plain steps."""
    cost = expected_cost(H100, model_of(tmp_path, LLAMA | SHAPES["8b"]), 131_072)
    blind = TokenBudget(8192, target_steps=AUTO_TARGET_STEPS)
    knowing = TokenBudget(8192, target_steps=AUTO_TARGET_STEPS, expected=cost)
    beside = decodes(16, 1000)
    assert blind.room(beside, 0).at(0) == 48
    assert knowing.room(beside, 0).at(0) == pytest.approx(1.5 * cost.plain_s(16, 16_000) / cost.token_s, rel=0.1)
    generous = TokenBudget(8192, target_s=10.0, expected=cost)
    assert generous.room(beside, 0).at(0) == 1024 - 16
    assert generous.room([], 0).at(0) == 8192
