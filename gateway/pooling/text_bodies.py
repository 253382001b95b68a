"""Reads and writes what the bodies of all pages of texts have in common."""

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
    """Describes the fields that the bodies of all pages of texts have.

    Attributes:
        model: the served model's name; may be left out where one model is served.
        truncate_prompt_tokens: texts are cut to so many tokens, -1 to as many as the model takes; where query and
            document are one text, the document is cut. Default: what is too long is refused.
        priority: smaller is more urgent.
        cache_salt: only requests with the same salt share cached prefixes.
        user: a label; nothing is stored.
    """

    model: str = ""
    truncate_prompt_tokens: Int | None = None
    priority: Int = 0
    cache_salt: str | None = None
    user: Ignored[Raw] = Raw()

    def shared(self, request_id: str) -> GenerateRequest:
        """Returns a request without a text, with the model, salt, id and priority that the requests of all texts of
        this body have."""
        return GenerateRequest(
            model=self.model, cache_salt=self.cache_salt or "", request_id=request_id, priority=self.priority
        )


def requests_of(sent: Raw, most_ids: int, shared: GenerateRequest) -> tuple[Mapping[str, str], list[GenerateRequest]]:
    """Returns the client's names of the texts of the field ``input``, by the gateway's names, and their requests:
    ``shared`` with a text or its token ids. Raises ApiError."""
    prompts = read_prompts(sent, most_ids, "input", MAX_TEXTS)
    requests = [
        replace(shared, text=prompt) if isinstance(prompt, str) else replace(shared, token_ids=prompt)
        for prompt in prompts.values()
    ]
    return {f"inputs[{n}]": field for n, field in enumerate(prompts)}, requests


def write_list(answer_id: str, model: str, data: Sequence[Mapping[str, Any]], usage: Usage) -> bytes:
    """Writes an answer as vLLM does: a list with an id, a time, and the usage with no tokens of an answer."""
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
    """Returns the tokens of a call that generates none, with those that were found."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
