"""Weights in one piece of memory equal those of the loader, and their plan needs no weights."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from lab.testbed.tiny_model import save_model
from pillion.engine.backends.gpu.gpu_weights import (
    ALIGN_BYTES,
    WeightMemory,
    load_gpu_weights,
    plan_folder,
    weights_key,
)
from pillion.engine.checkpoints.weights import load_weights
from pillion.engine.models.config_parser import load_config
from pillion.engine.models.model_shard import ModelShard, whole_model
from tests.support.gpu import DEVICE
from tests.support.gpu_model import own_memory
from tests.support.torch_model import perturb_vectors

FAMILIES = {
    "llama": {},
    "llama_untied": {"tie_word_embeddings": False},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "olmo2": {"model_type": "olmo2"},
    "gemma2": {"model_type": "gemma2", "head_dim": 32},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
}


@pytest.fixture(params=FAMILIES)
def folder(request, tmp_path):
    made = save_model(tmp_path / "model", **FAMILIES[request.param])
    perturb_vectors(made)
    return made


def whole(config):
    return whole_model(config)


def load(folder, config, memory, dtype="float32"):
    return load_gpu_weights(folder, config, fingerprint="f" * 64, dtype=dtype, shard=whole(config), memory=memory)


def test_tensors_match_the_loader(folder):
    config = load_config(folder)
    weights = load(folder, config, own_memory(DEVICE))
    oracle = load_weights(folder, config, torch.float32)
    assert torch.equal(weights["embedding"].cpu(), oracle.embedding)
    assert torch.equal(weights["final_norm"].cpu(), oracle.final_norm.weight)
    for index, layer in enumerate(oracle.layers):
        for name in ("attention_norm", "mlp_norm", "attention_post_norm", "qk_norm", "q_norm"):
            norm, found = layer.get(name), weights.get(f"layers.{index}.{name}")
            assert (norm is None) == (found is None), name
            assert norm is None or torch.equal(found.cpu(), norm.weight), name
        assert torch.equal(weights[f"layers.{index}.qkv.weight"].cpu(), layer["qkv"].weight)
        if config.moe is None:
            assert torch.equal(weights[f"layers.{index}.down.weight"].cpu(), layer["down"].weight)
        else:
            down = torch.stack([expert.weight for expert in layer["experts.down"]])
            assert torch.equal(weights[f"layers.{index}.experts.down"].cpu(), down)
    assert (weights.head.data_ptr() == weights["embedding"].data_ptr()) == config.tie_word_embeddings


def test_a_second_worker_reads_no_files_and_gets_the_same_weights(folder):
    """The plan depends only on the config and on names, and a worker that finds the region filled copies nothing."""
    config, events = load_config(folder), []
    plan = plan_folder(folder, config, torch.bfloat16, whole(config))
    region = torch.full((plan.nbytes,), 0xAA, dtype=torch.uint8, device=DEVICE)

    def first(key, size):
        events.append((key, size))
        return WeightMemory(region, True, lambda: events.append("filled"))

    def second(key, size):
        events.append((key, size))
        return WeightMemory(region, False, lambda: events.append("filled twice"))

    one = load(folder, config, first, "bfloat16")
    before = region.clone()
    two = load(folder, config, second, "bfloat16")
    assert events == [(weights_key("f" * 64, "bfloat16", plan, whole(config)), plan.nbytes), "filled", events[0]]
    assert torch.equal(region, before)
    for name, place in plan.places.items():
        assert place.offset % ALIGN_BYTES == 0
        assert one[name].data_ptr() == two[name].data_ptr() == region.data_ptr() + place.offset
    ends = sorted((place.offset, place.offset + place.nbytes) for place in plan.places.values())
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ends))


def test_other_weights_have_another_key(folder):
    config = load_config(folder)
    shard = whole(config)
    plan = plan_folder(folder, config, torch.bfloat16, shard)
    other = plan_folder(folder, config, torch.float32, shard)
    keys = {weights_key("a" * 64, "bfloat16", plan, shard), weights_key("b" * 64, "bfloat16", plan, shard)}
    keys |= {weights_key("a" * 64, "bfloat16", other, shard)}
    # Ranks with shares of one size have different weights.
    keys |= {weights_key("a" * 64, "bfloat16", plan, ModelShard(range(1), rank, 2)) for rank in range(2)}
    assert len(keys) == 5


def test_dummy_weights_need_no_checkpoint(tmp_path):
    folder = save_model(tmp_path / "model")
    config = load_config(folder)
    (folder / "model.safetensors").unlink()
    weights = load_gpu_weights(
        folder,
        config,
        fingerprint="0" * 64,
        dtype="bfloat16",
        shard=whole(config),
        memory=own_memory(DEVICE),
        dummy=True,
    )
    values = weights["layers.1.qkv.weight"].float()
    assert 0.01 < float(values.std()) < 0.03
    assert torch.equal(weights["layers.0.attention_norm"].float().cpu(), torch.ones(config.hidden_size))
