"""Bodies of /classify and /v1/classify, in vLLM's format."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Raw

from pillion.gateway.http_api.body_reading import parse
from pillion.gateway.pooling.text_bodies import TextsBody, requests_of, write_list
from pillion.gateway.pooling.vectors import LabelledTexts
from pillion.types import GenerateRequest


class ClassifyBody(TextsBody, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/classify.

    Attributes:
        input: a text, token ids, or a list of either, at most 2,048; each gets a label.
        use_activation: whether to return probabilities (default true) or logits.
    """

    input: Raw
    use_activation: bool | None = None


def read_classify(
    raw: bytes, request_id: str, max_ids: int
) -> tuple[ClassifyBody, Mapping[str, str], list[GenerateRequest]]:
    """Parse a body. Returns it, the client's names of its texts, and their requests. Raises ApiError."""
    body = parse(raw, ClassifyBody)
    return body, *requests_of(body.input, max_ids, body.shared(request_id))


def write_labels(answer_id: str, labelled: LabelledTexts) -> bytes:
    """Encode the labels of a call's texts, in vLLM's format."""
    data = [
        {
            "index": n,
            "label": labelled.labels[int(values.argmax())],
            "probs": values.tolist(),
            "num_classes": len(values),
        }
        for n, values in enumerate(labelled.values)
    ]
    return write_list(answer_id, labelled.model, data, labelled.usage)
