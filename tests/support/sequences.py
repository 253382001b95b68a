"""Sequences as tests make, read and change them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pillion.engine.scheduling.block_chain import Holding
from pillion.engine.scheduling.sequence import Sequence, SequenceSpec


def new_sequence(holding: Holding, block_size: int, now: float, **task: Any) -> Sequence:
    """Make a sequence with this task."""
    return Sequence(SequenceSpec(**task), holding, block_size, now)


def task_of(sequence: Sequence) -> Any:
    """Return what describes the task of a sequence."""
    return sequence.spec


def change_task(sequence: Sequence, **changes: Any) -> None:
    """Change some of the task of a sequence."""
    sequence.spec = replace(sequence.spec, **changes)
