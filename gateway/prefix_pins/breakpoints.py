"""Finds where a breakpoint of a conversation stands among its prompt's tokens.

A chat template writes a conversation as it likes, so nobody knows where a message ends in the prompt. The conversation
up to the breakpoint is rendered and tokenized by itself. The ids that this part shares with the whole prompt are what
every prompt begins with that goes on differently after the breakpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pillion.errors import PillionError
from pillion.gateway.admission.tenants import Tenant
from pillion.gateway.gateway import Gateway, ModelEntry
from pillion.types import ChatMessage, GenerateRequest


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """Marks a place in a conversation, up to which its prompt is to be pinned for ``ttl_s`` seconds. ``messages`` are
    those before the place; with None the whole prompt is to be pinned."""

    messages: tuple[ChatMessage, ...] | None
    ttl_s: int


async def ids_before(
    gateway: Gateway, request: GenerateRequest, point: Breakpoint, entry: ModelEntry, tenant: Tenant
) -> tuple[int, ...] | None:
    """Returns the ids of the conversation up to a breakpoint, without the marks that begin an answer; None for the
    whole prompt, and () where a template does not write that part by itself."""
    if point.messages is None:
        return None
    chat = replace(request.chat, add_generation_prompt=False, continue_final_message=False)
    try:
        return await gateway.prompt_ids(replace(request, messages=point.messages, chat=chat), entry, tenant)
    except PillionError:
        return ()


def shared_tokens(ids: Sequence[int], prompt: Sequence[int]) -> int:
    """Returns how many ids two lists of them share from their beginning. Both have the same type, whose slices compare
    fast."""
    least, most = 0, min(len(ids), len(prompt))
    while least < most:
        middle = (least + most + 1) // 2
        if ids[least:middle] == prompt[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least
