"""Models whose blocks hold latents (multi-head latent attention): the shapes of published ones, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from pillion.config import PrefillFlags, PrepareFlags
from pillion.engine.backends.loading import load_model, make_ready
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.models.config_parser import load_config, parse_config
from pillion.engine.stages.stage_loading import Stages
from pillion.errors import ConfigError
from tests.support.cpu_model import CpuDriver, cpu_backend, needs_kernels
from tests.support.families import FAMILIES, make_model, tokens_of
from tests.support.torch_model import BackendDriver

# As in the config of DeepSeek V3, without its quantization.
V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18_432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163_840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10_000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129_280,
}
# As in the config of Kimi K2, as far as it differs.
K2 = {"num_attention_heads": 64, "num_key_value_heads": 64, "n_group": 1, "topk_group": 1, "n_routed_experts": 384}


@pytest.mark.parametrize("change", [{}, K2])
def test_the_shapes_of_published_models(change):
    config = parse_config({**V3, **change})
    assert (config.num_kv_heads, config.kv_planes, config.head_dim, config.value_dim) == (1, 1, 576, 512)
    # 1 / sqrt(192), times the square of YaRN's 0.1 * ln(40) + 1.
    assert config.attention_scale == pytest.approx(192**-0.5 * 1.36889**2, rel=1e-5)
    assert config.max_position_embeddings == 163_840
    assert config.moe.groups == change.get("n_group", 8)


@needs_kernels
@pytest.mark.parametrize(("dtype", "near"), [("float32", 2e-4), pytest.param("bfloat16", 0.06, marks=pytest.mark.long)])
def test_long_texts_with_rows_as_wide_as_deepseeks(own_cache, tmp_path, dtype, near):
    """Contexts of several partitions, which items share, in chunks and token by token beside other texts."""
    wide = {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "head_dim": 64,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    }
    shape = {**FAMILIES["youtu"], **wide, "qk_nope_head_dim": 64, "v_head_dim": 64, "num_hidden_layers": 1}
    _, flags = make_model(tmp_path / "model", shape)
    text, other = tokens_of(1100, 2), tokens_of(60, 3)
    exact = BackendDriver(prepare(flags), num_slots=100)
    wanted = exact.run_all(exact.sequences.add()[0], text, [600])
    prepared = prepare(dataclasses.replace(flags, dtype=dtype))
    for block_size, checked in ((16, False), (32, True)):
        backend = cpu_backend(prepared, block_size, threads=2, checked=checked)
        driver = CpuDriver(prepared, block_size, num_slots=300, backend=backend)
        one, two, three = driver.sequences.add(3)
        found = driver.run_all(one, text, [1030, 1, 1, 40])
        assert float((found - wanted).abs().mean() / wanted.std()) < near
        # The same bits in other steps (I6).
        driver.step((three, other), sample=[])
        assert torch.equal(driver.run_all(two, text, [900, 129, 1, 1, 1]), found)
        driver.check_among_others(driver.sequences.add()[0], text, [600, 400, 60, 1], found, [three])


def test_what_is_not_there_yet_is_refused_by_name(own_cache, tmp_path):
    folder, plain = make_model(tmp_path / "model", FAMILIES["deepseek-v2"])
    prepared = prepare(plain)
    model = {"model": str(folder), "dtype": "float32"}
    with pytest.raises(ConfigError, match="deepseek_v2: --kv-cache-dtype fp8"):
        load_model(PrefillFlags(kv_cache_dtype="fp8", **model), 1)
    with pytest.raises(ConfigError, match="deepseek_v2: --enable-lora"):
        load_model(PrefillFlags(enable_lora=True, **model), 1)
    with pytest.raises(ConfigError, match="deepseek_v2: --enable-lora"):
        make_ready(PrepareFlags(enable_lora=True, **model), print)
    lines: list[str] = []
    with pytest.raises(ConfigError, match="deepseek_v2: --quantization"):
        prepare(PrepareFlags(quantization="int4", **model), lines.append)
    assert not any("quantizing" in line for line in lines), "it is refused before the hours that this takes"
    with pytest.raises(ConfigError, match="deepseek_v2: --pipeline-parallel-size 2"):
        Stages.check(PrefillFlags(model=str(folder), pipeline_parallel_size=2), "cpu", prepared)


def test_gpus_refuse_latents(own_cache, tmp_path):
    gpu_loading = pytest.importorskip("pillion.engine.backends.gpu.gpu_loading")
    folder, _ = make_model(tmp_path / "model", FAMILIES["deepseek-v2"])
    with pytest.raises(ConfigError, match="deepseek_v2: the GPU kernels do not attend over latents"):
        gpu_loading.check_operations(load_config(folder))
