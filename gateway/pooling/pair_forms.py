"""How a checkpoint computes the score of a pair of texts, a query and a document.

    kind      a request's row                             the score
    COSINE    the vector of one of the two texts          the cosine of both vectors
    LABELS    the logit of a classification head, [1]     the logit, activated by activation_fn
    TOKENS    the logits of a true and a false token      their difference, activated by activation_fn

For LABELS and TOKENS a pair is one text. A chat template with the roles "query" and "document" formats it, as in
sentence-transformers and vLLM. Without such a template, LABELS uses the concatenated texts, and a Qwen3-Reranker the
prompt of its model card.

    config.json                        ForSequenceClassification: LABELS; classifier_from_token (vLLM's form): TOKENS
    modules.json, 1_LogitScore         TOKENS, in sentence-transformers' form
    config_sentence_transformers.json  activation_fn; the prompt used as instruction
"""

from __future__ import annotations

import enum
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pillion.engine.models.config_parser import is_encoder, labels_of
from pillion.errors import ConfigError, FieldViolation, Internal, InvalidRequest
from pillion.gateway.pooling.label_forms import label_rows, sigmoid
from pillion.gateway.pooling.pooling_files import Vector, modules_of, prompts_of, read_json, tokenizer_bound
from pillion.gateway.pooling.pooling_rows import LAST_ROW, PoolingRows
from pillion.gateway.tokens.tokenizer import ModelTokenizer
from pillion.types import ChatMessage, ChatOptions, GenerateRequest

_QWEN3 = "qwen3"
QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_QWEN3_TEXT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct"
    ' provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


@dataclass(frozen=True, slots=True)
class TextPair:
    """A query and a document to score together."""

    query: str
    document: str


class ScoreKind(enum.Enum):
    """Kind of the row that a score is computed from."""

    COSINE = "cosine"
    LABELS = "labels"
    TOKENS = "tokens"


class PairText(enum.Enum):
    """How a pair becomes one text: by the chat template, by concatenation, by Qwen3-Reranker's prompt, or by an
    encoder's tokenizer."""

    TEMPLATE = "template"
    JOINED = "joined"
    QWEN3 = "qwen3"
    PAIR = "pair"


@dataclass(frozen=True, slots=True)
class PairForm:
    """How a checkpoint scores pairs.

    Attributes:
        kind: kind of a request's row.
        text: how a pair becomes one text; unused for COSINE.
        rows: rows to compute for LABELS and TOKENS; for TOKENS, the logits of the true token and of the false token, if
            the checkpoint has one.
        activated: whether a score is the sigmoid of the logit, not the logit.
        instruction: the reranker's instruction; "" for its template's default.
        max_tokens: max tokens of a pair that is one text; None for the model's limit.
    """

    kind: ScoreKind = ScoreKind.COSINE
    text: PairText = PairText.JOINED
    rows: PoolingRows = LAST_ROW
    activated: bool = True
    instruction: str = ""
    max_tokens: int | None = None

    def with_instruction(self, instruction: str | None) -> PairForm:
        """Return the form with ``instruction``, unless it is None. Raises InvalidRequest if the form uses none."""
        if instruction is None:
            return self
        if self.text in (PairText.JOINED, PairText.PAIR):
            raise InvalidRequest.of(FieldViolation("instruction", "the model takes no instruction"))
        return replace(self, instruction=instruction)

    def request(self, pair: TextPair, shared: GenerateRequest) -> GenerateRequest:
        """Return the request for a pair as one text; ``shared`` has its other fields."""
        if self.text is PairText.JOINED:
            return replace(shared, text=pair.query + pair.document)
        if self.text is PairText.QWEN3:
            instruction = self.instruction or QWEN3_INSTRUCTION
            text = _QWEN3_TEXT.format(instruction=instruction, query=pair.query, document=pair.document)
            return replace(shared, text=text)
        messages = (ChatMessage("query", pair.query), ChatMessage("document", pair.document))
        if not self.instruction:
            return replace(shared, messages=messages, chat=ChatOptions(add_generation_prompt=True))
        kwargs = json.dumps({"instruction": self.instruction})
        chat = ChatOptions(add_generation_prompt=True, chat_template_kwargs=kwargs)
        return replace(shared, messages=(ChatMessage("system", self.instruction), *messages), chat=chat)

    def score(self, row: Vector) -> float:
        """Return the score of a pair by its row. Raises Internal for a row of another length."""
        if len(row) != max(len(self.rows.logits_of), 1):
            raise Internal(f"a worker of another version returned {len(row)} numbers for a score")
        logit = float(row[0]) - (float(row[1]) if len(row) > 1 else 0.0)
        return sigmoid(logit) if self.activated else logit


def cosine(a: Vector, b: Vector) -> float:
    """Return the cosine of two vectors, computed in float64; 0 if a vector is zero."""
    a64, b64 = a.astype(np.float64), b.astype(np.float64)
    norms = math.sqrt(float(a64 @ a64) * float(b64 @ b64))
    return float(a64 @ b64) / norms if norms else 0.0


def is_reranker_name(name: str) -> bool:
    """Return True if a model's name is a reranker's. Published Qwen3-Rerankers are plain Qwen3ForCausalLM, so only
    their names identify them."""
    return "reranker" in name.lower()


def read_pair_form(folder: Path, tokenizer: ModelTokenizer, reranker: bool) -> PairForm:
    """Read how the checkpoint in a folder scores pairs. Raises ConfigError for unsupported settings, by name.

    ``reranker``: whether the model's name is a reranker's (:func:`is_reranker_name`).
    """
    config = read_json(folder / "config.json", {})
    st_config = read_json(folder / "config_sentence_transformers.json", {})
    text = PairText.TEMPLATE if _has_pair_roles(tokenizer.chat_template) else PairText.JOINED
    if text is PairText.JOINED and is_encoder(config):
        # An encoder's tokenizer joins the two texts, and marks the second one.
        text = PairText.PAIR
    form = PairForm(
        text=text,
        activated=_activated(folder, st_config, config),
        instruction=_instruction(folder, st_config),
        max_tokens=tokenizer_bound(folder),
    )
    if labels := labels_of(config):
        if labels != 1:
            raise ConfigError(
                f"{folder / 'config.json'}: its head has {labels} labels, a score needs one; use /v1/classify"
            )
        return replace(form, kind=ScoreKind.LABELS, rows=label_rows(config))
    ids = _score_tokens(folder, config, tokenizer, reranker)
    if not ids:
        return PairForm()
    if text is PairText.JOINED:
        if config.get("model_type") != _QWEN3:
            raise ConfigError(f"{folder}: its chat template has no roles query and document; use --chat-template")
        text = PairText.QWEN3
    return replace(form, kind=ScoreKind.TOKENS, text=text, rows=PoolingRows(logits_of=ids))


def _has_pair_roles(template: str) -> bool:
    """Return True if a chat template has the roles "query" and "document"."""
    quote = '"' if '"query"' in template else "'"
    return all(f"{quote}{role}{quote}" in template for role in ("query", "document"))


def _score_tokens(folder: Path, config: Any, tokenizer: ModelTokenizer, reranker: bool) -> tuple[int, ...]:
    """Return the ids of the true token and, if there is one, of the false token; () for a checkpoint that does not
    score by tokens."""
    if (folder / "modules.json").is_file():
        modules = list(modules_of(folder))
        if [kind for kind, _ in modules] != ["Transformer", "LogitScore"]:
            return ()
        path = folder / modules[1][1] / "config.json"
        module = read_json(path, {})
        ids = [module.get("true_token_id"), module.get("false_token_id")]
        ids = ids[:1] if ids[1] is None else ids
        if not all(type(token) is int and 0 <= token < tokenizer.codec.get_vocab_size() for token in ids):
            raise ConfigError(f"{path}: true_token_id and false_token_id are not tokens of the vocabulary")
        return tuple(ids)
    texts = config.get("classifier_from_token")
    if texts is None and config.get("model_type") == _QWEN3 and reranker:
        texts = ["no", "yes"]
    if texts is None:
        return ()
    if not isinstance(texts, list) or len(texts) != 2:
        raise ConfigError(
            f"{folder / 'config.json'}: classifier_from_token names {texts!r}, not a false and a true token"
        )
    ids = [tokenizer.codec.token_to_id(str(word)) for word in reversed(texts)]
    if None in ids:
        raise ConfigError(f"{folder / 'config.json'}: classifier_from_token names {texts!r}, which are not tokens")
    return tuple(ids)


def _activated(folder: Path, st_config: Any, config: Any) -> bool:
    """Return whether a score is the sigmoid of its logit. Raises ConfigError for an unsupported activation."""
    nested = config.get("sentence_transformers")
    name = st_config.get("activation_fn") or config.get("sbert_ce_default_activation_function")
    name = name or (nested.get("activation_fn") if isinstance(nested, dict) else None)
    kind = str(name or "Sigmoid").rpartition(".")[2]
    if kind not in ("Sigmoid", "Identity"):
        raise ConfigError(f"{folder}: scores by activation_fn {kind}; only Sigmoid and Identity are supported")
    return kind == "Sigmoid"


def _instruction(folder: Path, st_config: Any) -> str:
    prompts, default = prompts_of(folder, st_config)
    return prompts[default] if default else ""
