"""Vectors and scores equal those of sentence-transformers, with checkpoints that it wrote itself."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from lab.testbed.tiny_model import EOS, save_model
from pillion import LLM, InvalidRequest
from tests.engine.encoders.test_encoder import make_encoder
from tests.engine.encoders.test_encoder_offline import save_words

ROOT = pathlib.Path(__file__).resolve().parents[3]
PACKAGES = ROOT / ".venv" / "sentences"
TIMEOUT_S = 300
TEXTS = [
    "the sea is blue",
    "land",
    "the sky lies over both and the sea beside it",
    "the sea is blue and the sky over it",
]
PAIRS = [["the sea", "is blue"], ["land", "the sky lies over both"], ["the sea", "it"]]
PROMPTS = {"query": "the sky and ", "document": ""}

pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("own_cache"),
    pytest.mark.skipif(not PACKAGES.exists(), reason="`make setup-clients` installs sentence-transformers"),
]


def with_padding(folder: pathlib.Path, token: str) -> None:
    """Set the padding token, which sentence-transformers needs, and BERT's mark for the second text of a pair."""
    path = folder / "tokenizer_config.json"
    own = {"pad_token": token}
    if folder.name == "bert scores":
        own["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    path.write_text(json.dumps(json.loads(path.read_text()) | own))


def embedder(folder: pathlib.Path, name: str, pooling: str, normalized: bool, **more: Any) -> dict[str, Any]:
    """Check a checkpoint of vectors."""
    (folder / name).mkdir(parents=True)
    if name.startswith("qwen3"):
        save_model(folder / name, model_type="qwen3")
        with_padding(folder / name, EOS)
    else:
        make_encoder(folder / name, name.partition("-")[0])
        save_words(folder / name)
        with_padding(folder / name, "[PAD]")
    asked = {"prompts": {}, "prompt": None, "max_seq_length": None, "dimensions": None, "texts": TEXTS}
    where = {"folder": str(folder / name), "out": str(folder / f"{name} out")}
    return {**asked, **where, "pooling": pooling, "normalized": normalized, **more}


def check_cuts(llm: LLM, whole: list[int]) -> None:
    """A message that is too long loses its own last tokens, and keeps the template's text after it."""
    (cut,) = llm.embed(TEXTS[-1], truncate_prompt_tokens=len(whole) - 4)
    ends = llm.get_tokenizer().encode("<|im_end|>\n")
    assert cut.prompt_token_ids == [*whole[: -len(ends) - 4], *ends]
    with pytest.raises(InvalidRequest, match="leaves no room for it within 3 tokens"):
        llm.embed(TEXTS[-1], truncate_prompt_tokens=3)


def options(**more: Any) -> dict[str, Any]:
    return {"dtype": "float32", "kv_pool_bytes": "16MiB", "cpu_threads": 1, "max_num_seqs": 8, **more}


def test_vectors_and_scores_are_those_of_sentence_transformers(tmp_path: pathlib.Path) -> None:
    embedders = [
        embedder(tmp_path, "qwen3", "lasttoken", True, prompts=PROMPTS, prompt="query"),
        embedder(tmp_path, "qwen3-mean", "mean", False, dimensions=32),
        embedder(tmp_path, "bert", "cls", True, dimensions=20),
        embedder(tmp_path, "modernbert", "mean", True, prompts=PROMPTS, prompt="document"),
        embedder(tmp_path, "roberta", "mean", False, max_seq_length=9),
    ]
    scorers = []
    for name in ("bert", "modernbert"):
        save_words(make_encoder(tmp_path / f"{name} scores", name, labels=1))
        with_padding(tmp_path / f"{name} scores", "[PAD]")
        scorers.append(
            {"folder": str(tmp_path / f"{name} scores"), "out": str(tmp_path / f"{name} scored"), "pairs": PAIRS}
        )
    asked = json.dumps({"embed": embedders, "score": scorers})
    command = [sys.executable, str(ROOT / "tests" / "clients" / "sentences.py"), str(PACKAGES)]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    wanted = json.loads(done.stdout)
    for one, vectors in zip(embedders, wanted["embed"], strict=True):
        with LLM(one["out"], **options()) as llm:
            cut = {"truncate_prompt_tokens": one["max_seq_length"]} if one["max_seq_length"] else {}
            found = llm.embed(TEXTS, dimensions=one["dimensions"], **cut)
            if cut:
                with pytest.raises(InvalidRequest, match=f"maximum context length is {one['max_seq_length']} tokens"):
                    llm.embed(TEXTS)
            if (
                "message"
                in json.loads((pathlib.Path(one["out"]) / "sentence_bert_config.json").read_text())["modality_config"]
            ):
                check_cuts(llm, found[-1].prompt_token_ids)
        for vector, answer in zip(vectors, found, strict=True):
            assert answer.outputs.embedding == pytest.approx(vector, abs=2e-5 * max(1.0, np.abs(vector).max())), one
    for one, scores in zip(scorers, wanted["score"], strict=True):
        with LLM(one["out"], **options()) as llm:
            found = llm.score([query for query, _ in PAIRS], [document for _, document in PAIRS])
        assert [answer.outputs.score for answer in found] == pytest.approx(scores, abs=2e-5), one
