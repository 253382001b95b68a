"""Bodies of /v1/embeddings, in OpenAI's format."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import msgspec
from msgspec import Raw

from pillion.gateway.http_api.body_reading import given, parse
from pillion.gateway.http_api.http_errors import refused
from pillion.gateway.http_api.openai_fields import Int
from pillion.gateway.http_api.openai_requests import read_messages, template_kwargs
from pillion.gateway.pooling.pooling_files import Vector
from pillion.gateway.pooling.text_bodies import TextsBody, requests_of, usage_of
from pillion.gateway.pooling.vectors import EmbeddedTexts
from pillion.types import ChatOptions, GenerateRequest

Encoding = Literal["float", "base64"]


class EmbeddingsBody(TextsBody, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/embeddings.

    Attributes:
        input: a text, token ids, or a list of either, at most 2,048; each gets a vector.
        messages: a conversation instead of input, as in vLLM, converted to a text by the chat template.
        add_generation_prompt: whether that text ends with the start of the assistant's message; default: false.
        continue_final_message: whether that text ends inside the last message.
        chat_template_kwargs: further variables of the model's chat template; at most 16 KiB.
        encoding_format: "float", or "base64" of float32 values, little-endian; default "float".
        dimensions: number of leading values of each vector to return; default: all.
        prompt_name: the checkpoint's prompt before each text; default: the one that the checkpoint names; "" for none.
        normalize: the checkpoint decides whether vectors are normalized.
    """

    input: Raw = Raw()
    messages: Raw = Raw()
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Raw = Raw()
    encoding_format: Encoding = "float"
    dimensions: Int | None = None
    prompt_name: str | None = None
    normalize: Raw = Raw()


def read_embeddings(
    raw: bytes, request_id: str, max_ids: int
) -> tuple[EmbeddingsBody, Mapping[str, str], list[GenerateRequest]]:
    """Parse a body. Returns it, the client's names of its texts, and their requests. Raises ApiError."""
    body = parse(raw, EmbeddingsBody)
    if given(body.input) == given(body.messages):
        raise refused("input", "exactly one of input and messages is required", "missing_required_parameter")
    shared = body.shared(request_id)
    if not given(body.messages):
        return body, *requests_of(body.input, max_ids, shared)
    options = ChatOptions(
        add_generation_prompt=bool(body.add_generation_prompt),
        continue_final_message=bool(body.continue_final_message),
        chat_template_kwargs=template_kwargs(body.chat_template_kwargs),
    )
    request = replace(shared, messages=read_messages(body.messages), chat=options)
    return body, {"inputs[0]": "messages"}, [request]


def write_vectors(embedded: EmbeddedTexts, encoding: Encoding) -> bytes:
    """Encode the vectors of a call's texts, in OpenAI's format."""

    def encode(vector: Vector) -> Any:
        return vector.tolist() if encoding == "float" else base64.b64encode(vector.astype("<f4").tobytes()).decode()

    data = [
        {"object": "embedding", "index": n, "embedding": encode(vector)} for n, vector in enumerate(embedded.vectors)
    ]
    answer = {"object": "list", "data": data, "model": embedded.model, "usage": usage_of(embedded.usage)}
    return msgspec.json.encode(answer)
