"""Reads the texts of a body that gives one result for each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from msgspec import Raw

from pillion.gateway.http_api.openai_requests import read_prompts
from pillion.gateway.pooling.text_call import MAX_TEXTS
from pillion.types import GenerateRequest


def requests_of(sent: Raw, most_ids: int, shared: GenerateRequest) -> tuple[Mapping[str, str], list[GenerateRequest]]:
    """Returns the client's names of the texts of the field ``input``, by the gateway's names, and their requests:
    ``shared`` with a text or its token ids. Raises ApiError."""
    prompts = read_prompts(sent, most_ids, "input", MAX_TEXTS)
    requests = [
        replace(shared, text=prompt) if isinstance(prompt, str) else replace(shared, token_ids=prompt)
        for prompt in prompts.values()
    ]
    return {f"inputs[{n}]": field for n, field in enumerate(prompts)}, requests
