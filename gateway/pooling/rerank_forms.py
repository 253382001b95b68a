"""Bodies of /rerank and /score, in the formats of vLLM, Jina and Cohere.

/rerank, /v1/rerank    vLLM's and Jina's: a query and documents; the best first, with their texts
/v2/rerank             Cohere's version 2: the same without the texts
/score, /v1/score      vLLM's: texts and texts, 1:1, 1:N or N:N; a score per pair in order
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from pillion.gateway.http_api.body_reading import parse
from pillion.gateway.http_api.http_errors import refused
from pillion.gateway.http_api.openai_fields import Int
from pillion.gateway.pooling.pair_forms import TextPair
from pillion.gateway.pooling.text_bodies import TextsBody, write_list
from pillion.gateway.pooling.text_call import MAX_TEXTS
from pillion.gateway.pooling.vectors import ScoredPairs
from pillion.types import GenerateRequest

COHERE_VERSION = "2"

SCORED_FIELDS = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))

B = TypeVar("B", bound="PairsBody")


class DocumentBody(msgspec.Struct, forbid_unknown_fields=True):
    """A document as an object.

    Attributes:
        text: its text.
    """

    text: str


class PairsBody(TextsBody, forbid_unknown_fields=True, kw_only=True):
    """Fields of the bodies of both kinds of endpoints.

    Attributes:
        max_tokens_per_doc: max tokens of a document, which is truncated; default 0: no limit.
        instruction: a reranker's instruction; default: the checkpoint's.
    """

    max_tokens_per_doc: Int = 0
    instruction: str | None = None


class RerankBody(PairsBody, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/rerank.

    Attributes:
        query: a text.
        documents: texts, or objects with a text, at most 2,048.
        top_n: number of best documents to return; default, and 0: all.
        return_documents: whether to return the documents' texts; default: true, at /v2/rerank false.
        rank_fields: a document is ranked by its text.
    """

    query: str
    documents: list[str | DocumentBody]
    top_n: Int | None = None
    return_documents: bool | None = None
    rank_fields: Raw = Raw()


class ScoreBody(PairsBody, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/score.

    Attributes:
        text_1, data_1, queries: a text, or one per second text; vLLM's names of the same field.
        text_2, data_2, documents, items: a text, or up to 2,048. text_2 goes with text_1, data_2 with data_1, documents
            and items with queries.
    """

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None


@dataclass(frozen=True, slots=True)
class PairsRequest:
    """A parsed call: its pairs, the fields that their requests share, and the client's names of fields."""

    body: PairsBody
    pairs: tuple[TextPair, ...]
    shared: GenerateRequest
    names: Mapping[str, str]


def read_rerank(raw: bytes, request_id: str) -> PairsRequest:
    """Parse the body of a call that ranks documents. Raises ApiError."""
    body = _read(raw, RerankBody)
    if body.top_n is not None and body.top_n < 0:
        raise refused("top_n", f"{body.top_n} is less than 0")
    documents = _texts(body.documents, "documents")
    query = _filled(body.query, "query")
    names = {f"inputs[{n}].query": "query" for n in range(len(documents))}
    for n, field in enumerate(documents):
        names[f"inputs[{n}]"] = names[f"inputs[{n}].document"] = field
    pairs = tuple(TextPair(query, document) for document in documents.values())
    return PairsRequest(body, pairs, body.shared(request_id), names)


def parse_score(raw: bytes, request_id: str) -> PairsRequest:
    """Parse the body of a call that scores pairs. Raises ApiError."""
    body = _read(raw, ScoreBody)
    sent = {name for pair in SCORED_FIELDS for name in pair if getattr(body, name) is not None}
    one, other = max(SCORED_FIELDS, key=lambda pair: len(sent & {*pair}))
    if sent != {one, other}:
        wrong = next((name for name in (one, other) if name not in sent), min(sent - {one, other}, default=one))
        listed = ", or ".join(" and ".join(pair) for pair in SCORED_FIELDS)
        raise refused(wrong, f"two fields are required, {listed}", "missing_required_parameter")
    first, second = _texts(getattr(body, one), one), _texts(getattr(body, other), other)
    if len(first) not in (1, len(second)):
        raise refused(one, f"{len(first)} texts and {len(second)} of {other}; expected 1:1, 1:N or N:N")
    asked = list(first.items()) if len(first) == len(second) else list(first.items()) * len(second)
    names: dict[str, str] = {}
    for n, ((query, _), document) in enumerate(zip(asked, second, strict=True)):
        names |= {f"inputs[{n}].query": query, f"inputs[{n}].document": document, f"inputs[{n}]": document}
    pairs = tuple(TextPair(query, document) for (_, query), document in zip(asked, second.values(), strict=True))
    return PairsRequest(body, pairs, body.shared(request_id), names)


def _read(raw: bytes, kind: type[B]) -> B:
    body = parse(raw, kind)
    if body.max_tokens_per_doc < 0:
        raise refused("max_tokens_per_doc", f"{body.max_tokens_per_doc} is less than 0")
    return body


def _texts(sent: str | Sequence[str | DocumentBody], name: str) -> dict[str, str]:
    """Return the texts of the field ``name``, by their fields' names. Raises ApiError."""
    if isinstance(sent, str):
        return {name: _filled(sent, name)}
    if not 1 <= len(sent) <= MAX_TEXTS:
        raise refused(name, f"{len(sent)} texts; expected 1 to {MAX_TEXTS}")
    texts = [one if isinstance(one, str) else one.text for one in sent]
    return {(field := f"{name}[{n}]"): _filled(text, field) for n, text in enumerate(texts)}


def _filled(text: str, field: str) -> str:
    if not text:
        raise refused(field, "it is empty")
    return text


def _ranked(asked: PairsRequest, found: ScoredPairs, with_texts: bool) -> list[dict[str, Any]]:
    """Return the best documents, best first; documents of equal score keep their order."""
    body = asked.body
    assert isinstance(body, RerankBody)
    shown = with_texts if body.return_documents is None else body.return_documents
    order = sorted(range(len(found.scores)), key=lambda n: -found.scores[n])
    results: list[dict[str, Any]] = []
    for n in order[: body.top_n or None]:
        document = {"document": {"text": asked.pairs[n].document}} if shown else {}
        results.append({"index": n, **document, "relevance_score": found.scores[n]})
    return results


def _usage(found: ScoredPairs) -> dict[str, Any]:
    return {"prompt_tokens": found.usage.prompt_tokens, "total_tokens": found.usage.prompt_tokens}


def write_rerank(answer_id: str, asked: PairsRequest, found: ScoredPairs) -> bytes:
    """Encode the best documents, in vLLM's and Jina's format."""
    results = _ranked(asked, found, with_texts=True)
    answer = {"id": answer_id, "model": found.model, "usage": _usage(found), "results": results}
    return msgspec.json.encode(answer)


def write_cohere(answer_id: str, asked: PairsRequest, found: ScoredPairs) -> bytes:
    """Encode the best documents, in the format of Cohere's version 2."""
    meta = {
        "api_version": {"version": COHERE_VERSION, "is_experimental": False},
        "billed_units": {"search_units": 1},
        "tokens": {"input_tokens": found.usage.prompt_tokens, "output_tokens": 0},
    }
    results = _ranked(asked, found, with_texts=False)
    answer = {"id": answer_id, "results": results, "meta": meta, "model": found.model, "usage": _usage(found)}
    return msgspec.json.encode(answer)


def write_score(answer_id: str, asked: PairsRequest, found: ScoredPairs) -> bytes:
    """Encode a score per pair."""
    data = [{"index": n, "object": "score", "score": score} for n, score in enumerate(found.scores)]
    return write_list(answer_id, found.model, data, found.usage)
