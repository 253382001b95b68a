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


def text_calls(gateway: Gateway, vectors: GatewayVectors) -> Mapping[str, GrpcCall]:
    """Return the gRPC calls of vectors and scores, by name. The end of a call cancels its remaining texts."""

    async def embed(request: bytes, context: Any) -> gateway_pb2.EmbedResponse:
        tenant = caller(gateway, context)
        message, texts = await gateway.off_loop(tenant, len(request), _read_embed, request)
        embedded = await vectors.embed(
            texts,
            dimensions=message.dimensions if message.HasField("dimensions") else None,
            prompt_name=message.prompt_name if message.HasField("prompt_name") else None,
            cut_tokens=message.truncate_prompt_tokens if message.HasField("truncate_prompt_tokens") else None,
            tenant=tenant,
            timeout_s=timeout_of(context),
            parent=telemetry.extract(context.invocation_metadata()),
        )
        # A value is a float32, and a token id a varint of at most 5 bytes.
        size_bytes = sum(4 * len(vector) for vector in embedded.vectors)
        size_bytes += sum(5 * len(ids) for ids in embedded.token_ids)
        if size_bytes > MAX_MESSAGE_BYTES:
            text = f"their vectors have {size_bytes} bytes, above the message limit of {MAX_MESSAGE_BYTES}; send fewer"
            raise InvalidRequest.of(FieldViolation("inputs", text))
        label = texts[0].request_id
        return await gateway.off_loop(tenant, size_bytes, _embed_response, embedded, label)

    async def score(request: bytes, context: Any) -> gateway_pb2.ScoreResponse:
        tenant = caller(gateway, context)
        message, pairs, shared = await gateway.off_loop(tenant, len(request), _read_score, request)
        scored = await vectors.score(
            pairs,
            shared,
            instruction=message.instruction if message.HasField("instruction") else None,
            cut_tokens=message.truncate_prompt_tokens if message.HasField("truncate_prompt_tokens") else None,
            document_tokens=message.max_tokens_per_doc or None,
            tenant=tenant,
            timeout_s=timeout_of(context),
            parent=telemetry.extract(context.invocation_metadata()),
        )
        return gateway_pb2.ScoreResponse(
            request_id=shared.request_id,
            model=scored.model,
            scores=scored.scores,
            usage=common_pb2.Usage(**asdict(scored.usage)),
        )

    return {"Embed": GrpcCall(embed, raw=True), "Score": GrpcCall(score, raw=True)}


def _read_embed(raw: bytes) -> tuple[gateway_pb2.EmbedRequest, list[GenerateRequest]]:
    """Parse a serialized EmbedRequest; return it with the requests of its texts. Raises InvalidRequest."""
    check_texts_message(raw)
    message = parsed(raw, gateway_pb2.EmbedRequest)
    shared = _shared_fields(message)
    for number, one in enumerate(message.inputs):
        if bool(one.text) is bool(one.token_ids):
            raise InvalidRequest.of(FieldViolation(f"inputs[{number}]", "needs one of text and token_ids"))
    return message, [replace(shared, text=one.text, token_ids=tuple(one.token_ids)) for one in message.inputs]


def _read_score(raw: bytes) -> tuple[gateway_pb2.ScoreRequest, list[TextPair], GenerateRequest]:
    """Parse a serialized ScoreRequest; return it, its pairs, and a request with their shared fields. Raises
    InvalidRequest."""
    check_texts_message(raw)
    message = parsed(raw, gateway_pb2.ScoreRequest)
    queries, documents = list(message.queries), list(message.documents)
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
    return message, [TextPair(*pair) for pair in zip(queries, documents, strict=True)], _shared_fields(message)


def _shared_fields(message: gateway_pb2.EmbedRequest | gateway_pb2.ScoreRequest) -> GenerateRequest:
    label = request_label(message.request_id)
    return GenerateRequest(
        model=message.model, cache_salt=message.cache_salt, request_id=label, priority=message.priority
    )


def _embed_response(embedded: EmbeddedTexts, request_id: str) -> gateway_pb2.EmbedResponse:
    return gateway_pb2.EmbedResponse(
        request_id=request_id,
        model=embedded.model,
        embeddings=[
            gateway_pb2.Embedding(values=vector, token_ids=ids)
            for vector, ids in zip(embedded.vectors, embedded.token_ids, strict=True)
        ],
        usage=common_pb2.Usage(**asdict(embedded.usage)),
    )
