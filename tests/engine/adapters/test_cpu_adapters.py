"""Adapters on the CPU kernels against torch: mixed steps for each kind of layer, and bits independent of other rows."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from lab.testbed.random_adapter import random_adapter
from lab.testbed.tiny_model import save_model
from pillion.config import ModelFlags
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.models.config_parser import load_config
from pillion.errors import ConfigError, Internal
from tests.support.cpu_model import CpuDriver, cpu_backend, needs_kernels
from tests.support.families import FAMILIES, make_model, tokens_of
from tests.support.mixed_adapters import RANKS, mixed_steps, with_adapters
from tests.support.quantized import PRODUCERS, quantize_folder
from tests.support.torch_model import BackendDriver, perturb_vectors

pytestmark = [needs_kernels, pytest.mark.usefixtures("own_cache")]


@pytest.fixture(scope="module")
def llama(own_cache, tmp_path_factory):
    folder = save_model(tmp_path_factory.mktemp("model") / "llama", head_dim=32)
    perturb_vectors(folder)
    return prepare(ModelFlags(model=str(folder), dtype="bfloat16"))


def model_of(kind: str, folder) -> ModelFlags:
    if kind.startswith("gptq"):
        plain, _ = make_model(folder / "plain", FAMILIES["qwen2-moe" if "experts" in kind else "llama-gqa-tied"])
        producer = PRODUCERS[kind.removesuffix("-experts")](16)
        return ModelFlags(model=str(quantize_folder(plain, folder / "few", producer)[0]), dtype="float32")
    return make_model(folder / "model", FAMILIES[kind])[1]


@pytest.mark.parametrize(
    "kind",
    [
        "llama-odd-hidden",
        "gemma2",
        "qwen3-moe-some-dense",
        "gpt-oss",
        "qwen2-moe",
        "deepseek-v3",
        "gptq-act-order",
        "gptq-act-order-experts",
    ],
)
def test_mixed_adapter_steps_match_torch(kind, tmp_path):
    """Widths without full tiles, norms after products, experts beside dense layers and beside a gated MLP, per-head
    matrices, reordered inputs, also per expert."""
    prepared, text = prepare(model_of(kind, tmp_path)), tokens_of(20, 3)
    backend = cpu_backend(prepared, threads=2)
    found = mixed_steps(with_adapters(CpuDriver(prepared, backend=backend), experts=True), text)
    wanted = mixed_steps(with_adapters(BackendDriver(prepared), experts=True), text)
    torch.testing.assert_close(found, wanted, atol=2e-4 * float(wanted.std()), rtol=2e-4)
    assert (wanted[:, 1] - wanted[:, 0]).abs().mean() > 0.1 * wanted.std()


@pytest.mark.parametrize("kernels", ["auto", "avx512", "avx2"])
def test_bfloat16_is_close_on_each_instruction_set(llama, kernels):
    text = tokens_of(20, 3)
    try:
        backend = cpu_backend(llama, threads=2, kernels=kernels)
    except ConfigError as error:
        pytest.skip(error.message)
    found = mixed_steps(with_adapters(CpuDriver(llama, backend=backend)), text)
    wanted = mixed_steps(with_adapters(BackendDriver(llama)), text)
    assert (found - wanted).abs().mean() < 0.03 * wanted.std()


@pytest.mark.parametrize("kind", ["llama", "youtu"])
def test_a_row_has_the_same_bits_in_every_batch_chunk_and_thread_pool(kind, llama, tmp_path):
    """I6: for streams with and without adapters in one batch, also with per-head matrices."""
    text = tokens_of(150, 1)
    if kind != "llama":
        flags = make_model(tmp_path / "model", {**FAMILIES[kind], "max_position_embeddings": 512})[1]
        llama = prepare(replace(flags, dtype="bfloat16"))
    plain = CpuDriver(llama, num_slots=200)
    base = plain.run_all(plain.sequences.add()[0], text, [])
    alone = with_adapters(CpuDriver(llama, num_slots=200))
    assert torch.equal(alone.run_all(alone.sequences.add()[0], text, []), base)
    wanted = {-1: base, 1: alone.run_all(alone.sequences.add(adapter=1)[0], text, [])}
    assert not torch.equal(wanted[-1], wanted[1])
    for threads, checked, chunks in ((2, False, [1] * 10 + [90]), (3, True, [120, 2])):
        backend = cpu_backend(llama, threads=threads, checked=checked)
        driver = with_adapters(CpuDriver(llama, num_slots=200, backend=backend))
        others = [driver.sequences.add(adapter=slot)[0] for slot in (0, 1, 2, -1)]
        for slot, logits in wanted.items():
            (mine,) = driver.sequences.add(adapter=slot)
            driver.check_among_others(mine, text, chunks, logits, others)
        driver.backend.check_integrity()
        driver.backend.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_head_has_all_tiles_of_ranks(dtype, tmp_path):
    """Beside an adapter of one tile."""
    prepared = prepare(replace(make_model(tmp_path / "model", FAMILIES["youtu"])[1], dtype=dtype))
    config, text, found = load_config(prepared.folder), tokens_of(20, 3), []
    for driver in (CpuDriver(prepared, backend=cpu_backend(prepared, threads=2)), BackendDriver(prepared)):
        driver.backend.bind_adapters(3, 48)
        for slot, rank in enumerate((5, 40, 16)):
            weights = random_adapter(config, slot, (rank,), getattr(torch, dtype))
            driver.backend.adapters.place(slot, driver.backend.adapters.pack(weights))
        found.append(mixed_steps(driver, text))
    mean = (found[0] - found[1]).abs().mean() / found[1].std()
    assert mean < (1e-5 if dtype == "float32" else 0.03)


def test_a_slot_is_reused_by_another_adapter(llama):
    driver, text = with_adapters(CpuDriver(llama, num_slots=100)), tokens_of(20, 3)
    config = load_config(llama.folder)

    def logits(slot: int) -> torch.Tensor:
        return driver.run_all(driver.sequences.add(adapter=slot)[0], text, [])

    one, two = (logits(slot) for slot in (0, 1))
    packed = driver.backend.adapters.pack(random_adapter(config, 1, RANKS[1], torch.bfloat16))
    assert packed.nbytes > 0
    driver.backend.adapters.place(0, packed)
    assert torch.equal(logits(0), two)
    assert not torch.equal(one, two)


def test_steps_with_slots_that_do_not_exist_are_refused(llama):
    bare, driver = CpuDriver(llama), with_adapters(CpuDriver(llama))
    for drive, slot, words in (
        (bare, 0, "before bind_adapters"),
        (driver, 3, "adapter slots"),
        (driver, -2, "slots"),
    ):
        batch = drive.sequences.step([(drive.sequences.add()[0], [1, 2])])
        object.__setattr__(batch, "adapters", np.array([slot], np.int32))
        with pytest.raises(Internal, match=words):
            drive.backend.forward(batch)


def test_the_process_that_packs_imports_neither_torch_nor_the_compiler():
    """It runs beside each worker and must start quickly."""
    program = "import sys, pillion.engine.adapters.adapter_process_main, pillion.engine.adapters.cpu_adapter_form;"
    program += "print({'torch', 'llvmlite', 'transformers', 'grpc'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
