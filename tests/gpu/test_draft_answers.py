"""Draft models and EAGLE-3 heads on one GPU: outputs are those without draft tokens, of which some are accepted and
others rejected, also after preemption and with prefix hits. Without a GPU, Triton's interpreter computes, over a fake
driver."""

from __future__ import annotations

import tests.support.gpu  # noqa: F401  # isort: skip  (before the kernels)

import pathlib
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lab.testbed import fake_cuda
from lab.testbed.eagle_heads import save_head
from lab.testbed.tiny_model import save_model
from pillion import LLM, SamplingParams
from pillion.engine.drafts import draft_control
from tests.support.families import make_model, tokens_of
from tests.support.hybrids import HYBRIDS
from tests.support.oracle import Oracle, first_difference

PROMPT, TOKENS = tokens_of(21, 2), 10
# Samples at a high temperature mostly follow the noise, shared with draft tokens, so that some draft tokens are
# accepted.
SETTINGS = [
    SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True),
    SamplingParams(temperature=6.0, seed=5, max_tokens=TOKENS, ignore_eos=True),
]


@pytest.fixture
def always_drafts(monkeypatch):
    """A fake GPU that always drafts, regardless of the machine's speed."""
    for name, value in fake_cuda.environment(FAKE_CUDA_TOUCHABLE="1", FAKE_CUDA_TOTAL_BYTES=str(2**28)).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(draft_control, "MIN_SPEEDUP", 0.0)
    monkeypatch.setattr(draft_control.DraftControl, "_estimate_worth", lambda *arguments: None)


def draft_model(main, folder):
    return save_model(folder, seed=3, num_hidden_layers=1, num_key_value_heads=1)


def eagle_head(main, folder):
    return save_head(folder, main, draft_vocab_size=258, aux_hidden_state_layers=(0, 1, 1))


@pytest.mark.long
@pytest.mark.timeout(480)
@pytest.mark.usefixtures("own_cache", "prepared_here", "always_drafts")
@pytest.mark.parametrize(
    ("model", "method", "make"),
    [
        ({"num_hidden_layers": 4}, "eagle3", eagle_head),
        (HYBRIDS["lfm2"], "draft_model", draft_model),
        (HYBRIDS["lfm2"], "eagle3", eagle_head),
    ],
)
def test_drafting_does_not_change_answers(model, method, make, tmp_path):
    main, _ = make_model(tmp_path / "main", model)
    about = {"method": method, "model": str(make(main, tmp_path / "draft")), "num_speculative_tokens": 3}
    plain, found = answers(main), answers(main, speculative_config=about)
    oracle = Oracle(AutoModelForCausalLM.from_pretrained(main, dtype=torch.float32))
    assert first_difference(oracle.greedy(PROMPT, TOKENS), plain[0].outputs[0].token_ids, 1e-3) == ""
    assert tokens(found) == tokens(plain)
    assert 0 < counted(found, "accepted_tokens") < counted(found, "guessed_tokens")


@pytest.mark.long
@pytest.mark.timeout(480)
@pytest.mark.usefixtures("own_cache", "prepared_here", "always_drafts")
def test_no_answer_changes_after_preemption_and_prefix_hits(tmp_path):
    main = save_model(tmp_path / "main", num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1)
    about = {"method": "eagle3", "model": str(eagle_head(main, tmp_path / "head")), "num_speculative_tokens": 3}
    # Eight texts of 62 tokens need more blocks than there are.
    prompts = [tokens_of(28, seed) for seed in range(8)]
    sizes = {"max_model_len": "64", "max_num_batched_tokens": "48", "max_num_seqs": "8", "kv_pool_bytes": "155000"}
    hot = SamplingParams(temperature=6.0, seed=5, max_tokens=34, ignore_eos=True)
    found = []
    for options in ({}, {"speculative_config": about}):
        with LLM(str(main), device="cuda", dtype="float32", **sizes, **options) as llm:
            given = [{"prompt_token_ids": prompt} for prompt in prompts]
            found.append([one for _ in range(2) for one in llm.generate(given, [hot] * 8, use_tqdm=False)])
    assert tokens(found[0]) == tokens(found[1])
    assert all(counted(found[1], name) for name in ("preemptions", "cached_tokens", "accepted_tokens"))


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(one.outputs[0].token_ids) for one in outputs]


def counted(outputs: list[Any], name: str) -> int:
    """Add up one of the numbers in the outputs' timings."""
    return sum(getattr(one.timings, name) for one in outputs)


def answers(folder: pathlib.Path, **options: Any) -> list[Any]:
    sizes = {"max_model_len": "256", "max_num_batched_tokens": "32", "max_num_seqs": "4", "kv_pool_bytes": "4MiB"}
    with LLM(str(folder), device="cuda", dtype="float32", **sizes, **options) as llm:
        return llm.generate([{"prompt_token_ids": PROMPT}] * len(SETTINGS), SETTINGS, use_tqdm=False)
