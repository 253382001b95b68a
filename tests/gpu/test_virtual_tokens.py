"""Adapters of virtual tokens, biases and DoRA on the GPU backend beside the torch backend."""

from __future__ import annotations

from tests.support.gpu_model import GpuDriver, gpu_backend  # isort: skip  (before the kernels)

import pytest
import torch

from tests.engine.adapters.test_peft import driver_with
from tests.engine.adapters.test_virtual_tokens import TEXT, placeholders
from tests.gpu.test_backend import close
from tests.support.adapters import make_adapter, make_virtual, own_vectors
from tests.support.families import FAMILIES, make_model
from tests.support.torch_model import BackendDriver

pytestmark = pytest.mark.usefixtures("own_cache")

# The number of virtual tokens in each slot.
TOKENS = (17, 9, 0, 0)


def adapters_of(folder, into):
    return [
        make_virtual(folder, into / "prefix", "prefix", TOKENS[0]),
        make_virtual(folder, into / "prompt", "prompt", TOKENS[1]),
        own_vectors(make_adapter(folder, into / "dora", r=4, use_dora=True)),
        own_vectors(make_adapter(folder, into / "bias", r=4, lora_bias=True, target_modules=["v_proj", "down_proj"])),
    ]


def mixed(driver) -> torch.Tensor:
    """The last rows' logits in steps that begin and end within virtual tokens, of adapters and of the model alone."""
    slots = (1, -1, 0, 2, 3)
    numbers = [driver.sequences.add(adapter=slot)[0] for slot in slots]
    texts = [placeholders(TOKENS[slot] if slot >= 0 else 0) + TEXT[:9] for slot in slots]
    found, starts = [], [0] * len(slots)
    for ends in ([3] * 5, [6] * 5, [8] * 5, [len(text) for text in texts]):
        parts = [(n, t[a:b]) for n, t, a, b in zip(numbers, texts, starts, ends, strict=True)]
        found.append(driver.step(*parts).cpu())
        starts = ends
    return found[-1]


@pytest.mark.long
@pytest.mark.parametrize(("family", "shards"), [("llama-gqa-tied", 0), ("qwen3-qk-norm", 2)])
def test_a_step_mixes_them(family, shards, tmp_path):
    """A pool in one piece, whose part has all heads; and a divided one, each part of which has rows of its own."""
    folder, flags = make_model(tmp_path / "model", FAMILIES[family])
    adapters = adapters_of(folder, tmp_path)

    def make(prepared, block_size, num_slots):
        return GpuDriver(prepared, block_size, num_slots, backend=gpu_backend(prepared, block_size), shards=shards)

    found = mixed(driver_with(flags, *adapters, num_slots=24, make=make))
    close(found, mixed(driver_with(flags, *adapters, num_slots=24, make=BackendDriver)))
