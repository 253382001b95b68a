"""Serves /classify and /v1/classify, in vLLM's form."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial

import msgspec
from msgspec import Raw
from starlette.routing import Route

from pillion.gateway.http_api.body_reading import parse
from pillion.gateway.http_api.http_call import Endpoint, HttpCall, reads_body
from pillion.gateway.http_api.model_calls import ModelCalls
from pillion.gateway.pooling.text_bodies import TextsBody, computed, requests_of, usage_of
from pillion.gateway.pooling.vectors import GatewayVectors, LabelledTexts
from pillion.types import GenerateRequest

_EXAMPLE = {"model": "demo", "input": ["The sea is blue.", "The land is dry."]}
# A probability takes about so many bytes in an answer.
VALUE_BYTES = 12


class ClassifyBody(TextsBody, forbid_unknown_fields=True, kw_only=True):
    """Describes the body of POST /v1/classify.

    Attributes:
        input: a text, token ids, or a list of either, at most 2,048; each gets a label.
        use_activation: whether the values are probabilities; default true. False gives logits.
    """

    input: Raw
    use_activation: bool | None = None


def classify_routes(calls: ModelCalls, vectors: GatewayVectors) -> list[Route]:
    """Returns the pages of labels for the table of the HTTP port."""
    api = ClassifyApi(calls, vectors)
    page = Endpoint("POST", api.classify, calls.gateway.tenant_of, ClassifyBody, example=_EXAMPLE, in_batches=True)
    return [Route(path, page) for path in ("/v1/classify", "/classify")]


class ClassifyApi:
    """Handles the calls for labels; :class:`pillion.gateway.http_api.http_call.Endpoint` turns what the handler raises
    into responses."""

    def __init__(self, calls: ModelCalls, vectors: GatewayVectors) -> None:
        self._calls = calls
        self._vectors = vectors

    @reads_body
    async def classify(self, call: HttpCall, raw: bytes) -> None:
        """Tells the labels of texts apart."""
        gateway = self._calls.gateway
        body, names, requests = await self._calls.read(call, _read, raw, call.request_id, gateway.longest_tokens)
        classify = partial(self._vectors.classify, requests, activated=body.use_activation is not False)
        found = await computed(self._calls, call, body, names, classify)
        size_bytes = VALUE_BYTES * sum(map(len, found.values))
        await call.answer(
            200, await gateway.off_loop(call.tenant, size_bytes, _written, f"classify-{call.answer_id}", found)
        )


def _read(raw: bytes, request_id: str, most_ids: int) -> tuple[ClassifyBody, Mapping[str, str], list[GenerateRequest]]:
    """Reads a body. Returns it, the client's names of its texts, and their requests. Raises ApiError."""
    body = parse(raw, ClassifyBody)
    return body, *requests_of(body.input, most_ids, body.shared(request_id))


def _written(answer_id: str, found: LabelledTexts) -> bytes:
    data = [
        {
            "index": n,
            "label": found.labels[int(values.argmax())],
            "probs": values.tolist(),
            "num_classes": len(values),
        }
        for n, values in enumerate(found.values)
    ]
    return msgspec.json.encode(
        {
            "id": answer_id,
            "object": "list",
            "created": int(time.time()),
            "model": found.model,
            "data": data,
            "usage": {**usage_of(found.usage), "completion_tokens": 0},
        }
    )
