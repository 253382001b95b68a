"""The decoder's operations against transformers' modules, bit for bit in bfloat16 where rounding order matters."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import GptOssConfig
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralSparseMoeBlock
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from pillion.engine.models.layer_operations import ClampedSwiglu
from pillion.engine.models.layers import GATED, RmsNorm, clamped_swiglu, mix_experts, route
from pillion.kernels.torch.torch_linear import Linear
from tests.support.families import mixed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("theirs", "offset", "wide"), [(LlamaRMSNorm, 0.0, False), (Olmo2RMSNorm, 0.0, True), (Gemma2RMSNorm, 1.0, True)]
)
def test_norms(theirs, offset, wide, dtype):
    torch.manual_seed(0)
    weight, rows = torch.randn(96).to(dtype), (torch.randn(50, 96) * 3).to(dtype)
    module = theirs(96, 1e-5).to(dtype)
    module.weight.data.copy_(weight)
    ours = RmsNorm(weight.float() + offset if wide else weight, 1e-5, wide)(rows)
    assert ours.dtype is dtype
    assert torch.equal(ours, module(rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clamped_swiglu(dtype):
    """gpt-oss interleaves gate and up."""
    torch.manual_seed(0)
    theirs = GptOssExperts(GptOssConfig(hidden_size=8, intermediate_size=48, num_local_experts=1, swiglu_limit=1.5))
    gate, up = (torch.randn(2, 50, 48) * 2).to(dtype)
    in_turn = torch.stack((gate, up), -1).flatten(1)
    found = clamped_swiglu(torch.cat((gate, up), -1), ClampedSwiglu(1.702, 1.5))
    assert found.dtype is dtype
    assert torch.equal(found, theirs._apply_gate(in_turn))


def mixture(hidden: int = 32, inner: int = 48, count: int = 6):
    """Return a MoE block of transformers, ours, and the list of row counts of our experts' calls."""
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=hidden, intermediate_size=inner, num_local_experts=count, num_experts_per_tok=2, pad_token_id=None
    )
    theirs = MixtralSparseMoeBlock(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ups, downs = (
        [Linear(matrix) for matrix in stacked]
        for stacked in (theirs.experts.gate_up_proj.data, theirs.experts.down_proj.data)
    )
    calls: list[int] = []

    def run(number: int, rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        assert len(numbers) == len(rows)
        calls.append(len(rows))
        return downs[number](GATED["silu"](ups[number](rows)))

    return theirs, lambda rows: mix_experts(rows, theirs.gate.weight.data, run, mixed(2, True)), calls


@torch.inference_mode()
def test_each_expert_that_has_tokens_runs_once_over_all_of_them():
    theirs, ours, calls = mixture()
    rows = torch.randn(200, 32)
    torch.testing.assert_close(ours(rows), theirs(rows[None])[0], atol=1e-5, rtol=1e-5)
    assert len(calls) == 6
    assert sum(calls) == 400
    calls.clear()
    ours(rows[:1])
    assert calls == [1, 1]


@torch.inference_mode()
def test_a_tokens_expert_sums_do_not_depend_on_its_batch():
    _, ours, _ = mixture()
    rows = torch.randn(40, 32)
    together = ours(rows)
    order = torch.randperm(40)
    torch.testing.assert_close(ours(rows[order]), together[order], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(torch.cat([ours(row[None]) for row in rows]), together, atol=1e-5, rtol=1e-5)


def test_scores_are_normalized_only_if_configured():
    rows, router = torch.randn(9, 8), torch.randn(5, 8)
    normalized, chosen = route(rows, router, mixed(2, True))
    plain, same = route(rows, router, mixed(2, False))
    assert torch.equal(chosen, same)
    torch.testing.assert_close(normalized.sum(-1), torch.ones(9))
    torch.testing.assert_close(plain / plain.sum(-1, keepdim=True), normalized)
    assert (plain.sum(-1) < 1).all()


def test_exact_routers_are_not_rounded():
    rows, router = torch.randn(50, 64).bfloat16(), torch.randn(5, 64).bfloat16()
    scores, _ = route(rows, router, dataclasses.replace(mixed(2, False), exact=True))
    assert torch.equal(scores, torch.softmax(rows.float() @ router.float().T, -1).topk(2, -1).values)
    rounded, _ = route(rows, router, mixed(2, False))
    assert not torch.equal(scores, rounded)
