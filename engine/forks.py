"""Copy-on-write of a prompt's last block, for several answers to one prompt."""

from __future__ import annotations

from engine.sequence import Sequence, State


def copy_tail(parent: Sequence, child: Sequence) -> tuple[int, int] | None:
    """The (source, target) slots to copy when the prompt's partial block is all that ``child``, which has just its
    ticket, lacks of it, and ``parent``, which is not gone, still holds that block; ``child`` then counts as computed.

    Rows behind the prompt are the parent's answer. The child writes its own rows there before it reads them.
    """
    prompt, block = child.spec.prompt_tokens, child.num_committed
    missing = prompt - child.num_computed
    held = parent.state in (State.RUNNING, State.SWAPPED) and parent.num_computed >= prompt
    if not (0 < missing < child.block_size and held):
        return None
    child.num_computed = prompt
    return parent.slots(block, block + 1)[0], child.slots(block, block + 1)[0]
