"""Lists the pages of vectors, labels and scores for the HTTP port."""

from __future__ import annotations

from starlette.routing import Route

from pillion.config import GatewayFlags
from pillion.gateway.http_api.model_calls import ModelCalls
from pillion.gateway.pooling.classify_api import classify_routes
from pillion.gateway.pooling.embeddings_api import embedding_routes
from pillion.gateway.pooling.rerank_api import rerank_routes


def pooling_routes(calls: ModelCalls, flags: GatewayFlags) -> list[Route]:
    """Returns all pages of vectors, labels and scores."""
    return [*embedding_routes(calls, flags), *classify_routes(calls, flags), *rerank_routes(calls, flags)]
