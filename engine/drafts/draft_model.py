"""Passes of a draft model over the pool of its main model, and where its blocks are in the pool's slots.

A slot has the size of the main model's block and contains one block of the draft model, of as many tokens as fit. For
the draft model's backend the pool is an array of its own blocks; slot s contains the first one that begins in it:

    main    |      slot s       |     slot s + 1    |     ...         slots of main_bytes
    draft   |  block j  |  ...  |  ...  |  ...  |  ...                blocks of draft_bytes, j = ceil(s * main / draft)
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import replace
from math import gcd

import numpy as np

from pillion.engine.backends.backend import Backend, BackendLost, InFlightStep, KVLayout, PoolPlace
from pillion.engine.backends.batching import build_draft_sampling, build_rows
from pillion.engine.drafts.acceptance import NO_TOKENS
from pillion.engine.drafts.draft_chains import DraftPlan
from pillion.engine.scheduling.sequence import Sequence
from pillion.errors import ConfigError
from pillion.kernels.step import Int32, StepBatch

log = logging.getLogger("pillion.worker")

# Weight of a new measurement in the moving averages of durations.
PASS_WEIGHT = 0.1
# Min tokens of a pass whose duration counts towards seconds_to_read.
MIN_READ_TOKENS = 32


def draft_blocks(main: KVLayout, draft: KVLayout, max_block_tokens: int = 0) -> int:
    """Return the factor by which the block size of layout ``draft``, initially ``main``'s, is multiplied so that one
    block of the draft model fits into a slot of ``main``: the largest possible. ``max_block_tokens``: max block size of
    the kernels, which must then be a power of two; 0 for no limit. Raises ConfigError if no block fits."""
    slot, unit = main.block_bytes, draft.block_bytes
    for blocks in range(slot // unit, 0, -1):
        tokens = blocks * draft.block_size
        if max_block_tokens and (tokens > max_block_tokens or tokens & (tokens - 1)):
            continue
        # A block of B bytes is aligned to B, so it begins up to B - gcd(slot, B) bytes into its slot, and must end
        # within it.
        if 2 * blocks * unit - gcd(slot, blocks * unit) <= slot:
            return blocks
    raise ConfigError(
        f"the draft model's KV has {unit // draft.block_size} bytes per token, the model's {slot // main.block_size}:"
        " it does not fit into the model's blocks; choose a draft model with fewer layers or KV heads"
    )


class DraftModel:
    """Passes of a draft model on its backend, on the worker's step thread.

    Args:
        backend: the draft model's backend, without a pool yet; its block size follows from :func:`draft_blocks`.
        slot_bytes: size of a slot of the main model.
        vocab_size: size of the main model's vocabulary; larger ids are not drafted.
    """

    def __init__(self, backend: Backend, slot_bytes: int, vocab_size: int) -> None:
        self.backend = backend
        self._slot_bytes = slot_bytes
        self._vocab_size = vocab_size
        self.last_run_s = 0.0
        # Seconds of a pass of one token per sequence, by bit length of the number of sequences: moving averages with
        # PASS_WEIGHT.
        self._pass_s: dict[int, float] = {}
        self.seconds_to_read = 0.0

    def bind_pool(self, memory: PoolPlace, num_slots: int) -> None:
        """Use the main model's pool. Raises ConfigError for a pool that is divided over several GPUs."""
        if not isinstance(memory, memoryview) and memory.divided:
            raise ConfigError(
                "--speculative-config: a draft model needs the KV pool in one chunk, and --kv-device divides it over"
                " several GPUs; choose ngram or suffix"
            )
        self.backend.bind_pool(memory, num_slots * self._slot_bytes // self.backend.layout.block_bytes)

    def run(self, plan: DraftPlan) -> list[Int32] | None:
        """Run a plan's passes and return the draft tokens, int32, of each chunk, sampled like the step's tokens; None
        after a failure, which is logged."""
        began_s = time.perf_counter()
        try:
            return self._run(plan)
        except BackendLost:
            raise
        except Exception:
            log.exception("a draft of %d sequences failed", len(plan.scheduled))
            return None
        finally:
            self.last_run_s = time.perf_counter() - began_s

    def seconds_per_token(self, sequences: int) -> float:
        """Return the seconds of a pass of one token for each of ``sequences`` sequences; 0.0 if unknown."""
        bits = sequences.bit_length()
        return self._pass_s.get(bits) or max(self._pass_s.values(), default=0.0)

    def _run(self, plan: DraftPlan) -> list[Int32]:
        scheduled = plan.scheduled
        began_s = time.perf_counter()
        batch = self._first_pass(plan)
        drafting = [index for index, chunk in enumerate(scheduled) if chunk.draft_tokens]
        batch = replace(batch, sample_rows=batch.query_starts[1:][drafting] - np.int32(1))
        sequences = [chunk.chain.sequence for chunk in scheduled]
        draft_tokens: list[list[int]] = [[] for _ in scheduled]
        tokens: tuple[int, ...] = ()
        # The last launched pass samples draft token number ``number``. For each of its sampled rows, ``drafting`` has
        # the index of the chunk in the plan, ``seqs`` that of the sequence in the batch.
        number, seqs = 1, drafting
        in_flight = deque([(self._launch(batch, [(sequences[index], 0) for index in drafting]), drafting)])
        read_tokens = plan.num_tokens
        while True:
            kept = [row for row, index in enumerate(drafting) if scheduled[index].draft_tokens > number]
            if kept and len(in_flight) < self.backend.max_steps_in_flight:
                # -1 - row: the token that the last pass samples in that row, known only to the device.
                ids = [-1 - row if in_flight else max(tokens[row], 0) for row in kept]
                batch = self._next_pass(batch, [seqs[row] for row in kept], kept, ids)
                drafting, seqs = [drafting[row] for row in kept], [*range(len(kept))]
                in_flight.append((self._launch(batch, [(sequences[index], number) for index in drafting]), drafting))
                number += 1
            elif in_flight:
                step, indices = in_flight.popleft()
                tokens = step.wait().token_ids
                for index, token in zip(indices, tokens, strict=True):
                    draft_tokens[index].append(token)
                now_s = time.perf_counter()
                self._record_pass(read_tokens, len(indices), now_s - began_s)
                read_tokens, began_s = 0, now_s
            else:
                return [self._in_vocabulary(tokens_of) for tokens_of in draft_tokens]

    def _in_vocabulary(self, tokens: Seq[int]) -> Int32:
        """Return the draft tokens before the first one outside of the main model's vocabulary, as int32."""
        unknown = (index for index, token in enumerate(tokens) if not 0 <= token < self._vocab_size)
        count = next(unknown, len(tokens))
        return np.array(tokens[:count], dtype=np.int32) if count else NO_TOKENS

    def _first_pass(self, plan: DraftPlan) -> StepBatch:
        """Return the batch of the chunks' tokens, with block tables that also cover their draft tokens."""
        scheduled, layout = plan.scheduled, self.backend.layout
        chains = [chunk.chain for chunk in scheduled]
        starts, counts = [chunk.start for chunk in scheduled], [chunk.count for chunk in scheduled]
        batch = build_rows(chains, starts, counts, [chain.rope_shift for chain in chains], layout.block_size)
        tables = np.zeros((len(chains), max(chain.num_blocks for chain in chains)), dtype=np.int64)
        for row, chain in zip(tables, chains, strict=True):
            row[: chain.num_blocks] = chain.table()
        blocks = -(-tables * self._slot_bytes // layout.block_bytes)
        return replace(batch, block_tables=blocks.astype(np.int32))

    def _next_pass(self, batch: StepBatch, seqs: Seq[int], kept: Seq[int], tokens: Seq[int]) -> StepBatch:
        """Return the batch of the pass after ``batch``: ``tokens``, one for each sampled row with an index in ``kept``
        and a sequence of ``batch`` with an index in ``seqs``."""
        rows, count = batch.sample_rows[kept], len(tokens)
        positions = batch.positions[rows] + np.int32(1)
        row_starts = np.arange(count + 1, dtype=np.int32)
        return StepBatch(
            token_ids=np.array(tokens, dtype=np.int32),
            positions=positions,
            query_starts=row_starts,
            context_lens=positions + np.int32(1),
            block_tables=batch.block_tables[seqs],
            sample_rows=row_starts[:count],
            rope_rows=None if batch.rope_rows is None else batch.rope_rows[rows] + np.int32(1),
        )

    def _record_pass(self, read_tokens: int, sequences: int, seconds: float) -> None:
        """Record the duration of a first pass, over ``read_tokens`` tokens, or of a later one (0) of one token for each
        of ``sequences`` sequences."""
        if read_tokens:
            weight = PASS_WEIGHT if self.seconds_to_read else 1.0
            if read_tokens >= MIN_READ_TOKENS:
                self.seconds_to_read += weight * (seconds / read_tokens - self.seconds_to_read)
            return
        bits = sequences.bit_length()
        known_s = self._pass_s.get(bits, seconds)
        self._pass_s[bits] = known_s + PASS_WEIGHT * (seconds - known_s)

    def _launch(self, batch: StepBatch, targets: Seq[tuple[Sequence, int]]) -> InFlightStep:
        """Launch a pass. For each sampled row, ``targets`` has the sequence to sample for, and its number of draft
        tokens before."""
        return self.backend.launch(batch, (), build_draft_sampling(targets, self.backend.vocab_size))
