"""Further answers to a prompt, from their first token to their seat in the batch.

    first token, chosen from the parent's logits
        --the prompt's blocks are all on their way to the node--> a ticket is asked for --> SWAPPED, in line for a seat
        --a seat, the KV of the prompt's partial block copied from the parent--> a decode

Whole blocks are shared, because the ticket pins the same chain; the partial one is copied before the child writes there
(copy-on-write). Where the parent is gone by then, or was refused its commits, the child computes what it lacks (I1).
"""

from __future__ import annotations

from collections.abc import Mapping

from pillion.engine.scheduling.block_manager import BlockManager
from pillion.engine.scheduling.queues import SchedulerQueues
from pillion.engine.scheduling.sequence import Sequence, SequenceState
from pillion.engine.scheduling.step_plan import SequencePiece


class Forks:
    """Belongs to one scheduler, whose queues and block manager it uses."""

    def __init__(self, queues: SchedulerQueues, block_manager: BlockManager) -> None:
        self._queues = queues
        self._block_manager = block_manager
        # Those whose prompt is not all sent to the node yet, by the parent that sends it.
        self._late: dict[int, list[Sequence]] = {}

    def ask(self, parent: Sequence, child: Sequence) -> None:
        """A ticket for ``child``, at once or behind the parent's run under way: asked for before the prompt's last
        blocks are sent, it would not find them."""
        if parent.in_commit and parent.num_sent < parent.spec.prompt_tokens // parent.block_size:
            self._late.setdefault(parent.seq_id, []).append(child)
        else:
            self._block_manager.resume(child)

    def parent_heard(self, seq_id: int, alive: Mapping[int, Sequence]) -> None:
        """The node has answered the parent's run, and the next one, if there is one, is ordered."""
        for child in self._late.pop(seq_id, ()):
            if alive.get(child.seq_id) is child:
                self._block_manager.resume(child)

    def start_running(
        self, now: float, alive: Mapping[int, Sequence]
    ) -> tuple[list[SequencePiece], list[tuple[int, int]]]:
        """Decodes of those that get a seat and have all of their prompt, and the (source, target) slots to copy first.

        They stand in line like everybody: an answer more is not more urgent than its request. To be called when nothing
        is preempted any more in this step, so that nobody lets go of a slot that is copied.
        """
        pieces: list[SequencePiece] = []
        copies: list[tuple[int, int]] = []
        if not any(s.parent is not None for s in self._queues.preempted):
            return pieces, copies
        not_running = [s for s in self._queues.prompt_tails(now) if s.state is not SequenceState.RUNNING]
        for child in not_running[: self._queues.free_seqs]:
            parent, child.parent = child.parent, None
            if parent is None:
                continue
            copy = copy_tail(parent, child) if alive.get(parent.seq_id) is parent else None
            copies += [] if copy is None else [copy]
            if child.left_to_compute == 1:
                child.decoding = True
                self._queues.start_running(child)
                pieces.append(SequencePiece(child, child.num_computed, 1, 1))
        return pieces, copies


def copy_tail(parent: Sequence, child: Sequence) -> tuple[int, int] | None:
    """The (source, target) slots to copy when the prompt's partial block is all that ``child``, which has just its
    ticket, lacks of it, and ``parent``, which is not gone, still holds that block; ``child`` then counts as computed.

    Rows behind the prompt are the parent's answer. The child writes its own rows there before it reads them.
    """
    prompt, block = child.spec.prompt_tokens, child.num_committed
    missing = prompt - child.num_computed
    held = parent.state in (SequenceState.RUNNING, SequenceState.PREEMPTED) and parent.num_computed >= prompt
    if not (0 < missing < child.block_size and held):
        return None
    child.num_computed = prompt
    return parent.slots(block, block + 1)[0], child.slots(block, block + 1)[0]
