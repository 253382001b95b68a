"""Attention sinks, an option that one family has: gpt-oss's attention in transformers, over MLPs of Llama, beside ours.

The family of these tests is a row in the table of families; everything else follows from the row.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from lab.testbed.tiny_model import save_tokenizer
from pillion.config import ModelFlags
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.models import families
from pillion.engine.models.llama_layer import llama_layer
from pillion.engine.models.model_family import ModelFamily
from pillion.errors import ConfigError
from tests.support.cpu_model import CpuDriver, cpu_backend, needs_kernels
from tests.support.families import PROMPT_TOKENS, tokens_of
from tests.support.rank_model import RankGroup
from tests.support.torch_model import BackendDriver

NAME = "gpt_oss_dense"
SHAPE = {
    "vocab_size": 258,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"],
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
TEXT = tokens_of(PROMPT_TOKENS, 2)


class Dense(torch.nn.Module):
    """An MLP of Llama in the place of gpt-oss's experts, which also return the router's scores."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(hidden_size=SHAPE["hidden_size"], intermediate_size=SHAPE["intermediate_size"])
        self.dense = LlamaMLP(config)

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.dense(rows), None


@pytest.fixture(scope="module")
def served(own_cache, tmp_path_factory):
    """Return a random model's folder, and transformers' logits of TEXT."""
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    torch.manual_seed(0)
    config = GptOssConfig(**SHAPE, num_local_experts=2, num_experts_per_tok=1, attn_implementation="eager")
    model = GptOssForCausalLM(config).float().eval()
    for layer in model.model.layers:
        layer.mlp = Dense()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.15 if parameter.dim() > 1 else 0.3))
            if name.endswith("norm.weight"):
                parameter += 1.0
            if name.endswith("sinks"):
                parameter.copy_(torch.linspace(-2.0, 4.0, len(parameter)))
    tensors = {name.replace("mlp.dense.", "mlp."): tensor for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**SHAPE, "model_type": NAME, "hidden_act": "silu"}))
    with torch.inference_mode():
        wanted = model(torch.tensor([TEXT])).logits[0].float()
    assert wanted.std() > 0.5
    row = ModelFamily(
        {"sliding_window": None, "layer_types": None, "attention_bias": False},
        layer=functools.partial(llama_layer, sinks=True),
        norm="wide",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(families.FAMILIES, NAME, row)
        yield ModelFlags(model=str(folder), dtype="float32"), wanted


def run(driver: BackendDriver, chunks=(33, 1, 2)) -> torch.Tensor:
    return driver.run_all(driver.sequences.add()[0], TEXT, chunks)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kernels", ["torch", pytest.param("cpu", marks=needs_kernels)])
def test_logits_match_transformers(served, kernels):
    flags, wanted = served
    prepared = prepare(flags)
    driver = BackendDriver(prepared) if kernels == "torch" else CpuDriver(prepared)
    close(run(driver), wanted)
    close(run(driver, [1] * (PROMPT_TOKENS - 1)), wanted)


@needs_kernels
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_has_the_sinks_of_its_heads(served, size):
    """Four ranks share two KV heads."""
    flags, wanted = served
    prepared = prepare(flags)
    group = RankGroup(prepared, size)
    close(run(BackendDriver(prepared, backend=group)), wanted)
    group.close()


@needs_kernels
@pytest.mark.parametrize(("kv", "most"), [("fp8", 0.08), ("int8", 0.03)])
def test_kv_in_8_bits(served, kv, most):
    flags, wanted = served
    prepared = prepare(flags)
    found = run(CpuDriver(prepared, backend=cpu_backend(prepared, kv_cache_dtype=kv)))
    assert 0 < (found - wanted).abs().mean() < most * wanted.std()


@needs_kernels
def test_bfloat16_logits_are_close(served):
    flags, wanted = served
    prepared = prepare(dataclasses.replace(flags, dtype="bfloat16"))
    for driver in (BackendDriver(prepared), CpuDriver(prepared)):
        assert (run(driver) - wanted).abs().mean() < 0.05 * wanted.std()


def test_a_checkpoint_without_sinks_is_refused(served, tmp_path):
    flags, _ = served
    folder = shutil.copytree(flags.model, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.sinks"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks model.layers.1.self_attn.sinks, which a gpt_oss_dense model needs"):
        BackendDriver(prepare(ModelFlags(model=str(folder), dtype="float32")))
