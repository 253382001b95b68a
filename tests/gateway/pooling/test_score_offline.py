"""LLM.score beside transformers: logits of two tokens in the forms of sentence-transformers, vLLM and Qwen3-Reranker's
model card; a query before many documents is computed once."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lab.testbed.conditions import until
from lab.testbed.tiny_model import save_model
from pillion import LLM, InvalidRequest
from pillion.gateway.pooling.pair_forms import ScoreKind, is_reranker_name, read_pair_form
from pillion.gateway.pooling.text_call import TextCall
from pillion.gateway.request.request_runner import RequestRunner
from pillion.gateway.tokens.tokenizer import ModelTokenizer

pytestmark = pytest.mark.usefixtures("prepared_here")
QUERY = "What is blue, and where does it begin? " * 2
DOCUMENTS = ["The sea", "The land lies beside it. " * 6, "x", "The sea and the sky"]
OPTIONS = {"max_model_len": "1024", "kv_pool_bytes": "32MiB", "cpu_threads": 1, "dtype": "float32"}
PAIR_TEMPLATE = (
    "<|im_start|>{{ messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first | default('Find')"
    " }}"
    "\nQ: {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}"
    "\nD: {{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}<|im_end|>"
)
YES, NO = 60, 61


def pair_text(query: str, document: str, told: str = "Find") -> str:
    return f"<|im_start|>{told}\nQ: {query}\nD: {document}<|im_end|>"


@torch.inference_mode()
def log_odds(llm: LLM, folder: pathlib.Path, text: str, true: int, false: int) -> float:
    """Return the difference of two tokens' logits after a text, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = llm.get_tokenizer().encode(text, add_special_tokens=False)
    logits = model(torch.tensor([ids])).logits[0, -1].double()
    return float(logits[true] - logits[false])


def sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Write a causal reranker with sentence-transformers files, whose template has the roles of a pair."""
    found = save_model(tmp_path_factory.mktemp("reranker"), template=PAIR_TEMPLATE)
    base = "sentence_transformers"
    modules = [
        {"path": "", "type": f"{base}.base.modules.transformer.Transformer"},
        {"path": "1_LogitScore", "type": f"{base}.cross_encoder.modules.logit_score.LogitScore"},
    ]
    (found / "modules.json").write_text(json.dumps(modules))
    (found / "1_LogitScore").mkdir()
    (found / "1_LogitScore" / "config.json").write_text(json.dumps({"true_token_id": YES, "false_token_id": NO}))
    return found


@pytest.fixture(scope="module")
def llm(folder: pathlib.Path) -> Iterator[LLM]:
    with LLM(str(folder), max_num_batched_tokens=64, max_num_seqs=16, **OPTIONS) as made:
        yield made


def test_scores_are_the_probabilities_of_two_tokens(llm: LLM, folder: pathlib.Path) -> None:
    found = [one.outputs.score for one in llm.score(QUERY, DOCUMENTS)]
    wanted = [sigmoid(log_odds(llm, folder, pair_text(QUERY, one), YES, NO)) for one in DOCUMENTS]
    assert found == pytest.approx(wanted, abs=1e-5)
    assert [llm.score(QUERY, one)[0].outputs.score for one in DOCUMENTS] == found
    turned = llm.score([QUERY] * len(DOCUMENTS), DOCUMENTS[::-1])
    assert [one.outputs.score for one in turned] == found[::-1]


def test_an_instruction_is_the_templates_system_message(llm: LLM, folder: pathlib.Path) -> None:
    (found,) = llm.score("q", "d", instruction="Look")
    assert found.outputs.score == pytest.approx(sigmoid(log_odds(llm, folder, pair_text("q", "d", "Look"), YES, NO)))


def test_the_query_is_computed_once_for_all_documents(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = TextCall._start

    async def begin_after_commits(call: TextCall, *text: Any) -> RequestRunner:
        """A score is returned while its text's last blocks are being committed, so another text may start earlier."""
        [node] = call.gateway.cluster.view.of("kvnode")

        async def committed() -> bool:
            return not (await call.gateway.cluster.node(node.component_id).client.status()).tickets

        await until("the blocks of the texts before", committed)
        return await begin(call, *text)

    monkeypatch.setattr(TextCall, "_start", begin_after_commits)
    query, documents = "Who was it that " * 20, [f"{n} of them" for n in range(12)]
    before = llm.status()
    llm.score(query, documents)
    after = llm.status()
    asked = after.prompt_tokens - before.prompt_tokens
    lengths = [len(llm.get_tokenizer().encode(pair_text(query, one), add_special_tokens=False)) for one in documents]
    assert asked == sum(lengths)
    block = llm.flags.block_size
    # The first pair is computed whole, the others from the last whole block that they share with it.
    shared = (lengths[0] - len("0 of them") - 1) // block * block
    assert shared > 0.8 * lengths[0]
    assert asked - (after.cached_tokens - before.cached_tokens) == lengths[0] + sum(lengths[1:]) - shared * 11


def test_a_long_document_is_cut_and_the_template_kept(llm: LLM, folder: pathlib.Path) -> None:
    document = "The land lies beside it. " * 100
    with pytest.raises(InvalidRequest, match=r"inputs\[0\]: This model's maximum context length is 1024 tokens"):
        llm.score("q", document)
    whole = len(llm.get_tokenizer().encode(pair_text("q", "")))
    for most in (100, -1):
        kept = document[: (1023 if most < 0 else most) - whole]
        (found,) = llm.score("q", document, truncate_prompt_tokens=most)
        wanted = sigmoid(log_odds(llm, folder, pair_text("q", kept), YES, NO))
        assert found.outputs.score == pytest.approx(wanted, abs=1e-5)
    with pytest.raises(
        InvalidRequest, match="truncate_prompt_tokens: the prompt or template around the text leaves no room"
    ):
        llm.score("q", document, truncate_prompt_tokens=5)


def test_a_reranker_has_no_vectors(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match=r"has no vectors of texts: .* the modules Transformer, LogitScore; only"):
        llm.embed("x")


def test_a_qwen3_reranker_without_pooling_files_uses_its_cards_prompt(tmp_path: pathlib.Path) -> None:
    folder = save_model(tmp_path / "Qwen3-Reranker-tiny", model_type="qwen3", marks=("yes", "no"))
    text = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {}\n'
        "<Query>: q{{}}\n<Document>: d{{}}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    with LLM(str(folder), **OPTIONS) as llm:
        codec = llm.get_tokenizer()
        yes, no = (codec.convert_tokens_to_ids(word) for word in ("yes", "no"))
        own = "Given a web search query, retrieve relevant passages that answer the query"
        for told, instruction in ((own, None), ("Look", "Look")):
            (found,) = llm.score("q{}", "d{}", instruction=instruction)
            wanted = sigmoid(log_odds(llm, folder, text.format(told).replace("{{}}", "{}"), yes, no))
            assert found.outputs.score == pytest.approx(wanted, abs=1e-5)


def test_the_score_kind_depends_on_the_model_name(tmp_path: pathlib.Path) -> None:
    folder = save_model(tmp_path / "model", model_type="qwen3", marks=("yes", "no"))
    tokenizer = ModelTokenizer.load(folder)
    kinds = [read_pair_form(folder, tokenizer, is_reranker_name(name)).kind for name in ("chat", "My-Reranker", "chat")]
    assert kinds == [ScoreKind.COSINE, ScoreKind.TOKENS, ScoreKind.COSINE]


def test_classifier_from_token_and_activation_fn_are_applied(tmp_path: pathlib.Path) -> None:
    folder = save_model(tmp_path / "model", template=PAIR_TEMPLATE, marks=("ja", "nein"))
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "classifier_from_token": ["nein", "ja"],
        "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    with LLM(str(folder), **OPTIONS) as llm:
        true, false = (llm.get_tokenizer().convert_tokens_to_ids(word) for word in ("ja", "nein"))
        found = [one.outputs.score for one in llm.score(["q", "r"], ["d", "e"])]
        wanted = [log_odds(llm, folder, pair_text(*pair), true, false) for pair in (("q", "d"), ("r", "e"))]
        assert found == pytest.approx(wanted, abs=1e-4)


def test_scores_of_an_embedding_model_are_cosines(tmp_path: pathlib.Path) -> None:
    folder = save_model(tmp_path / "model")
    with LLM(str(folder), **OPTIONS) as llm:
        query, *others = (torch.tensor(one.outputs.embedding) for one in llm.embed([QUERY, *DOCUMENTS]))
        found = [one.outputs.score for one in llm.score(QUERY, DOCUMENTS)]
        assert found == pytest.approx([float(torch.cosine_similarity(query, one, 0)) for one in others], abs=1e-5)
        with pytest.raises(InvalidRequest, match="instruction: the model takes no instruction"):
            llm.score("q", "d", instruction="Look")
