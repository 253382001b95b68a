"""Masks of a step's rows, from the grammars of its sequences."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from pillion.engine.grammars.mask_threads import MASK_WAIT_MS, MaskJob
from pillion.engine.scheduling.step_plan import StepPlan
from pillion.kernels.step import Bool, Int64, UInt32


@dataclass(frozen=True, slots=True)
class StepMasks:
    """:class:`pillion.kernels.step.RowMasks` of a step.

    ``asked``: the mask job of each sequence with a grammar, and the number of the step's rows that use it: those of its
    chunk or, where parallel samples begin, one row per sample with the same mask.
    """

    rows: Int64
    asked: tuple[tuple[MaskJob, int], ...]

    @classmethod
    def of(cls, plan: StepPlan) -> StepMasks | None:
        """Start the mask jobs of a plan whose batch is being built; None without grammars."""
        rows: list[int] = []
        asked: list[tuple[MaskJob, int]] = []
        row = 0
        for chunk in plan.scheduled:
            if not chunk.samples:
                continue
            grammar = chunk.sequence.grammar
            count = chunk.samples + len(chunk.parallel_seeds)
            if grammar is not None:
                proposed = chunk.sequence.proposed().tolist()
                asked.append((grammar.place_masks(proposed, chunk.samples), count))
                rows.extend(range(row, row + count))
            row += count
        return cls(np.array(rows, dtype=np.int64), tuple(asked)) if asked else None

    def take(self) -> tuple[UInt32, Bool]:
        until_s = time.monotonic() + MASK_WAIT_MS / 1000
        bits: list[UInt32] = []
        there: list[bool] = []
        for masks, count in self.asked:
            there += [masks.wait(max(0.0, until_s - time.monotonic()))] * count
            bits.append(
                masks.bits if len(masks.bits) == count else np.broadcast_to(masks.bits, (count, masks.bits.shape[1]))
            )
        return np.concatenate(bits), np.array(there)
