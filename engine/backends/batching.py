"""A step's batch arrays and sampling parameters, built from its plan."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any

import numpy as np

from pillion.engine.sampling.allowed_masks import AllowedMasks
from pillion.engine.scheduling.block_chain import BlockChain
from pillion.engine.scheduling.sequence import Sequence
from pillion.engine.scheduling.step_plan import ScheduledChunk, StepPlan
from pillion.kernels.step import (
    Int32,
    RowEdit,
    RowMasks,
    SamplingRows,
    ScoredRows,
    StateSlots,
    StepBatch,
    UInt32,
)
from pillion.types import SamplingParams

# Sequence, parameters, seed and position of a sampled row.
_Row = tuple[Sequence, SamplingParams, int, int]
# Row of a pooled text, and the token ids whose logits are its result; () for its hidden state.
_Pooled = tuple[int, tuple[int, ...]]


def build_step_batch(plan: StepPlan, block_size: int) -> StepBatch:
    """Build the batch of a plan with at least one chunk."""
    scheduled = plan.scheduled
    counts = [chunk.count for chunk in scheduled]
    ends = list(accumulate(counts))
    sample_rows = list(_sample_rows(scheduled, ends))
    pooled: list[_Pooled] = []
    if any(chunk.scores or chunk.pools for chunk in scheduled):
        pooled = _add_prompt_rows(sample_rows, scheduled, ends)
    batch = build_rows(
        [chunk.sequence for chunk in scheduled],
        [chunk.start for chunk in scheduled],
        counts,
        [chunk.sequence.rope_shift for chunk in scheduled],
        block_size,
        sample_rows=sample_rows,
        adapters=plan.adapters,
        states=plan.states,
        pooled=sum(not ids for _, ids in pooled),
        pooled_ids=tuple(ids for _, ids in pooled),
    )
    if pooled:
        poolings = (chunk.sequence.pooling for chunk in scheduled)
        second_starts = [0 if pooling is None else pooling.second_from for pooling in poolings]
        if any(second_starts):
            batch = replace(batch, second_starts=np.array(second_starts, np.int32))
    for index, sampled_row in plan.unknown:
        batch.token_ids[ends[index] - counts[index]] = -1 - sampled_row
    return batch


def _add_prompt_rows(sample_rows: list[int], scheduled: tuple[ScheduledChunk, ...], ends: list[int]) -> list[_Pooled]:
    """Append the rows of prompts that are scored or pooled to ``sample_rows``; return the pooled ones."""
    pooled: list[_Pooled] = []
    for chunk, end in zip(scheduled, ends, strict=True):
        sample_rows += _last_rows(chunk, end, chunk.scores)
        if (pooling := chunk.sequence.pooling) is not None:
            pooled += [(row, pooling.logits_of) for row in _last_rows(chunk, end, chunk.pools)]
    # Rows that need only hidden states come last.
    sample_rows += [row for row, ids in pooled if ids] + [row for row, ids in pooled if not ids]
    return pooled


def build_rows(
    chains: Seq[BlockChain],
    firsts: Seq[int],
    counts: Seq[int],
    rope_shifts: Seq[int],
    block_size: int,
    *,
    sample_rows: Seq[int] = (),
    adapters: Int32 | None = None,
    states: StateSlots | None = None,
    pooled: int = 0,
    pooled_ids: tuple[tuple[int, ...], ...] = (),
) -> StepBatch:
    """Build the batch that runs tokens firsts[i] .. firsts[i] + counts[i] - 1 of each chains[i]."""
    starts = np.array(firsts, dtype=np.int32)
    context_lens = [start + count for start, count in zip(firsts, counts, strict=True)]
    query_starts = [0, *accumulate(counts)]
    positions = starts
    if query_starts[-1] != len(chains):
        # Row r of sequence s is position starts[s] + (r - query_starts[s]).
        positions = np.arange(query_starts[-1], dtype=np.int32)
        positions += np.repeat(starts - np.array(query_starts[:-1], dtype=np.int32), counts)
    num_blocks = [-(-end // block_size) for end in context_lens]
    tables = np.zeros((len(chains), max(num_blocks)), dtype=np.int32)
    for table, block_chain, count in zip(tables, chains, num_blocks, strict=True):
        table[:count] = block_chain.table()[:count]
    return StepBatch(
        token_ids=np.concatenate([c.tokens(a, b) for c, a, b in zip(chains, firsts, context_lens, strict=True)]),
        positions=positions,
        query_starts=np.array(query_starts, dtype=np.int32),
        context_lens=np.array(context_lens, dtype=np.int32),
        block_tables=tables,
        sample_rows=np.array(sample_rows, dtype=np.int32),
        rope_rows=positions + np.repeat(np.array(rope_shifts, dtype=np.int32), counts) if any(rope_shifts) else None,
        adapters=adapters,
        states=states,
        pooled=pooled,
        pooled_ids=pooled_ids,
    )


def _sample_rows(scheduled: tuple[ScheduledChunk, ...], ends: list[int]) -> Iterator[int]:
    """Yield each chunk's last ``samples`` rows, followed by its last row once per parallel sample."""
    for chunk, end in zip(scheduled, ends, strict=True):
        yield from range(end - chunk.samples, end)
        for _ in chunk.parallel_seeds:
            yield end - 1


def _last_rows(chunk: ScheduledChunk, end: int, count: int) -> range:
    """Return the batch rows of a chunk's ``count`` positions before ``scores_end``. ``end``: end of the chunk's
    rows."""
    stop = end - (chunk.start + chunk.count - chunk.scores_end)
    return range(stop - count, stop)


def build_sampling(plan: StepPlan, masks: RowMasks | None) -> SamplingRows:
    """Build the parameters of the batch's ``sample_rows``, in order. ``masks``: those of grammars
    (:class:`pillion.engine.grammars.step_masks.StepMasks`).

    A row's position is that of the new token in prompt + output, so a moved or resumed stream draws the same tokens
    (I6).
    """
    rows = list(chain.from_iterable(_rows_of(chunk) for chunk in plan.scheduled if chunk.samples))
    scoring = [chunk for chunk in plan.scheduled if chunk.scores]
    reports = [-1 if p.logprobs is None else p.logprobs for _, p, _, _ in rows]
    return _sampling(
        rows,
        logprobs=np.array(reports, np.int64),
        edits=tuple(_edits(rows)),
        masks=AllowedMasks.of(allowed, masks) if (allowed := _allowed(rows)) else masks,
        scored=_scored(scoring) if scoring else None,
    )


def build_draft_sampling(after: Seq[tuple[Sequence, int]], vocab_size: int) -> SamplingRows:
    """Build the parameters of rows that sample draft tokens, one per (sequence, number of its draft tokens so far) in
    ``after``; logits have ``vocab_size`` columns.

    Each row has the seed and position of the row that will verify its token. The shared noise makes acceptance more
    likely than drafting the most likely token would (Daliri, Musco and Suresh 2024). Penalties count only known tokens.
    There are no masks, since grammars truncate drafts later, and no edits for a row that biases a missing logit.
    """
    rows = []
    for sequence, draft_tokens in after:
        params = sequence.sampling
        assert params is not None
        rows.append((sequence, params, params.seed or 0, sequence.num_tokens + draft_tokens))
    edits = (edit for edit in _edits(rows) if edit.biased.max(initial=-1) < vocab_size)
    return _sampling(rows, edits=tuple(edits))


def _sampling(rows: list[_Row], **options: Any) -> SamplingRows:
    """Build the parameters of rows; ``options`` of :meth:`SamplingRows.of`."""
    _, params, seeds, positions = zip(*rows, strict=True) if rows else ((), (), (), ())
    return SamplingRows.of(params, seeds, positions, **options)


def _scored(scoring: list[ScheduledChunk]) -> ScoredRows:
    """Return the prompt tokens that chunks score. The row of a position scores the token at the next one."""
    tokens = [p.sequence.tokens(p.scores_end - p.scores + 1, p.scores_end + 1) for p in scoring]
    counts = [p.sequence.scored_alternatives for p in scoring]
    return ScoredRows(
        np.concatenate(tokens).astype(np.int64), np.repeat(np.array(counts, np.int64), [p.scores for p in scoring])
    )


def _rows_of(chunk: ScheduledChunk) -> list[_Row]:
    """Return the sequence, parameters, seed and position of each row that a chunk samples."""
    sequence, end = chunk.sequence, chunk.start + chunk.count
    params = sequence.sampling
    assert params is not None
    seed = params.seed or 0
    if chunk.samples == 1 and not chunk.parallel_seeds:
        return [(sequence, params, seed, end)]
    rows = [(sequence, params, seed, end - back) for back in range(chunk.samples - 1, -1, -1)]
    return rows + [(sequence, params, parallel_seed, end) for parallel_seed in chunk.parallel_seeds]


def _edits(rows: list[_Row]) -> Iterator[RowEdit]:
    """Yield the edits of the rows that have any."""
    for row, (sequence, _, _, position) in enumerate(rows):
        edits, prompt_tokens = sequence.edits, sequence.prompt_tokens
        if edits is not None and edits.change(position - prompt_tokens):
            # A stream that failed in the previous step has one token less; the token sampled for it here is dropped.
            end = min(position, sequence.num_tokens + sequence.num_proposed)
            yield edits.of_row(row, sequence.tokens(0, end), prompt_tokens, position)


def _allowed(rows: list[_Row]) -> dict[int, UInt32]:
    """Return the ``allowed_token_ids`` masks of the rows that have one, by row."""
    return {
        row: edits.allowed
        for row, (sequence, *_) in enumerate(rows)
        if (edits := sequence.edits) is not None and edits.allowed is not None
    }
