"""Unsupported flags of models with states are rejected by name, before weights are read."""

from __future__ import annotations

import pathlib
from dataclasses import replace
from typing import Any

import pytest

from pillion.config import DecodeFlags, PrefillFlags, WorkerFlags
from pillion.engine.backends.cpu.cpu_loading import choose_kernels
from pillion.engine.backends.gpu import gpu_devices
from pillion.engine.backends.step_memory import steps_bytes
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.load_model import load_model
from pillion.engine.models.config_parser import load_config
from pillion.engine.states.states_check import check_states
from pillion.errors import ConfigError
from pillion.settings.speculative_config import SpeculativeConfig
from tests.support.cpu_model import needs_kernels
from tests.support.families import make_model
from tests.support.hybrids import HYBRIDS

pytestmark = pytest.mark.usefixtures("own_cache")

DECODE = DecodeFlags(dtype="float32", device="cpu")
HEAD = SpeculativeConfig(method="eagle3", model="head", num_speculative_tokens=3)


@pytest.fixture(scope="module")
def folder(own_cache: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("model"), HYBRIDS["lfm2"])[0])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            replace(DECODE, tensor_parallel_size=2, kv_cache_dtype="int8"),
            "--tensor-parallel-size 2 with --kv-cache-dtype int8",
        ),
        (replace(DECODE, tensor_parallel_size=2, enable_lora=True), "--tensor-parallel-size 2 with --enable-lora"),
        (replace(DECODE, tensor_parallel_size=2, speculative_config=HEAD), "--tensor-parallel-size 2 .* method eagle3"),
    ],
)
def test_refusals(folder: str, flags: WorkerFlags, words: str) -> None:
    with pytest.raises(ConfigError, match=f"lfm2: {words}.* not supported yet"):
        load_model(replace(flags, model=folder), 1)


def test_stages_with_a_gpu_each_are_refused(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages that share a GPU are supported."""
    config, stages = load_config(pathlib.Path(folder)), PrefillFlags(pipeline_parallel_size=2)
    changes: list[dict[str, Any]] = [{"kv_cache_dtype": "fp8"}, {"tensor_parallel_size": 2}, {"enable_lora": True}]
    for flags in (DECODE, *(replace(DECODE, **change) for change in changes), stages):
        check_states(flags, "cuda", config)
    monkeypatch.setattr(gpu_devices, "device_count", lambda: 2)
    with pytest.raises(
        ConfigError, match="lfm2: --pipeline-parallel-size 2 with a GPU for each stage is not supported yet"
    ):
        check_states(stages, "cuda", config)


@pytest.mark.parametrize("kernels", ["torch", pytest.param("auto", marks=needs_kernels)])
def test_states_are_part_of_the_layout(folder: str, kernels: str) -> None:
    loaded = load_model(replace(DECODE, model=folder, cpu_kernels=kernels), 1)
    # Two states of two convolutions of 64 channels and three taps.
    layout = loaded.backend.layout
    assert layout.state_bytes == 2 * 2 * 64 * 4
    assert layout.working_pages == 3
    assert (loaded.operators == "torch") == (kernels == "torch")
    # Different layouts of states share no blocks (I2).
    assert layout.version == ("rows-1" if kernels == "torch" else "lanes16-1/pieces-1")
    loaded.backend.warm_up(40)
    loaded.backend.close()


@needs_kernels
def test_steps_of_torch_alone_copy_states(folder: str) -> None:
    flags = replace(DECODE, model=folder, max_num_seqs=7)
    on_kernels, on_torch = (
        steps_bytes(replace(flags, cpu_kernels=kernels), prepare(flags)) for kernels in ("auto", "torch")
    )
    assert on_torch - on_kernels == 7 * 2 * 2 * 64 * 4


@needs_kernels
def test_pieces_that_fit_into_no_block_are_left_to_torch(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = replace(DECODE, model=folder)
    assert choose_kernels(flags, prepare(flags))[0] is not None
    monkeypatch.setattr("pillion.engine.backends.backend.state_layout", lambda *args: None)
    assert choose_kernels(flags, prepare(flags)) == (None, "pieces of states do not fit into blocks of 16 tokens")
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype int8 .* pieces of states do not fit"):
        choose_kernels(replace(flags, kv_cache_dtype="int8"), prepare(flags))
