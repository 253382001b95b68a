"""Says how a checkpoint makes the score of a pair of texts, a query and a document.

    kind      what a request's row is                     the score
    COSINE    the vector of one of the two texts          the cosine of both vectors
    LABELS    the logits of a classification head, [1]    the logit as a probability, as activation_fn has it
    TOKENS    the logits of a true and a false token      how much larger the true one is, likewise

Both of the latter kinds read a pair as one text. A chat template that has the roles "query" and "document" makes it, as
sentence-transformers and vLLM have such templates; without one, a head reads the two texts one after the other, and a
Qwen3-Reranker, whose own template knows no such roles, gets the text of its model card.

    config.json                        ForSequenceClassification: LABELS; classifier_from_token, vLLM's: TOKENS
    modules.json, 1_LogitScore         sentence-transformers' form of TOKENS
    config_sentence_transformers.json  activation_fn; the prompt that stands for the instruction
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

# The published Qwen3-Reranker checkpoints are plain Qwen3ForCausalLM; nothing but their names says what they are.
_RERANKER, _QWEN3 = "reranker", "qwen3"
_YES, _NO = "yes", "no"
QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_QWEN3_TEXT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct"
    ' provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


@dataclass(frozen=True, slots=True)
class TextPair:
    """Holds two texts that are scored together: what is asked, and what may answer it."""

    query: str
    document: str


class ScoreKind(enum.Enum):
    """Says what the row of a request is from which a score is made."""

    COSINE = "cosine"
    LABELS = "labels"
    TOKENS = "tokens"


class PairText(enum.Enum):
    """Says how a pair becomes one text."""

    TEMPLATE = "template"
    JOINED = "joined"
    QWEN3 = "qwen3"
    PAIR = "pair"


@dataclass(frozen=True, slots=True)
class PairForm:
    """Describes how a checkpoint scores pairs.

    Attributes:
        kind: what a request's row is.
        text: how a pair becomes one text; it does not matter for COSINE.
        rows: what a request's row is, for LABELS and TOKENS: for these, the logits of the true token and, where the
            checkpoint has one, of the false one.
        activated: whether a score is the logit's probability (its sigmoid), and not the logit.
        instruction: what the model is told to look for; "" for what its template has.
        max_tokens: the most tokens of a pair that is read as one text; None: as many as the model takes.
    """

    kind: ScoreKind = ScoreKind.COSINE
    text: PairText = PairText.JOINED
    rows: PoolingRows = LAST_ROW
    activated: bool = True
    instruction: str = ""
    max_tokens: int | None = None

    def told(self, instruction: str | None) -> PairForm:
        """Returns the form with another instruction; None changes nothing. Raises InvalidRequest where there is no
        place for one."""
        if instruction is None:
            return self
        if self.text in (PairText.JOINED, PairText.PAIR):
            raise InvalidRequest.of(FieldViolation("instruction", "the model has no place for one before a pair"))
        return replace(self, instruction=instruction)

    def request(self, pair: TextPair, shared: GenerateRequest) -> GenerateRequest:
        """Returns the request of a pair that is read as one text; ``shared`` has all else."""
        if self.text is PairText.JOINED:
            return replace(shared, text=pair.query + pair.document)
        if self.text is PairText.QWEN3:
            told = self.instruction or QWEN3_INSTRUCTION
            text = _QWEN3_TEXT.format(instruction=told, query=pair.query, document=pair.document)
            return replace(shared, text=text)
        messages = (ChatMessage("query", pair.query), ChatMessage("document", pair.document))
        if not self.instruction:
            return replace(shared, messages=messages, chat=ChatOptions(add_generation_prompt=True))
        kwargs = json.dumps({"instruction": self.instruction})
        chat = ChatOptions(add_generation_prompt=True, chat_template_kwargs=kwargs)
        return replace(shared, messages=(ChatMessage("system", self.instruction), *messages), chat=chat)

    def score(self, row: Vector) -> float:
        """Returns the score of a pair by its row. Raises Internal for a row of another length than the form has."""
        if len(row) != max(len(self.rows.logits_of), 1):
            raise Internal(f"a worker of another version gave {len(row)} numbers for a score")
        logit = float(row[0]) - (float(row[1]) if len(row) > 1 else 0.0)
        return sigmoid(logit) if self.activated else logit


def cosine(one: Vector, other: Vector) -> float:
    """Returns the cosine of two vectors, summed up in float64; 0 where one of them is nothing but zeros."""
    left, right = one.astype(np.float64), other.astype(np.float64)
    length = math.sqrt(float(left @ left) * float(right @ right))
    return float(left @ right) / length if length else 0.0


def named_reranker(name: str) -> bool:
    """Returns whether a model's name says that it is a reranker. The configs of Qwen3's rerankers do not say it."""
    return _RERANKER in name.lower()


def read_pair_form(folder: Path, tokenizer: ModelTokenizer, reranker: bool) -> PairForm:
    """Reads how the checkpoint in a folder scores pairs; ``reranker`` says whether it is a reranker by its name. Raises
    ConfigError, by its name, for what is not supported."""
    config = read_json(folder / "config.json", {})
    own = read_json(folder / "config_sentence_transformers.json", {})
    text = PairText.TEMPLATE if _knows_pairs(tokenizer.chat_template) else PairText.JOINED
    if text is PairText.JOINED and is_encoder(config):
        # An encoder's tokenizer joins the two texts, and marks the second one.
        text = PairText.PAIR
    form = PairForm(
        text=text,
        activated=_activated(folder, own, config),
        instruction=_instruction(folder, own),
        max_tokens=tokenizer_bound(folder),
    )
    if labels := labels_of(config):
        if labels != 1:
            raise ConfigError(
                f"{folder / 'config.json'}: a head with {labels} labels; a score needs one, /v1/classify any number"
            )
        return replace(form, kind=ScoreKind.LABELS, rows=label_rows(config))
    ids = _score_tokens(folder, config, tokenizer, reranker)
    if not ids:
        return PairForm()
    if text is PairText.JOINED:
        if config.get("model_type") != _QWEN3:
            raise ConfigError(f"{folder}: its chat template has no roles query and document; --chat-template gives one")
        text = PairText.QWEN3
    return replace(form, kind=ScoreKind.TOKENS, text=text, rows=PoolingRows(logits_of=ids))


def _knows_pairs(template: str) -> bool:
    """Returns whether a chat template has the roles of a pair."""
    mark = '"' if '"query"' in template else "'"
    return all(f"{mark}{role}{mark}" in template for role in ("query", "document"))


def _score_tokens(folder: Path, config: Any, tokenizer: ModelTokenizer, reranker: bool) -> tuple[int, ...]:
    """Returns the ids of the true and perhaps the false token; () for a checkpoint that scores no pairs by tokens."""
    if (folder / "modules.json").is_file():
        modules = list(modules_of(folder))
        if [kind for kind, _ in modules] != ["Transformer", "LogitScore"]:
            return ()
        path = folder / modules[1][1] / "config.json"
        found = read_json(path, {})
        ids = [found.get("true_token_id"), found.get("false_token_id")]
        ids = ids[:1] if ids[1] is None else ids
        if not all(type(one) is int and 0 <= one < tokenizer.codec.get_vocab_size() for one in ids):
            raise ConfigError(f"{path}: true_token_id and false_token_id name no tokens of the vocabulary")
        return tuple(ids)
    words = config.get("classifier_from_token")
    if words is None and config.get("model_type") == _QWEN3 and reranker:
        words = [_NO, _YES]
    if words is None:
        return ()
    if not isinstance(words, list) or len(words) != 2:
        raise ConfigError(
            f"{folder / 'config.json'}: classifier_from_token names {words!r}, not a false and a true token"
        )
    ids = [tokenizer.codec.token_to_id(str(word)) for word in reversed(words)]
    if None in ids:
        raise ConfigError(f"{folder / 'config.json'}: classifier_from_token names {words!r}, which are no tokens")
    return tuple(ids)


def _activated(folder: Path, own: Any, config: Any) -> bool:
    """Returns whether scores are probabilities. Raises ConfigError for another function of logits."""
    of_config = config.get("sentence_transformers")
    old = config.get("sbert_ce_default_activation_function")
    named = own.get("activation_fn") or old or (of_config.get("activation_fn") if isinstance(of_config, dict) else None)
    kind = str(named or "Sigmoid").rpartition(".")[2]
    if kind not in ("Sigmoid", "Identity"):
        raise ConfigError(f"{folder}: scores by activation_fn {kind}; only Sigmoid and Identity are supported")
    return kind == "Sigmoid"


def _instruction(folder: Path, own: Any) -> str:
    prompts, default = prompts_of(folder, own)
    return prompts[default] if default else ""
