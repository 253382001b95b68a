"""Handlers of the gRPC calls Embed and Score."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from pillion.errors import FieldViolation, InvalidRequest
from pillion.gateway.gateway import Gateway
from pillion.gateway.grpc_api.gateway_servicer import GrpcCall, caller, parsed, timeout_of
from pillion.gateway.pooling.pair_forms import TextPair
from pillion.gateway.pooling.text_call import MAX_TEXTS
from pillion.gateway.pooling.vectors import EmbeddedTexts, GatewayVectors
from pillion.gateway.request.validation import check_texts_message, request_label
from pillion.net.rpc import MAX_MESSAGE_BYTES
from pillion.observability import telemetry
from pillion.types import GenerateRequest
from pillion.v1 import common_pb2, gateway_pb2

VALUE_BYTES, ID_BYTES = 4, 5


def text_calls(gateway: Gateway, vectors: GatewayVectors) -> Mapping[str, GrpcCall]:
    """Return the gRPC calls of vectors and scores, by name. The end of a call cancels its remaining texts."""

    async def embed(request: bytes, context: Any) -> gateway_pb2.EmbedResponse:
        tenant = caller(gateway, context)
        asked, texts = await gateway.off_loop(tenant, len(request), _read_embed, request)
        found = await vectors.embed(
            texts,
            dimensions=asked.dimensions if asked.HasField("dimensions") else None,
            prompt_name=asked.prompt_name if asked.HasField("prompt_name") else None,
            cut_tokens=asked.truncate_prompt_tokens if asked.HasField("truncate_prompt_tokens") else None,
            tenant=tenant,
            timeout_s=timeout_of(context),
            parent=telemetry.extract(context.invocation_metadata()),
        )
        size_bytes = sum(VALUE_BYTES * len(vector) for vector in found.vectors)
        size_bytes += sum(ID_BYTES * len(ids) for ids in found.token_ids)
        if size_bytes > MAX_MESSAGE_BYTES:
            text = f"their vectors have {size_bytes} bytes, above the message limit of {MAX_MESSAGE_BYTES}; send fewer"
            raise InvalidRequest.of(FieldViolation("inputs", text))
        label = texts[0].request_id
        return await gateway.off_loop(tenant, size_bytes, _written, found, label)

    async def score(request: bytes, context: Any) -> gateway_pb2.ScoreResponse:
        tenant = caller(gateway, context)
        asked, pairs, shared = await gateway.off_loop(tenant, len(request), _read_score, request)
        found = await vectors.score(
            pairs,
            shared,
            instruction=asked.instruction if asked.HasField("instruction") else None,
            cut_tokens=asked.truncate_prompt_tokens if asked.HasField("truncate_prompt_tokens") else None,
            document_tokens=asked.max_tokens_per_doc or None,
            tenant=tenant,
            timeout_s=timeout_of(context),
            parent=telemetry.extract(context.invocation_metadata()),
        )
        return gateway_pb2.ScoreResponse(
            request_id=shared.request_id,
            model=found.model,
            scores=found.scores,
            usage=common_pb2.Usage(**asdict(found.usage)),
        )

    return {"Embed": GrpcCall(embed, raw=True), "Score": GrpcCall(score, raw=True)}


def _read_embed(raw: bytes) -> tuple[gateway_pb2.EmbedRequest, list[GenerateRequest]]:
    """Parse a serialized EmbedRequest, and its texts' requests. Raises InvalidRequest."""
    check_texts_message(raw)
    asked = parsed(raw, gateway_pb2.EmbedRequest)
    shared = _shared(asked)
    for number, one in enumerate(asked.inputs):
        if bool(one.text) is bool(one.token_ids):
            raise InvalidRequest.of(FieldViolation(f"inputs[{number}]", "needs one of text and token_ids"))
    return asked, [replace(shared, text=one.text, token_ids=tuple(one.token_ids)) for one in asked.inputs]


def _read_score(raw: bytes) -> tuple[gateway_pb2.ScoreRequest, list[TextPair], GenerateRequest]:
    """Parse a serialized ScoreRequest, and its pairs. Raises InvalidRequest."""
    check_texts_message(raw)
    asked = parsed(raw, gateway_pb2.ScoreRequest)
    queries, documents = list(asked.queries), list(asked.documents)
    if not 1 <= len(documents) <= MAX_TEXTS:
        raise InvalidRequest.of(FieldViolation("documents", f"{len(documents)} texts; expected 1 to {MAX_TEXTS}"))
    if len(queries) not in (1, len(documents)):
        text = f"{len(queries)} texts and {len(documents)} documents; expected one query, or one per document"
        raise InvalidRequest.of(FieldViolation("queries", text))
    for name, texts in (("queries", queries), ("documents", documents)):
        empty = next((number for number, text in enumerate(texts) if not text), None)
        if empty is not None:
            raise InvalidRequest.of(FieldViolation(f"{name}[{empty}]", "it is empty"))
    queries = queries if len(queries) == len(documents) else queries * len(documents)
    return asked, [TextPair(*pair) for pair in zip(queries, documents, strict=True)], _shared(asked)


def _shared(asked: gateway_pb2.EmbedRequest | gateway_pb2.ScoreRequest) -> GenerateRequest:
    label = request_label(asked.request_id)
    return GenerateRequest(model=asked.model, cache_salt=asked.cache_salt, request_id=label, priority=asked.priority)


def _written(found: EmbeddedTexts, request_id: str) -> gateway_pb2.EmbedResponse:
    return gateway_pb2.EmbedResponse(
        request_id=request_id,
        model=found.model,
        embeddings=[
            gateway_pb2.Embedding(values=vector, token_ids=ids)
            for vector, ids in zip(found.vectors, found.token_ids, strict=True)
        ],
        usage=common_pb2.Usage(**asdict(found.usage)),
    )
