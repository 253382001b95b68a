"""Linear layers named by --lora-target-modules, and backends' room for their adapters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lab.testbed.random_adapter import random_adapter
from pillion.engine.adapters.adapter_rows import adapter_shapes
from pillion.engine.adapters.adapter_targets import are_targets, listed_targets, targeted_outputs
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.models.config_parser import load_config
from pillion.errors import ConfigError
from tests.support.cpu_model import cpu_backend
from tests.support.families import FAMILIES, make_model
from tests.support.torch_model import BackendDriver

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    names = "llama-gqa-tied", "qwen2-moe", "mixtral"
    return {name: load_config(make_model(root / name, FAMILIES[name])[0]) for name in names}


def kinds(config, *targets):
    return {name.split(".", 2)[2] for name in adapter_shapes(config, targets)}


def test_the_target_flag_is_parsed():
    assert listed_targets(["q_proj, v_proj", "o_proj", ""]) == ("q_proj", "v_proj", "o_proj")
    assert listed_targets([]) == listed_targets(["q_proj", "all"]) == ()


def test_names_of_linear_layers(configs):
    llama, qwen, mixtral = configs.values()
    assert kinds(llama, "q_proj", "down_proj") == {"qkv", "down"}
    assert kinds(llama) == {"qkv", "o", "gate_up", "down"}
    assert kinds(qwen, "q_proj", "k_proj", "v_proj", "o_proj") == {"qkv", "o"}
    assert kinds(qwen, "shared_expert.down_proj", "shared_expert_gate") == {"shared.down", "shared.gate"}
    assert kinds(qwen, "experts") == {"experts.gate_up", "experts.down"}
    assert kinds(qwen, "experts.down_proj", "mlp.gate") == {"experts.down", "router"}
    assert kinds(qwen, "gate_proj") == {"experts.gate_up", "shared.gate_up"}
    # Names in checkpoints and in transformers 5.
    assert kinds(mixtral, "w1") == kinds(mixtral, "experts.gate_up_proj") == {"experts.gate_up"}
    for wrong in ("proj", "self_attn", "lm_head", "experts"):
        with pytest.raises(ConfigError, match=f"--lora-target-modules: no linear layer of a llama .* called {wrong}"):
            adapter_shapes(llama, [wrong])


def test_parts_of_fused_layers(configs):
    llama = configs["llama-gqa-tied"]
    queries, keys = llama.num_heads * llama.head_dim, llama.num_kv_heads * llama.head_dim
    found = targeted_outputs(llama, ["q_proj", "v_proj"])["layers.1.qkv"]
    assert found == [range(queries), range(queries + keys, queries + 2 * keys)]
    assert are_targets(range(queries), found)
    assert not are_targets(range(queries + keys), found)
    assert not are_targets(range(3), ())


@pytest.mark.parametrize("kernels", ["torch", "cpu"])
def test_backends_allocate_only_the_named_layers(kernels, tmp_path):
    folder, flags = make_model(tmp_path / "model", FAMILIES["llama-gqa-tied"])
    prepared = prepare(flags)
    backend = BackendDriver(prepared).backend if kernels == "torch" else cpu_backend(prepared, threads=1)
    backend.bind_adapters(1, 8, ["o_proj"])
    adapter = random_adapter(load_config(folder), 4, (4,), torch.float32)
    with pytest.raises(ConfigError, match="or --lora-target-modules excludes"):
        backend.adapters.pack(adapter)
    named = {name: pairs for name, pairs in adapter.layers.items() if name.endswith(".o")}
    backend.adapters.place(0, backend.adapters.pack(replace(adapter, layers=named)))
