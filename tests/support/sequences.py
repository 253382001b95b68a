"""Sequences as tests make, read and change them."""

from __future__ import annotations

from typing import Any

from pillion.engine.scheduling.block_chain import Holding
from pillion.engine.scheduling.sequence import Sequence


def new_sequence(holding: Holding, block_size: int, now: float, **task: Any) -> Sequence:
    """Make a sequence with this task."""
    return Sequence(holding, block_size, now, **task)


def task_of(sequence: Sequence) -> Any:
    """Return what describes the task of a sequence."""
    return sequence


def change_task(sequence: Sequence, **changes: Any) -> None:
    """Change some of the task of a sequence."""
    for name, value in changes.items():
        setattr(sequence, name, value)
