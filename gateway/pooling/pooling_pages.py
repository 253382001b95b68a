"""Lists the pages of vectors, labels and scores for the HTTP port."""

from __future__ import annotations

from starlette.routing import Route

from pillion.gateway.http_api.model_calls import ModelCalls
from pillion.gateway.pooling.classify_api import classify_routes
from pillion.gateway.pooling.embeddings_api import embedding_routes
from pillion.gateway.pooling.rerank_api import rerank_routes
from pillion.gateway.pooling.vectors import GatewayVectors


def pooling_routes(calls: ModelCalls, vectors: GatewayVectors) -> list[Route]:
    """Returns all pages of vectors, labels and scores."""
    return [*embedding_routes(calls, vectors), *classify_routes(calls, vectors), *rerank_routes(calls, vectors)]
