"""Ranks of hybrid models on GPUs, each a process, against transformers: over a pool in one piece, where they and one
process continue from each other's states, and over a shard per rank."""

from __future__ import annotations

from tests.support.gpu_model import FakeDividedPool, gpu_backend  # isort: skip  (before the kernels)

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pillion.engine.backends.backend import KVLayout
from pillion.engine.checkpoints.prepare import prepare
from pillion.errors import ConfigError
from pillion.kvstore.memory.shards import Shards
from tests.gpu.test_gpu_hybrids import GpuStateDriver, close
from tests.gpu.test_shards import gathered, scattered
from tests.support.families import make_model, tokens_of
from tests.support.hybrids import ATTENTION, HYBRIDS, LINEAR

pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("own_cache"),
    # Unused exponentials and logarithms may overflow, as on a GPU.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
# Pieces of states fit into a half of such blocks.
BLOCK_SIZE, SLOTS = 32, 100
# Heads whose channels do not fill pieces, beside one KV head shared by both ranks; a group that both norm together;
# heads sharded unevenly, beside latents; unevenly sharded channels without heads; channels with separate states.
SIZES = {"layer_types": [LINEAR, ATTENTION], "num_hidden_layers": 2}
KIMI = {"full_attn_layers": [2, 3], "kda_layers": [1], "head_dim": 32, "num_heads": 3, "short_conv_kernel_size": 4}
MODELS = {
    "qwen3-5": HYBRIDS["qwen3-5"] | SIZES | {"num_key_value_heads": 1, "head_dim": 32},
    "one-group": HYBRIDS["granite-hybrid-dense"] | {"mamba_n_groups": 1},
    "kimi-linear": HYBRIDS["kimi-linear"] | {"linear_attn_config": KIMI},
    "lfm2": HYBRIDS["lfm2"] | {"hidden_size": 192},
    "jamba": HYBRIDS["jamba-dense"],
}
TEXT, CUTS = tokens_of(38, 2), (19, 33, 34, 36, 37, 38)


def made(folder, name):
    """A prepared model, and transformers' logits of the text."""
    folder, flags = make_model(folder, MODELS[name])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return prepare(flags), model(torch.tensor([TEXT])).logits[0].float()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name == "jamba" else ()) for name in MODELS]
)
def test_workers_of_all_sizes_continue_from_each_others_states(team, name, tmp_path):
    prepared, wanted = made(tmp_path / "model", name)
    both, alone = team.backend(prepared, block_size=BLOCK_SIZE), gpu_backend(prepared, BLOCK_SIZE)
    assert both.layout.version == alone.layout.version
    driver = GpuStateDriver(prepared, BLOCK_SIZE, num_slots=SLOTS, backend=both)
    alone.bind_pool(driver.memory, SLOTS)
    (number,), begin = driver.sequences.add(), 0
    # Part of a chunk is written by one and read by the other, in both directions.
    for backend, end in zip((both, both, alone, alone, both, both), CUTS, strict=True):
        driver.backend = backend
        close(driver.step((number, TEXT[begin:end]), sample=range(end - begin)), wanted[begin:end])
        begin = end
    both.close()


@pytest.mark.parametrize("name", MODELS)
def test_ranks_with_a_shard_each(team, name, tmp_path):
    """They continue from blocks that were joined in another node's memory, and divided again."""
    prepared, wanted = made(tmp_path / "model", name)
    both = team.backend(prepared, block_size=BLOCK_SIZE, divided=True)
    driver = GpuStateDriver(prepared, BLOCK_SIZE, num_slots=SLOTS, backend=both, shards=2)
    (number,), begin = driver.sequences.add(), 0
    for end in CUTS:
        close(driver.step((number, TEXT[begin:end]), sample=range(end - begin)), wanted[begin:end])
        begin = end
        if end == CUTS[2]:
            moved(driver.memory, both.layout)
    both.close()


def moved(pool: FakeDividedPool, layout: KVLayout) -> None:
    """Gather all blocks of a pool, empty it, and scatter them into it."""
    shards = Shards.divided(layout.block_bytes, *layout.rows_and_pieces, len(pool.shares))
    parts = [shard.tensor.cpu().numpy().reshape(SLOTS, -1) for shard in pool.shards]
    for slot in range(SLOTS):
        block = gathered(shards, [part[slot].copy() for part in parts])
        for shard, mine in zip(pool.shards, scattered(shards, block), strict=True):
            shard.tensor.view(SLOTS, -1)[slot].copy_(torch.from_numpy(np.full_like(mine, 0xFF)))
            shard.tensor.view(SLOTS, -1)[slot].copy_(torch.from_numpy(mine))


def test_a_pool_of_another_division_is_refused(tmp_path):
    _, flags = make_model(tmp_path / "model", MODELS["qwen3-5"])
    prepared = prepare(flags)
    backend = gpu_backend(prepared, BLOCK_SIZE)
    with pytest.raises(ConfigError, match="over 1 shards of a pool, but the pool of its KV node has 2"):
        backend.bind_pool(FakeDividedPool(backend.layout, SLOTS, 2), SLOTS)
