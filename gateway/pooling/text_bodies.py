"""Fields, parsing and answers that the endpoints of vectors, labels and scores share."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import Raw

from pillion.gateway.http_api.json_objects import Ignored
from pillion.gateway.http_api.openai_fields import Int
from pillion.gateway.http_api.openai_requests import read_prompts
from pillion.gateway.pooling.text_call import MAX_TEXTS
from pillion.types import GenerateRequest, Usage


class TextsBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of the bodies of all endpoints of vectors, labels and scores.

    Attributes:
        model: name of the served model; may be omitted if only one is served.
        truncate_prompt_tokens: max tokens of a text, which is truncated; -1 for the model's limit. If query and
            document are one text, the document is truncated. Default: a text that is too long is refused.
        priority: smaller is more urgent.
        cache_salt: only requests with the same salt share cached prefixes.
        user: a label; not stored.
    """

    model: str = ""
    truncate_prompt_tokens: Int | None = None
    priority: Int = 0
    cache_salt: str | None = None
    user: Ignored[Raw] = Raw()

    def shared(self, request_id: str) -> GenerateRequest:
        """Return a request without a text, with the model, salt, id and priority of all requests of this body."""
        return GenerateRequest(
            model=self.model, cache_salt=self.cache_salt or "", request_id=request_id, priority=self.priority
        )


def requests_of(sent: Raw, max_ids: int, shared: GenerateRequest) -> tuple[Mapping[str, str], list[GenerateRequest]]:
    """Parse the field ``input``, of which an item has at most ``max_ids`` token ids. Raises ApiError.

    Returns the gateway's names of its texts -> the client's, and their requests: ``shared`` with a text or token ids.
    """
    prompts = read_prompts(sent, max_ids, "input", MAX_TEXTS)
    requests = [
        replace(shared, text=prompt) if isinstance(prompt, str) else replace(shared, token_ids=prompt)
        for prompt in prompts.values()
    ]
    return {f"inputs[{n}]": field for n, field in enumerate(prompts)}, requests


def write_list(answer_id: str, model: str, data: Sequence[Mapping[str, Any]], usage: Usage) -> bytes:
    """Encode an answer in vLLM's format: a list with an id, the time, and a usage with 0 completion tokens."""
    answer = {
        "id": answer_id,
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": data,
        "usage": {**usage_of(usage), "completion_tokens": 0},
    }
    return msgspec.json.encode(answer)


def usage_of(usage: Usage) -> dict[str, Any]:
    """Return the usage of a call that generates no tokens."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
