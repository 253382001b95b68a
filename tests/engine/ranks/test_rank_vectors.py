"""Vectors, labels and logits of texts from a worker of several ranks: transformers' own, with bits independent of
chunks and other rows."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from lab.testbed.tiny_model import save_model
from pillion import LLM
from pillion.config import PrefillFlags
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.load_model import load_model
from pillion.errors import ConfigError
from tests.engine.models.test_vector_head import make_classifier
from tests.support.cpu_model import needs_kernels
from tests.support.families import FAMILIES, make_model, tokens_of
from tests.support.rank_model import RankGroup
from tests.support.torch_model import BackendDriver

pytestmark = [needs_kernels, pytest.mark.usefixtures("own_cache", "prepared_here", "forked_ranks")]

TEXT = tokens_of(70, 2)
TOLERANCE = 1e-4
OPTIONS = {"max_model_len": "512", "kv_pool_bytes": "32MiB", "cpu_threads": 1, "dtype": "float32"}
TEXTS = ["The sea and the land, " * 8, "x", "The sea and the land, " * 8 + "and the sky"]


@pytest.fixture(scope="module")
def flags_of(own_cache: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return functools.cache(lambda name: make_model(tmp_path_factory.mktemp("model"), FAMILIES[name])[1])


def vectors(group: RankGroup, driver: BackendDriver, *parts: tuple[int, list[int]], of: list[int]) -> np.ndarray:
    """Run one step; return the vectors of these rows, which must be equal on all ranks."""
    batch = dataclasses.replace(driver.sequences.step(parts, of), pooled=len(of))
    group.forward(batch)
    found = [backend._read_vectors(batch).copy() for backend in group.backends]
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])
    return found[0]


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("llama-gqa-tied", 4),
        ("gemma2", 2),
        *(pytest.param(name, 2, marks=pytest.mark.long) for name in ("mixtral", "olmo2", "youtu", "granite", "cohere")),
    ],
)
def test_a_rows_vector_is_the_last_hidden_state_at_every_rank(flags_of: Any, name: str, size: int) -> None:
    flags = flags_of(name)
    prepared = prepare(flags)
    model = AutoModelForCausalLM.from_pretrained(flags.model, dtype=torch.float32).eval()
    with torch.inference_mode():
        wanted = model.model(torch.tensor([TEXT])).last_hidden_state[0, -1].numpy()
    group = RankGroup(prepared, size)
    driver = BackendDriver(prepared, backend=group)
    whole, cut = driver.sequences.add(), driver.sequences.add()
    last = len(TEXT) - 1
    (alone,) = vectors(group, driver, (whole[0], TEXT), of=[last])
    assert np.abs(alone - wanted).max() <= TOLERANCE * max(1.0, float(np.abs(wanted).max()))
    driver.step((cut[0], TEXT[:30]), sample=())
    # A step that samples rows gives only their logits beside the vectors.
    other = driver.sequences.add()
    parts = [(other[0], TEXT[3:8]), (cut[0], TEXT[30:])]
    ends = [4, 4 + len(TEXT) - 30]
    batch = dataclasses.replace(driver.sequences.step(parts, [ends[0], ends[0], ends[1]]), pooled=1)
    logits = group.forward(batch)
    assert len(logits) == 2
    np.testing.assert_array_equal(group.backends[0]._read_vectors(batch)[0], alone)
    group.check_integrity()
    group.close()


@pytest.mark.long
def test_a_model_of_two_ranks_embeds_texts_and_answers(tmp_path: Any) -> None:
    plain = save_model(tmp_path / "plain")
    with LLM(str(plain), tensor_parallel_size=2, max_num_batched_tokens=64, max_num_seqs=16, **OPTIONS) as llm:
        found = llm.embed(TEXTS)
        model = AutoModel.from_pretrained(plain, dtype=torch.float32).eval()
        for one in found:
            with torch.inference_mode():
                row = model(torch.tensor([one.prompt_token_ids])).last_hidden_state[0, -1]
            wanted = torch.nn.functional.normalize(row, dim=0).numpy()
            assert np.abs(wanted - np.array(one.outputs.embedding)).max() < 1e-5
        assert [one.outputs.embedding for one in llm.embed(TEXTS)] == [one.outputs.embedding for one in found]
        assert len(llm.generate("The sea")[0].outputs[0].token_ids) > 0


@pytest.mark.long
def test_a_classifier_of_two_ranks_gives_its_labels(tmp_path: Any) -> None:
    folder = make_classifier(tmp_path / "labels", 3)
    with LLM(str(folder), tensor_parallel_size=2, **OPTIONS) as llm:
        (found,) = llm.classify(TEXTS[0])
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.inference_mode():
            wanted = model(torch.tensor([llm.get_tokenizer().encode(TEXTS[0])])).logits[0].softmax(-1)
        assert found.outputs.probs == pytest.approx(wanted.tolist(), abs=1e-5)


def test_stages_of_a_model_without_a_head_are_refused(tmp_path: Any) -> None:
    folder = make_classifier(tmp_path / "labels", 3)
    flags = PrefillFlags(model=str(folder), pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match="which GPUs and stages require"):
        load_model(flags, 1)
