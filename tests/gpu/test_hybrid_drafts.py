"""A draft model beside a hybrid model on one GPU: answers are those without draft tokens, of which some are right and
others wrong. Without a GPU, Triton's interpreter computes, over a fake driver."""

from __future__ import annotations

import tests.support.gpu  # noqa: F401  # isort: skip  (before the kernels)

import pathlib
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lab.testbed import fake_cuda
from lab.testbed.tiny_model import save_model
from pillion import LLM, SamplingParams
from pillion.engine.drafts import draft_control
from tests.support.families import make_model, tokens_of
from tests.support.hybrids import HYBRIDS
from tests.support.oracle import Oracle, first_difference

PROMPT, TOKENS = tokens_of(21, 2), 10
# Hot samples follow the noise, which a draft token has too, more than the model, so that some draft tokens are right.
SETTINGS = [
    SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True),
    SamplingParams(temperature=6.0, seed=5, max_tokens=TOKENS, ignore_eos=True),
]


@pytest.mark.long
@pytest.mark.timeout(480)
@pytest.mark.usefixtures("own_cache", "prepared_here")
def test_no_answer_changes(tmp_path, monkeypatch):
    for name, value in fake_cuda.environment(FAKE_CUDA_TOUCHABLE="1", FAKE_CUDA_TOTAL_BYTES=str(2**28)).items():
        monkeypatch.setenv(name, value)
    # So that the machine's speed does not decide whether anything is drafted.
    monkeypatch.setattr(draft_control, "LEAST_SPEEDUP", 0.0)
    monkeypatch.setattr(draft_control.DraftControl, "_value", lambda *arguments: None)
    main, draft = (
        make_model(tmp_path / "main", HYBRIDS["lfm2"])[0],
        save_model(tmp_path / "draft", seed=3, num_hidden_layers=1, num_key_value_heads=1),
    )
    about = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    plain, found = answers(main), answers(main, speculative_config=about)
    oracle = Oracle(AutoModelForCausalLM.from_pretrained(main, dtype=torch.float32))
    assert first_difference(oracle.greedy(PROMPT, TOKENS), plain[0].outputs[0].token_ids, 1e-3) == ""
    assert [list(one.outputs[0].token_ids) for one in found] == [list(one.outputs[0].token_ids) for one in plain]
    timings = [one.timings for one in found]
    drafted, right = (sum(getattr(one, name) for one in timings) for name in ("guessed_tokens", "accepted_tokens"))
    assert 0 < right < drafted


def answers(folder: pathlib.Path, **options: Any) -> list[Any]:
    sizes = {"max_model_len": "256", "max_num_batched_tokens": "32", "max_num_seqs": "4", "kv_pool_bytes": "4MiB"}
    with LLM(str(folder), device="cuda", dtype="float32", **sizes, **options) as llm:
        return llm.generate([{"prompt_token_ids": PROMPT}] * len(SETTINGS), SETTINGS, use_tqdm=False)
