"""Answers with a draft model equal those without: several families, drafts often right and never right."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from lab.testbed.draft_models import first_layers, with_quiet_layers
from lab.testbed.tiny_model import save_model
from pillion import LLM, ConfigError, SamplingParams
from pillion.engine.drafts import draft_control

pytestmark = pytest.mark.usefixtures("prepared_here")
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"model_type": "qwen3"},
    "gemma3": {"model_type": "gemma3_text", "query_pre_attn_scalar": 24, "sliding_window": 24},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2},
}
TEXTS = ["Once upon a time, in a land far away, there was a king who " * 2, "The sea"]
SETTINGS = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=5, top_p=0.9, max_tokens=40, ignore_eos=True, n=2),
    SamplingParams(temperature=0.7, seed=6, frequency_penalty=0.5, logprobs=2, max_tokens=30),
]


def answers(folder: pathlib.Path, draft: pathlib.Path | None) -> list[list[int]]:
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    options: dict[str, Any] = {"speculative_config": config} if draft is not None else {}
    with LLM(
        str(folder),
        dtype="float32",
        max_model_len="512",
        kv_pool_bytes="16MiB",
        cpu_threads=1,
        cpu_kernels="torch",
        **options,
    ) as llm:
        outputs = llm.generate([text for text in TEXTS for _ in SETTINGS], SETTINGS * len(TEXTS), use_tqdm=False)
        # The second round finds prompts and drafts of the first.
        again = llm.generate([text for text in TEXTS for _ in SETTINGS], SETTINGS * len(TEXTS), use_tqdm=False)
    found = [answer.token_ids for output in outputs for answer in output.outputs]
    assert found == [answer.token_ids for output in again for answer in output.outputs]
    return found


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(name, marks=pytest.mark.long) for name in FAMILIES if name != "llama")]
)
def test_drafting_does_not_change_answers(family: str, tmp_path: pathlib.Path) -> None:
    base = save_model(tmp_path / "base", num_hidden_layers=4, **FAMILIES[family])
    main = with_quiet_layers(base, tmp_path / "main", 1, 0.05)
    plain = answers(main, None)
    assert answers(main, first_layers(main, tmp_path / "draft", 1)) == plain
    assert answers(main, save_model(tmp_path / "random", seed=3, num_hidden_layers=1)) == plain


def test_a_good_draft_model_drafts_sampled_tokens(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model as its own draft drafts sampled tokens, because drafts use the noise of sampling."""
    monkeypatch.setattr(draft_control, "MIN_SPEEDUP", 0.0)
    monkeypatch.setattr(draft_control.DraftControl, "_estimate_worth", lambda *arguments: None)
    main = save_model(tmp_path / "main")
    config = {"method": "draft_model", "model": str(main), "num_speculative_tokens": 3}
    settings = SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True)
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": "512", "kv_pool_bytes": "16MiB", "cpu_threads": 1}
    with LLM(str(main), cpu_kernels="torch", speculative_config=config, **options) as llm:
        (output,) = llm.generate(TEXTS[:1], settings, use_tqdm=False)
    assert output.timings is not None
    assert output.timings.guessed_tokens > 20
    assert output.timings.accepted_tokens > 0.9 * output.timings.guessed_tokens


@pytest.mark.long
def test_a_draft_model_with_another_tokenizer_is_refused(tmp_path: pathlib.Path) -> None:
    main, other = save_model(tmp_path / "main"), save_model(tmp_path / "other", num_hidden_layers=1, marks=("<x>",))
    with pytest.raises(ConfigError, match=r"--speculative-config: draft model .*other: its tokenizer differs"):
        answers(main, other)
