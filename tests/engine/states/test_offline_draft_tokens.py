"""Answers of models with states with a draft model or EAGLE-3 head equal those without: greedy (transformers'),
sampled, parallel samples and penalties."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lab.testbed.eagle_heads import save_head
from lab.testbed.tiny_model import save_model
from pillion import LLM, RequestOutput, SamplingParams
from pillion.engine.drafts import draft_control
from tests.support.cpu_model import needs_kernels
from tests.support.families import make_model, tokens_of
from tests.support.hybrids import HYBRIDS
from tests.support.oracle import Oracle, first_difference

PROMPTS = [tokens_of(70, 2), tokens_of(70, 2)[:40] + tokens_of(9, 3)]
TOKENS = 32
GREEDY = SamplingParams(temperature=0, logprobs=1, max_tokens=TOKENS, ignore_eos=True)
# Hot samples follow the noise, shared with draft tokens, more than the model, so some draft tokens are right.
SETTINGS = [
    GREEDY,
    SamplingParams(temperature=6.0, seed=5, max_tokens=TOKENS, ignore_eos=True, n=2),
    SamplingParams(temperature=0.7, seed=6, frequency_penalty=0.5, max_tokens=30),
]


def outputs_of(folder: pathlib.Path, kernels: str, rounds: int, **speculative: Any) -> list[RequestOutput]:
    """Return all answers; a second round reuses prompts and states of the first."""
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": "512", "kv_pool_bytes": "16MiB", "cpu_threads": 1}
    if speculative:
        options["speculative_config"] = {"num_speculative_tokens": 3, **speculative}
    with LLM(str(folder), cpu_kernels=kernels, **options) as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS for _ in SETTINGS]
        settings = SETTINGS * len(PROMPTS)
        return [one for _ in range(rounds) for one in llm.generate(prompts, settings, use_tqdm=False)]


def said(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(answer.token_ids) for output in outputs for answer in output.outputs]


def chances(outputs: list[RequestOutput]) -> list[float]:
    """Return the log probabilities of the greedy answers."""
    found = [answer.cumulative_logprob for output in outputs for answer in output.outputs]
    return [one for one in found if one is not None]


@pytest.mark.parametrize(
    ("name", "kernels", "drafts"),
    [
        ("lfm2", "torch", ("head",)),
        pytest.param("qwen3-next", "auto", ("another", "head"), marks=[needs_kernels, pytest.mark.long]),
    ],
)
def test_drafting_does_not_change_answers(
    name: str,
    kernels: str,
    drafts: tuple[str, ...],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    own_cache: None,
    prepared_here: None,
) -> None:
    # Drafts even if they are not faster.
    monkeypatch.setattr(draft_control, "MIN_SPEEDUP", 0.0)
    monkeypatch.setattr(draft_control.DraftControl, "_estimate_worth", lambda *arguments: None)
    main = make_model(tmp_path / "main", HYBRIDS[name])[0]
    plain = outputs_of(main, kernels, 1)
    oracle = Oracle(AutoModelForCausalLM.from_pretrained(main, dtype=torch.float32))
    for prompt, output in zip(PROMPTS, plain[:: len(SETTINGS)], strict=True):
        assert not first_difference(oracle.greedy(prompt, TOKENS), output.outputs[0].token_ids, 1e-3)
    folders = {
        "another": save_model(tmp_path / "draft", seed=3, num_hidden_layers=1, num_key_value_heads=1),
        "head": save_head(tmp_path / "head", main, aux_hidden_state_layers=(0, 1, 2)),
    }
    for draft in drafts:
        method = "eagle3" if draft == "head" else "draft_model"
        found = outputs_of(main, kernels, 2, method=method, model=str(folders[draft]))
        assert said(found) == said(plain) * 2
        # The CPU kernels' bits do not depend on other rows; torch's nearly do not.
        bits = pytest.approx(chances(plain) * 2, abs=0.0 if kernels == "auto" else 1e-3)
        assert chances(found) == bits
        timings = [output.timings for output in found if output.timings is not None]
        drafted, right = (sum(getattr(one, name) for one in timings) for name in ("guessed_tokens", "accepted_tokens"))
        assert 0 < right < drafted
