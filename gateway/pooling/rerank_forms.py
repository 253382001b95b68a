"""Bodies of /rerank and /score, in the formats of vLLM, Jina and Cohere.

/rerank, /v1/rerank    vLLM's and Jina's: a query and documents; the best first, with their texts
/v2/rerank             Cohere's version 2: the same without the texts
/score, /v1/score      vLLM's: two lists of texts, 1:1, 1:N or N:N; a score per pair in order
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

# Names of the two fields of a score, in vLLM's versions.
SCORED_FIELDS = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))

B = TypeVar("B", bound="PairsBody")


class DocumentBody(msgspec.Struct, forbid_unknown_fields=True):
    """A document as an object.

    Attributes:
        text: its text.
    """

    text: str


class PairsBody(TextsBody, forbid_unknown_fields=True, kw_only=True):
    """Fields of the bodies of /rerank and of /score.

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
    """A parsed call of /rerank or /score.

    Attributes:
        pairs: pairs in order.
        shared: a request with the fields of all pairs' requests, but no text.
        names: the gateway's names of fields -> the client's.
    """

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
    query = _require_nonempty(body.query, "query")
    names = {f"inputs[{n}].query": "query" for n in range(len(documents))}
    for n, field in enumerate(documents):
        names[f"inputs[{n}]"] = names[f"inputs[{n}].document"] = field
    pairs = tuple(TextPair(query, document) for document in documents.values())
    return PairsRequest(body, pairs, body.shared(request_id), names)


def parse_score(raw: bytes, request_id: str) -> PairsRequest:
    """Parse the body of a call that scores pairs. Raises ApiError."""
    body = _read(raw, ScoreBody)
    sent = {name for pair in SCORED_FIELDS for name in pair if getattr(body, name) is not None}
    left, right = max(SCORED_FIELDS, key=lambda pair: len(sent & {*pair}))
    if sent != {left, right}:
        wrong = next((name for name in (left, right) if name not in sent), min(sent - {left, right}, default=left))
        listed = ", or ".join(" and ".join(pair) for pair in SCORED_FIELDS)
        raise refused(wrong, f"two fields are required, {listed}", "missing_required_parameter")
    queries, documents = _texts(getattr(body, left), left), _texts(getattr(body, right), right)
    if len(queries) not in (1, len(documents)):
        raise refused(left, f"{len(queries)} texts and {len(documents)} of {right}; expected 1:1, 1:N or N:N")
    repeats = 1 if len(queries) == len(documents) else len(documents)
    repeated = list(queries.items()) * repeats
    names: dict[str, str] = {}
    for n, ((query, _), document) in enumerate(zip(repeated, documents, strict=True)):
        names |= {f"inputs[{n}].query": query, f"inputs[{n}].document": document, f"inputs[{n}]": document}
    paired = zip(repeated, documents.values(), strict=True)
    pairs = tuple(TextPair(query, document) for (_, query), document in paired)
    return PairsRequest(body, pairs, body.shared(request_id), names)


def _read(raw: bytes, kind: type[B]) -> B:
    body = parse(raw, kind)
    if body.max_tokens_per_doc < 0:
        raise refused("max_tokens_per_doc", f"{body.max_tokens_per_doc} is less than 0")
    return body


def _texts(sent: str | Sequence[str | DocumentBody], name: str) -> dict[str, str]:
    """Return the texts of the field ``name``, by the client's names, e.g. ``documents[2]``. Raises ApiError."""
    if isinstance(sent, str):
        return {name: _require_nonempty(sent, name)}
    if not 1 <= len(sent) <= MAX_TEXTS:
        raise refused(name, f"{len(sent)} texts; expected 1 to {MAX_TEXTS}")
    texts = [item if isinstance(item, str) else item.text for item in sent]
    return {(field := f"{name}[{n}]"): _require_nonempty(text, field) for n, text in enumerate(texts)}


def _require_nonempty(text: str, field: str) -> str:
    if not text:
        raise refused(field, "it is empty")
    return text


def _ranked(parsed: PairsRequest, scored: ScoredPairs, with_texts: bool) -> list[dict[str, Any]]:
    """Return the ``top_n`` best documents, best first; ties in the order of the request."""
    body = parsed.body
    assert isinstance(body, RerankBody)
    shown = with_texts if body.return_documents is None else body.return_documents
    order = sorted(range(len(scored.scores)), key=lambda n: -scored.scores[n])
    results: list[dict[str, Any]] = []
    for n in order[: body.top_n or None]:
        document = {"document": {"text": parsed.pairs[n].document}} if shown else {}
        results.append({"index": n, **document, "relevance_score": scored.scores[n]})
    return results


def _usage(scored: ScoredPairs) -> dict[str, Any]:
    return {"prompt_tokens": scored.usage.prompt_tokens, "total_tokens": scored.usage.prompt_tokens}


def write_rerank(answer_id: str, parsed: PairsRequest, scored: ScoredPairs) -> bytes:
    """Encode the best documents, in vLLM's and Jina's format."""
    results = _ranked(parsed, scored, with_texts=True)
    answer = {"id": answer_id, "model": scored.model, "usage": _usage(scored), "results": results}
    return msgspec.json.encode(answer)


def write_cohere(answer_id: str, parsed: PairsRequest, scored: ScoredPairs) -> bytes:
    """Encode the best documents, in the format of Cohere's version 2."""
    meta = {
        "api_version": {"version": "2", "is_experimental": False},
        "billed_units": {"search_units": 1},
        "tokens": {"input_tokens": scored.usage.prompt_tokens, "output_tokens": 0},
    }
    results = _ranked(parsed, scored, with_texts=False)
    answer = {"id": answer_id, "results": results, "meta": meta, "model": scored.model, "usage": _usage(scored)}
    return msgspec.json.encode(answer)


def write_score(answer_id: str, parsed: PairsRequest, scored: ScoredPairs) -> bytes:
    """Encode a score per pair."""
    data = [{"index": n, "object": "score", "score": score} for n, score in enumerate(scored.scores)]
    return write_list(answer_id, scored.model, data, scored.usage)
