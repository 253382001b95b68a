"""Start of parallel samples, further answers to a prompt: from their first token until they run.

    first token, chosen from the parent's logits
        --the prompt's blocks are all sent to the node--> a ticket is ordered --> PREEMPTED, waits to run
        --may run, the KV of the prompt's partial block copied from the parent--> a decode

Whole blocks are shared, because the ticket pins the same chain; the partial one is copied before the child writes there
(copy-on-write). If the parent is gone by then, or was refused its commits, the child computes what it lacks (I1).
"""

from __future__ import annotations

from collections.abc import Mapping

from pillion.engine.scheduling.block_manager import BlockManager
from pillion.engine.scheduling.queues import SchedulerQueues
from pillion.engine.scheduling.sequence import Sequence, SequenceState
from pillion.engine.scheduling.step_plan import ScheduledChunk


class ParallelSampling:
    """The parallel samples of one scheduler that have not run yet.

    ``late`` (read-only): by seq_id of their parent, samples whose ticket waits for the commit of the prompt's blocks.
    """

    def __init__(self, queues: SchedulerQueues, block_manager: BlockManager) -> None:
        self._queues = queues
        self._block_manager = block_manager
        self.late: dict[int, list[Sequence]] = {}

    def order_ticket(self, parent: Sequence, child: Sequence) -> None:
        """Order a ticket for ``child``, at once or after the parent's running commit: a ticket opened before the
        prompt's last blocks are sent would not pin them."""
        if parent.in_commit and parent.num_sent < parent.prompt_tokens // parent.block_size:
            self.late.setdefault(parent.seq_id, []).append(child)
            self._block_manager.out.hurry = True
        else:
            self._block_manager.order_resume(child)

    def parent_answered(self, seq_id: int, alive: Mapping[int, Sequence]) -> None:
        """Order the tickets of the late samples of parent ``seq_id``, after the node's answer to its commit and, if
        there are more blocks, the order of the next one. ``alive``: the scheduler's sequences by seq_id."""
        for child in self.late.pop(seq_id):
            if alive.get(child.seq_id) is child:
                self._block_manager.order_resume(child)

    def start_running(self, alive: Mapping[int, Sequence]) -> tuple[list[ScheduledChunk], list[tuple[int, int]]]:
        """Start the first preempted sequences, as free places allow, that are parallel samples; return the decodes of
        those whose whole prompt is computed or copied, and the (source, target) slots to copy before the step.

        Call this when nothing more is preempted in this step, so that no sequence frees a slot to be copied.
        ``alive``: the scheduler's sequences by seq_id.
        """
        scheduled: list[ScheduledChunk] = []
        copies: list[tuple[int, int]] = []
        not_running = [s for s in self._queues.prompt_tails() if s.state is not SequenceState.RUNNING]
        for child in not_running[: self._queues.free_seqs]:
            parent = child.leave_parent()
            if parent is None:
                continue
            copy = copy_partial_block(parent, child) if alive.get(parent.seq_id) is parent else None
            copies += [] if copy is None else [copy]
            if child.left_to_compute == 1:
                child.start_decoding()
                self._queues.start_running(child)
                scheduled.append(ScheduledChunk(child, child.num_computed, 1, 1))
        return scheduled, copies


def copy_partial_block(parent: Sequence, child: Sequence) -> tuple[int, int] | None:
    """Return the (source, target) slots to copy if ``child``, with its new ticket, lacks only the prompt's partial
    block, and ``parent`` still has it; the child's prompt then counts as computed. Else return None.

    The copy's rows after the prompt are the parent's answer; the child overwrites them before it reads them.
    """
    prompt, block = child.prompt_tokens, child.num_committed
    missing = prompt - child.num_computed
    parent_has = parent.state in (SequenceState.RUNNING, SequenceState.PREEMPTED) and parent.num_computed >= prompt
    if not (0 < missing < child.block_size and parent_has):
        return None
    child.share_prompt()
    return parent.slots(block, block + 1)[0], child.slots(block, block + 1)[0]
