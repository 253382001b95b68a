"""Position of a conversation's breakpoint in its prompt's tokens.

Chat templates are arbitrary programs, so message boundaries in the prompt are unknown. The conversation up to the
breakpoint is rendered and tokenized separately. The ids that it shares with the whole prompt are the common prefix of
all prompts that diverge after the breakpoint.
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
    """Position in a conversation up to which its prompt is to be pinned.

    Attributes:
        messages: the messages before it; None for the whole prompt.
        ttl_s: lifetime of the pin, in seconds.
    """

    messages: tuple[ChatMessage, ...] | None
    ttl_s: int


async def ids_before(
    gateway: Gateway, request: GenerateRequest, point: Breakpoint, entry: ModelEntry, tenant: Tenant
) -> tuple[int, ...] | None:
    """Return the ids of the conversation up to a breakpoint, without the generation prompt; None for the whole prompt,
    () if the template cannot render these messages alone."""
    if point.messages is None:
        return None
    chat = replace(request.chat, add_generation_prompt=False, continue_final_message=False)
    try:
        return await gateway.prompt_ids(replace(request, messages=point.messages, chat=chat), entry, tenant)
    except PillionError:
        return ()


def shared_tokens(ids: Sequence[int], prompt: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences of ids of the same type (list or tuple)."""
    low, high = 0, min(len(ids), len(prompt))
    while low < high:
        middle = (low + high + 1) // 2
        if ids[low:middle] == prompt[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
