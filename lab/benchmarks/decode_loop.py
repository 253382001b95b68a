"""Decode steps of a scheduler over one backend, phase by phase, as on a worker's step thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pillion.engine.backends.batching import build_sampling, build_step_batch
from pillion.engine.grammars.step_masks import StepMasks
from pillion.engine.sampling.sampler import sample
from pillion.engine.scheduling.block_chain import Holding
from pillion.engine.scheduling.block_manager import BlockManager
from pillion.engine.scheduling.grammars import Grammars
from pillion.engine.scheduling.scheduler import Scheduler
from pillion.engine.scheduling.sequence import Sequence
from pillion.types import SamplingParams

MAX_TOKENS = 4096
PHASES = ("schedule", "build", "forward", "sample", "commit")


class DecodeLoop:
    """Decode steps of a scheduler, whose streams all have their slots, over one backend."""

    def __init__(
        self,
        backend: Any,
        block_size: int,
        batch: int,
        context: int,
        sampling: SamplingParams,
        *,
        prompt: npt.NDArray[np.int32] | None = None,
        grammars: bool = False,
        attach: Callable[[int, Sequence], None] = lambda number, sequence: None,
    ) -> None:
        """``prompt``: int32 [context], of every stream; default: random tokens. ``attach`` gets the
        number and the sequence of each stream before it is added."""
        self.backend, self.block_size = backend, block_size
        manager = BlockManager(block_size)
        asked = Grammars(manager.free_slots) if grammars else None
        self.scheduler = Scheduler(blocks=manager, max_num_batched_tokens=4096, max_num_seqs=batch, grammars=asked)
        draw = np.random.default_rng(batch)
        blocks = (context + MAX_TOKENS // batch) // block_size + 2
        for number in range(batch):
            mine = tuple(range(number * blocks, (number + 1) * blocks))
            sequence = Sequence(
                Holding(number + 1, (), mine),
                block_size,
                0.0,
                seq_id=number + 1,
                token_ids=draw.integers(1000, 40_000, context).astype(np.int32) if prompt is None else prompt,
                parent_hash=bytes(32),
                prompt_tokens=context,
                sampling=replace(sampling, max_tokens=MAX_TOKENS // batch),
                max_model_len=1_000_000,
            )
            attach(number, sequence)
            self.scheduler.add(sequence, 0.0)

    def step(self) -> dict[str, float]:
        """Runs one step; returns its seconds by phase. Commits are answered at once, outside of the phases."""
        times = [time.perf_counter()]
        plan = self.scheduler.schedule(times[0])
        self.scheduler.flush(times[0])
        times.append(time.perf_counter())
        batch, rows = build_step_batch(plan, self.block_size), build_sampling(plan, StepMasks.of(plan))
        times.append(time.perf_counter())
        logits = self.backend.forward(batch)
        times.append(time.perf_counter())
        sampled = sample(logits, rows, self.backend.largest)
        times.append(time.perf_counter())
        outcome = self.scheduler.commit(plan, sampled, times[-1])
        times.append(time.perf_counter())
        for order in outcome.commits:
            self.scheduler.committed(order.seq_id, order.slots, "", times[-1])
        return dict(zip(PHASES, np.diff(times).tolist(), strict=True))
