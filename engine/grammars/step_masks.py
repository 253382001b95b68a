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
    """Implements :class:`pillion.kernels.step.RowMasks`.

    Attributes:
        rows: int64, the sampled rows of sequences with a grammar.
        jobs: (mask job, number of rows that use its masks) of each such sequence; parallel samples that start share one
            mask.
    """

    rows: Int64
    jobs: tuple[tuple[MaskJob, int], ...]

    @classmethod
    def of(cls, plan: StepPlan) -> StepMasks | None:
        """Start the mask jobs of a plan; return None if no sampled row has a grammar."""
        rows: list[int] = []
        jobs: list[tuple[MaskJob, int]] = []
        row = 0
        for chunk in plan.scheduled:
            if not chunk.samples:
                continue
            grammar = chunk.sequence.grammar
            count = chunk.samples + len(chunk.parallel_seeds)
            if grammar is not None:
                proposed = chunk.sequence.proposed().tolist()
                jobs.append((grammar.place_masks(proposed, chunk.samples), count))
                rows.extend(range(row, row + count))
            row += count
        return cls(np.array(rows, dtype=np.int64), tuple(jobs)) if jobs else None

    def take(self) -> tuple[UInt32, Bool]:
        """Return the masks of ``rows``, uint32 [rows, words], and whether each is valid, after up to MASK_WAIT_MS."""
        deadline_s = time.monotonic() + MASK_WAIT_MS / 1000
        bits: list[UInt32] = []
        valid: list[bool] = []
        for job, count in self.jobs:
            valid += [job.wait(max(0.0, deadline_s - time.monotonic()))] * count
            bits.append(job.bits if len(job.bits) == count else np.broadcast_to(job.bits, (count, job.bits.shape[1])))
        return np.concatenate(bits), np.array(valid)
