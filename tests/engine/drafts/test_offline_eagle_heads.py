"""Answers with an EAGLE head equal those without, on the CPU kernels: greedy, sampled, parallel samples, penalties,
grammars, and on two ranks."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from lab.testbed.eagle_heads import save_head
from lab.testbed.tiny_model import save_model
from pillion import LLM, ConfigError, SamplingParams, StructuredOutputs
from pillion.engine.drafts import draft_control
from tests.engine.drafts.test_offline_draft_models import SETTINGS as PLAIN_SETTINGS
from tests.engine.drafts.test_offline_draft_models import TEXTS
from tests.support.cpu_model import needs_kernels

pytestmark = pytest.mark.usefixtures("prepared_here", "forked_ranks")
# A grammar that refuses most draft tokens.
SHAPE = StructuredOutputs(regex="[a-z ]{20,40}")
SETTINGS = [*PLAIN_SETTINGS, SamplingParams(temperature=0.9, seed=8, max_tokens=40, structured_outputs=SHAPE)]


def answers(folder: pathlib.Path, head: pathlib.Path | None, **options: Any) -> tuple[list[list[int]], int]:
    """Return the tokens of two rounds, and how many were drafted."""
    config = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    if head is not None:
        options["speculative_config"] = config
    with LLM(str(folder), dtype="float32", max_model_len="512", kv_pool_bytes="16MiB", cpu_threads=1, **options) as llm:
        prompts = [text for text in TEXTS for _ in SETTINGS]
        rounds = [llm.generate(prompts, SETTINGS * len(TEXTS), use_tqdm=False) for _ in range(2)]
    outputs = [output for one in rounds for output in one]
    drafted = sum(output.timings.guessed_tokens for output in outputs if output.timings is not None)
    return [answer.token_ids for output in outputs for answer in output.outputs], drafted


@pytest.mark.long
@needs_kernels
@pytest.mark.parametrize("ranks", [1, 2])
def test_drafting_does_not_change_answers(ranks: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Drafts even if they are not faster.
    monkeypatch.setattr(draft_control, "MIN_SPEEDUP", 0.0)
    monkeypatch.setattr(draft_control.DraftControl, "_estimate_worth", lambda *arguments: None)
    main = save_model(tmp_path / "main", num_hidden_layers=6)
    plain, _ = answers(main, None)
    head = save_head(tmp_path / "head", main)
    found, drafted = answers(main, head, tensor_parallel_size=ranks)
    assert found == plain
    assert drafted > 0


def test_a_head_of_another_model_is_refused(tmp_path: pathlib.Path) -> None:
    main, other = save_model(tmp_path / "main", num_hidden_layers=6), save_model(tmp_path / "other", marks=("<x>",))
    with pytest.raises(ConfigError, match=r"--speculative-config: draft model .*head: .* vocabulary of 259 tokens"):
        answers(main, save_head(tmp_path / "head", other, aux_hidden_state_layers=(0, 1, 1)))
