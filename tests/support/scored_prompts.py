"""Prompt scoring on a backend by hand, as in a decode worker's steps."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pillion.engine.backends.batching import build_sampling, build_step_batch
from pillion.engine.scheduling.block_chain import AdoptedTicket
from pillion.engine.scheduling.sequence import ParallelSampleSpec, Sequence
from pillion.engine.scheduling.step_plan import ScheduledChunk, StepPlan
from pillion.types import SamplingParams, TokenLogprob

ALTERNATIVES = 3


def run_scored(backend: Any, texts: Seq[Seq[int]], chunks: Seq[int], rope_shift: int = 0) -> list[list[TokenLogprob]]:
    """Score all texts side by side, in chunks of these sizes and the rest in one; each ends with three first tokens."""
    block_size = backend.layout.block_size
    blocks = -(-max(map(len, texts)) // block_size) + 1
    sampling = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, seed=3, logprobs=1, max_tokens=4)
    sampling = replace(sampling, prompt_logprobs=ALTERNATIVES)
    sequences = [
        Sequence(
            AdoptedTicket(1, (), tuple(range(number * blocks, (number + 1) * blocks))),
            block_size,
            0.0,
            seq_id=number,
            token_ids=np.array(text, np.int32),
            parent_hash=b"\7" * 32,
            prompt_tokens=len(text),
            sampling=sampling,
            max_model_len=4096,
            rope_shift=rope_shift,
            parallel_samples=(ParallelSampleSpec(90, 4), ParallelSampleSpec(91, 5)),
        )
        for number, text in enumerate(texts)
    ]
    found: list[list[TokenLogprob]] = [[] for _ in texts]
    for count in [*chunks, max(map(len, texts))]:
        scheduled = []
        for sequence in sequences:
            start, end = sequence.num_computed, min(sequence.num_computed + count, sequence.num_tokens)
            if start < end:
                last = end == sequence.num_tokens
                scores = sequence.rows_to_score(start, end)
                seeds = (4, 5) if last else ()
                scheduled.append(ScheduledChunk(sequence, start, end - start, int(last), seeds, scores))
        plan = StepPlan(tuple(scheduled))
        sampled = backend.launch(build_step_batch(plan, block_size), (), build_sampling(plan, None)).wait()
        assert len(sampled.token_ids) == len(sampled.logprobs) == 3 * sum(chunk.samples for chunk in scheduled)
        scores_left = iter(sampled.scored)
        for chunk in scheduled:
            found[chunk.sequence.seq_id] += [next(scores_left) for _ in range(chunk.scores)]
            chunk.sequence.compute(chunk.start, chunk.start + chunk.count, 0.0)
            chunk.sequence.score(chunk.scores)
        assert next(scores_left, None) is None
    return found


def check_scores(found: Seq[TokenLogprob], text: Seq[int], logits: torch.Tensor, tolerance: float = 1e-4) -> None:
    """Compare with log-softmax of a model's logits [N, V] of the text."""
    assert [one.token_id for one in found] == list(text[1:])
    rows = torch.log_softmax(logits[:-1].double(), -1)
    for one, token, row in zip(found, text[1:], rows, strict=True):
        top = row.topk(ALTERNATIVES).values.tolist()
        assert one.logprob == pytest.approx(float(row[token]), abs=tolerance)
        assert one.top_logprobs == pytest.approx(top, abs=tolerance)
        assert row[list(one.top_ids)].tolist() == pytest.approx(top, abs=tolerance)
        likelier = (row > row[token] + tolerance).sum(), (row > row[token] - tolerance).sum()
        assert int(likelier[0]) + 1 <= one.rank <= int(likelier[1]) + 1
