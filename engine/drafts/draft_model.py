"""Passes of a draft model over the pool of its main model, and its place in the slots.

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
from pillion.engine.drafts.draft_chains import NO_DRAFT_TOKENS, DraftPlan
from pillion.engine.scheduling.sequence import Sequence
from pillion.errors import ConfigError
from pillion.kernels.step import Int32, StepBatch

log = logging.getLogger("pillion.worker")

PASS_WEIGHT = 0.1
MIN_READ_TOKENS = 32


def draft_blocks(main: KVLayout, draft: KVLayout, most_tokens: int = 0) -> int:
    """Return how many blocks of layout ``draft`` (of ``main``'s block size) form the one in a slot of ``main``: as many
    as fit. ``most_tokens`` is the kernels' max block size, if any; block sizes are then powers of two. Raises
    ConfigError if none fits."""
    slot, unit = main.block_bytes, draft.block_bytes
    for blocks in range(slot // unit, 0, -1):
        tokens = blocks * draft.block_size
        if most_tokens and (tokens > most_tokens or tokens & (tokens - 1)):
            continue
        # A joined block of B bytes is aligned to B, so it begins up to B - gcd(slot, B) bytes into its slot, and must
        # end within it.
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
        vocab_size: the main model's vocabulary; other ids are not drafted.
    """

    def __init__(self, backend: Backend, slot_bytes: int, vocab_size: int) -> None:
        self.backend = backend
        self._slot_bytes = slot_bytes
        self._vocab_size = vocab_size
        self.took_s = 0.0
        # Seconds of a pass of one token per sequence, by bit length of the number of sequences: moving averages with
        # PASS_WEIGHT.
        self._pass_s: dict[int, float] = {}
        self.seconds_to_read = 0.0

    def bind_pool(self, memory: PoolPlace, num_slots: int) -> None:
        """Use the main model's pool. Raises ConfigError for a pool divided over GPUs, whose slots cannot contain blocks
        of another model."""
        if not isinstance(memory, memoryview) and memory.divided:
            raise ConfigError(
                "--speculative-config: a draft model needs the KV pool in one chunk, and --kv-device divides it over"
                " several GPUs; choose ngram or suffix"
            )
        self.backend.bind_pool(memory, num_slots * self._slot_bytes // self.backend.layout.block_bytes)

    def run(self, plan: DraftPlan) -> list[Int32] | None:
        """Run a plan's passes and return each chunk's draft tokens, sampled as the step will sample them; None after a
        failure, which is logged."""
        began_s = time.perf_counter()
        try:
            return self._run(plan)
        except BackendLost:
            raise
        except Exception:
            log.exception("a draft of %d sequences failed", len(plan.scheduled))
            return None
        finally:
            self.took_s = time.perf_counter() - began_s

    def seconds_per_token(self, sequences: int) -> float:
        """Return the seconds of a pass of one token for each of ``sequences``; 0.0 if unknown."""
        bits = sequences.bit_length()
        return self._pass_s.get(bits) or max(self._pass_s.values(), default=0.0)

    def _run(self, plan: DraftPlan) -> list[Int32]:
        scheduled = plan.scheduled
        began_s = time.perf_counter()
        batch = self._first_pass(plan)
        drafting = [place for place, chunk in enumerate(scheduled) if chunk.draft_tokens]
        batch = replace(batch, sample_rows=batch.query_starts[1:][drafting] - np.int32(1))
        sequences = [chunk.chain.sequence for chunk in scheduled]
        draft_tokens: list[list[int]] = [[] for _ in scheduled]
        tokens: tuple[int, ...] = ()
        # The last launched pass produces draft token number ``made``; ``seqs`` are the sequences of its sampled rows.
        made, seqs = 1, drafting
        under_way = deque([(self._launch(batch, [(sequences[place], 0) for place in drafting]), drafting)])
        read = plan.num_tokens
        while True:
            kept = [at for at, place in enumerate(drafting) if scheduled[place].draft_tokens > made]
            if kept and len(under_way) < self.backend.max_steps_in_flight:
                # Only the device knows the tokens of passes in flight.
                ids = [-1 - at if under_way else max(tokens[at], 0) for at in kept]
                batch = self._next_pass(batch, [seqs[at] for at in kept], kept, ids)
                drafting, seqs = [drafting[at] for at in kept], [*range(len(kept))]
                under_way.append((self._launch(batch, [(sequences[place], made) for place in drafting]), drafting))
                made += 1
            elif under_way:
                step, places = under_way.popleft()
                tokens = step.wait().token_ids
                for place, token in zip(places, tokens, strict=True):
                    draft_tokens[place].append(token)
                now_s = time.perf_counter()
                self._learn(read, len(places), now_s - began_s)
                read, began_s = 0, now_s
            else:
                return [self._possible(found) for found in draft_tokens]

    def _possible(self, tokens: Seq[int]) -> Int32:
        """Return the draft tokens up to the first one outside of the main model's vocabulary, as int32."""
        wrong = (place for place, token in enumerate(tokens) if not 0 <= token < self._vocab_size)
        count = next(wrong, len(tokens))
        return np.array(tokens[:count], dtype=np.int32) if count else NO_DRAFT_TOKENS

    def _first_pass(self, plan: DraftPlan) -> StepBatch:
        """Return the batch of the known tokens of all chunks. Block tables include the draft tokens."""
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
        """Return the batch of one more token after each of the ``kept`` sampled rows of ``batch``, which belong to its
        sequences ``seqs``."""
        rows, count = batch.sample_rows[kept], len(tokens)
        positions = batch.positions[rows] + np.int32(1)
        places = np.arange(count + 1, dtype=np.int32)
        return StepBatch(
            token_ids=np.array(tokens, dtype=np.int32),
            positions=positions,
            query_starts=places,
            context_lens=positions + np.int32(1),
            block_tables=batch.block_tables[seqs],
            sample_rows=places[:count],
            rope_rows=None if batch.rope_rows is None else batch.rope_rows[rows] + np.int32(1),
        )

    def _learn(self, read: int, sequences: int, seconds: float) -> None:
        """Record the duration of a pass: over ``read`` tokens of a text or, if 0, one token for each of
        ``sequences``."""
        if read:
            weight = PASS_WEIGHT if self.seconds_to_read else 1.0
            if read >= MIN_READ_TOKENS:
                self.seconds_to_read += weight * (seconds / read - self.seconds_to_read)
            return
        bits = sequences.bit_length()
        known_s = self._pass_s.get(bits, seconds)
        self._pass_s[bits] = known_s + PASS_WEIGHT * (seconds - known_s)

    def _launch(self, batch: StepBatch, after: Seq[tuple[Sequence, int]]) -> InFlightStep:
        """Launch a pass; each sampled row samples the token after the given number of draft tokens of a sequence."""
        return self.backend.launch(batch, (), build_draft_sampling(after, self.backend.vocab_size))
