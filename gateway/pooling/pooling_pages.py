"""Endpoints of vectors, labels and scores; the *_form modules parse and encode their bodies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from starlette.routing import Route

from pillion.errors import PillionError
from pillion.gateway.http_api.http_call import Endpoint, HttpCall, reads_body
from pillion.gateway.http_api.http_errors import from_pillion
from pillion.gateway.http_api.model_calls import ModelCalls
from pillion.gateway.pooling.classify_form import ClassifyBody, read_classify, write_labels
from pillion.gateway.pooling.embeddings_form import EmbeddingsBody, read_embeddings, write_vectors
from pillion.gateway.pooling.rerank_forms import (
    PairsRequest,
    RerankBody,
    ScoreBody,
    parse_score,
    read_rerank,
    write_cohere,
    write_rerank,
    write_score,
)
from pillion.gateway.pooling.text_bodies import TextsBody
from pillion.gateway.pooling.vectors import GatewayVectors, ScoredPairs

# Approximate size of a vector's value in a response.
VALUE_BYTES = 12
_RERANK_EXAMPLE = {"model": "demo", "query": "What is blue?", "documents": ["The sea", "The land"], "top_n": 1}

T = TypeVar("T")


def pooling_routes(calls: ModelCalls, vectors: GatewayVectors) -> list[Route]:
    """Return the routes of vectors, labels and scores."""
    api, tenant_of = PoolingApi(calls, vectors), calls.gateway.tenant_of
    embeddings = {"model": "demo", "input": ["The sea", "The land"]}
    classify = {"model": "demo", "input": ["The sea is blue.", "The land is dry."]}
    score = {"model": "demo", "text_1": "What is blue?", "text_2": ["The sea", "The land"]}
    pages: list[tuple[tuple[str, ...], Callable[[HttpCall], Awaitable[None]], type, Mapping[str, Any]]] = [
        (("/v1/embeddings",), api.embeddings, EmbeddingsBody, embeddings),
        (("/v1/classify", "/classify"), api.classify, ClassifyBody, classify),
        (("/v1/rerank", "/rerank"), api.rerank, RerankBody, _RERANK_EXAMPLE),
        (("/v2/rerank",), api.rerank_of_cohere, RerankBody, _RERANK_EXAMPLE),
        (("/v1/score", "/score"), api.score, ScoreBody, score),
    ]
    return [
        Route(path, Endpoint("POST", handler, tenant_of, body, example=example, in_batches=True))
        for paths, handler, body, example in pages
        for path in paths
    ]


class PoolingApi:
    """Handlers of vectors, labels and scores. :class:`pillion.gateway.http_api.http_call.Endpoint` converts their
    exceptions to responses."""

    def __init__(self, calls: ModelCalls, vectors: GatewayVectors) -> None:
        self._calls = calls
        self._gateway = calls.gateway
        self._vectors = vectors

    @reads_body
    async def embeddings(self, call: HttpCall, raw: bytes) -> None:
        """Compute the vectors of texts."""
        max_ids = self._gateway.longest_tokens
        body, names, requests = await self._calls.read(call, read_embeddings, raw, call.request_id, max_ids)
        embed = partial(self._vectors.embed, requests, dimensions=body.dimensions, prompt_name=body.prompt_name)
        vectors = await self._compute(call, body, names, embed)
        size_bytes = VALUE_BYTES * sum(map(len, vectors.vectors))
        await self._answer(call, size_bytes, write_vectors, vectors, body.encoding_format)

    @reads_body
    async def classify(self, call: HttpCall, raw: bytes) -> None:
        """Classify texts."""
        max_ids = self._gateway.longest_tokens
        body, names, requests = await self._calls.read(call, read_classify, raw, call.request_id, max_ids)
        classify = partial(self._vectors.classify, requests, activated=body.use_activation is not False)
        labels = await self._compute(call, body, names, classify)
        size_bytes = VALUE_BYTES * sum(map(len, labels.values))
        await self._answer(call, size_bytes, write_labels, f"classify-{call.answer_id}", labels)

    @reads_body
    async def rerank(self, call: HttpCall, raw: bytes) -> None:
        """Rank documents, in vLLM's and Jina's format."""
        await self._score(call, raw, read_rerank, partial(write_rerank, f"rerank-{call.answer_id}"))

    @reads_body
    async def rerank_of_cohere(self, call: HttpCall, raw: bytes) -> None:
        """Rank documents, in the format of Cohere's version 2."""
        await self._score(call, raw, read_rerank, partial(write_cohere, f"rerank-{call.answer_id}"))

    @reads_body
    async def score(self, call: HttpCall, raw: bytes) -> None:
        """Score pairs of texts, in vLLM's format."""
        await self._score(call, raw, parse_score, partial(write_score, f"score-{call.answer_id}"))

    async def _score(
        self,
        call: HttpCall,
        raw: bytes,
        read: Callable[[bytes, str], PairsRequest],
        write: Callable[[PairsRequest, ScoredPairs], bytes],
    ) -> None:
        parsed = await self._calls.read(call, read, raw, call.request_id)
        body = parsed.body
        score = partial(
            self._vectors.score,
            parsed.pairs,
            parsed.shared,
            document_tokens=body.max_tokens_per_doc or None,
            instruction=body.instruction,
        )
        scores = await self._compute(call, body, parsed.names, score)
        size_bytes = sum(64 + len(pair.document) for pair in parsed.pairs)
        await self._answer(call, size_bytes, write, parsed, scores)

    async def _compute(
        self, call: HttpCall, body: TextsBody, names: Mapping[str, str], compute: Callable[..., Awaitable[T]]
    ) -> T:
        """Return the result of ``compute``, called with the arguments that all endpoints share.

        ``names``: the gateway's names of texts -> the client's, for errors. Raises ApiError.
        """
        entry = await self._calls.entry(body.model, call.tenant)
        try:
            return await compute(
                cut_tokens=body.truncate_prompt_tokens,
                tenant=call.tenant,
                timeout_s=call.read_timeout_s,
                parent=call.trace_parent(),
                entry=entry,
            )
        except PillionError as error:
            raise from_pillion(error, names) from None

    async def _answer(self, call: HttpCall, size_bytes: int, write: Callable[..., bytes], *written: Any) -> None:
        """Encode and send an answer of about ``size_bytes``."""
        await call.answer(200, await self._gateway.off_loop(call.tenant, size_bytes, write, *written))
