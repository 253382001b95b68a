"""Batches and sampling parameters made of plans: rows, positions, histories and seeds of decodes, drafts and parallel
samples."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest
import torch

from pillion.engine.adapters.adapter_rows import adapted_runs
from pillion.engine.backends.batching import build_draft_sampling, build_sampling, build_step_batch
from pillion.engine.sampling.allowed_masks import mask_of
from pillion.engine.sampling.sampler import sample
from pillion.engine.scheduling.block_chain import AdoptedTicket
from pillion.engine.scheduling.sequence import Sequence
from pillion.engine.scheduling.step_plan import ScheduledChunk, StepPlan
from pillion.types import SamplingParams
from tests.support.sampling import GivenMasks

BLOCK = 4
VOCAB_SIZE = 64


def sequence(
    seq_id: int,
    tokens: Seq[int],
    *,
    prompt: int | None = None,
    prefill_range: bool = False,
    **overrides: Any,
) -> Sequence:
    params = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 100 + seq_id, "max_tokens": 50}
    params["stop_token_ids"] = (9, 11)
    slots = tuple(range(1000 * seq_id, 1000 * seq_id + len(tokens) // BLOCK + 3))
    return Sequence(
        AdoptedTicket(seq_id, (), slots),
        BLOCK,
        0.0,
        seq_id=seq_id,
        token_ids=np.array(tokens, np.int32),
        parent_hash=b"\7" * 32,
        prompt_tokens=len(tokens) if prompt is None else prompt,
        sampling=None if prefill_range else SamplingParams(**params | overrides),
        max_model_len=100,
        chunk_ends=(len(tokens),) if prefill_range else (),
        vocab_size=VOCAB_SIZE,
    )


def with_drafts(stream: Sequence, drafts: Seq[int]) -> Sequence:
    stream.propose(np.array(drafts, np.int32))
    return stream


def test_the_batch_of_a_mixed_step() -> None:
    decode, prompt_tail = sequence(1, range(10)), sequence(2, range(50, 57))
    part, prefill_range = sequence(3, range(20)), sequence(4, range(8), prefill_range=True)
    drafted = with_drafts(sequence(5, range(30, 36)), [90, 91])
    plan = StepPlan(
        (
            ScheduledChunk(decode, 9, 1, 1),
            ScheduledChunk(drafted, 5, 3, 3),
            ScheduledChunk(prompt_tail, 4, 3, 1, parallel_seeds=(7, -8)),
            ScheduledChunk(part, 8, 4, 0),
            ScheduledChunk(prefill_range, 0, 8, 0),
        )
    )
    batch, rows = build_step_batch(plan, BLOCK), build_sampling(plan, None)
    assert batch.token_ids.tolist() == [9, 35, 90, 91, 54, 55, 56, *range(8, 12), *range(8)]
    assert batch.positions.tolist() == [9, 5, 6, 7, 4, 5, 6, *range(8, 12), *range(8)]
    assert batch.query_starts.tolist() == [0, 1, 4, 7, 11, 19]
    assert batch.context_lens.tolist() == [10, 8, 7, 12, 8]
    assert batch.block_tables.tolist() == [
        [1000, 1001, 1002],
        [5000, 5001, 0],
        [2000, 2001, 0],
        [3000, 3001, 3002],
        [4000, 4001, 0],
    ]
    assert batch.sample_rows.tolist() == [0, 1, 2, 3, 6, 6, 6]
    assert all(values.dtype == np.int32 for values in (batch.token_ids, batch.sample_rows, batch.block_tables))
    assert rows.positions.tolist() == [10, 6, 7, 8, 7, 7, 7]
    assert rows.seeds.tolist() == [101, 105, 105, 105, 102, 7, 2**64 - 8]
    assert len(rows) == 7
    assert rows.edits == ()


def test_only_sampling_chunks_have_sample_rows() -> None:
    plan = StepPlan((ScheduledChunk(sequence(1, range(10)), 9, 1, 1), ScheduledChunk(sequence(2, range(8)), 2, 3, 0)))
    assert build_step_batch(plan, BLOCK).sample_rows.tolist() == [0]
    nothing = StepPlan(plan.scheduled[1:])
    assert build_step_batch(nothing, BLOCK).sample_rows.tolist() == []
    assert len(build_sampling(nothing, None)) == 0


def test_parameters_and_their_defaults() -> None:
    tuned = sequence(1, [3], temperature=0.5, top_p=0.25, top_k=-1, min_p=0.125, logprobs=4, seed=-1)
    bare = sequence(2, [3], temperature=None, top_p=None, top_k=None, seed=None)
    rows = build_sampling(StepPlan((ScheduledChunk(tuned, 0, 1, 1), ScheduledChunk(bare, 0, 1, 1))), None)
    assert rows["temperature"].tolist() == [0.5, 1.0]
    assert rows["top_p"].tolist() == [0.25, 1.0]
    assert rows["top_k"].tolist() == [0, 0]
    assert rows["min_p"].tolist() == [0.125, 0.0]
    assert rows.logprobs.tolist() == [4, -1]
    assert rows.seeds.tolist() == [2**64 - 1, 0]


def test_logit_edits_use_the_tokens_before_their_row() -> None:
    """Prompt 1 2 3, answer 4 5, drafts 6 7: each row sees the tokens before the one it samples."""
    params = {"repetition_penalty": 2.0, "frequency_penalty": 0.5, "logit_bias": {8: 1.0, 1: -2.0}, "min_tokens": 4}
    stream = with_drafts(sequence(1, [1, 2, 3, 4, 5], prompt=3, **params), [6, 7])
    plain = sequence(2, [1, 2], repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, min_tokens=0)
    rows = build_sampling(StepPlan((ScheduledChunk(plain, 1, 1, 1), ScheduledChunk(stream, 4, 3, 3))), None)
    assert [edit.row for edit in rows.edits] == [1, 2, 3]
    assert [edit.seen.tolist() for edit in rows.edits] == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7]]
    assert [edit.answered.tolist() for edit in rows.edits] == [[4, 5], [4, 5, 6], [4, 5, 6, 7]]
    # Two tokens are generated: with min_tokens 4, the third and fourth must not end the answer, and the fifth may.
    assert [sorted(edit.banned.tolist()) for edit in rows.edits] == [[9, 11], [9, 11], []]
    for edit in rows.edits:
        assert dict(zip(edit.biased.tolist(), edit.bias.tolist(), strict=True)) == {8: 1.0, 1: -2.0}
        assert (edit.repetition, edit.presence, edit.frequency) == (2.0, 0.0, 0.5)


def test_only_histories_that_a_row_needs_are_gathered() -> None:
    only = {
        "presence_penalty": ("answered", [3]),
        "repetition_penalty": ("seen", [1, 2, 3]),
        "min_tokens": ("banned", [9, 11]),
    }
    for name, (array, wanted) in only.items():
        stream = sequence(1, [1, 2, 3], prompt=2, **{name: 2})
        (edit,) = build_sampling(StepPlan((ScheduledChunk(stream, 2, 1, 1),)), None).edits
        for each in ("biased", "seen", "answered", "banned"):
            assert sorted(getattr(edit, each).tolist()) == (wanted if each == array else [])


def test_drafts_are_verified_as_single_steps_would_sample() -> None:
    """Each row of a chunk with drafts samples the token of a step without drafts (I6)."""
    params = {"temperature": 1.0, "repetition_penalty": 1.5, "presence_penalty": 0.5, "min_tokens": 2}
    history, logits = [1, 2, 3, 4], torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    drafted = with_drafts(sequence(1, history, prompt=3, **params), [5, 6])
    together = sample(logits, build_sampling(StepPlan((ScheduledChunk(drafted, 3, 3, 3),)), None)).token_ids
    for row in range(3):
        alone = sequence(1, [*history, 5, 6][: 4 + row], prompt=3, **params)
        plan = StepPlan((ScheduledChunk(alone, 3 + row, 1, 1),))
        assert sample(logits[row : row + 1], build_sampling(plan, None)).token_ids == together[row : row + 1]


def test_draft_tokens_are_sampled_like_their_verifying_rows() -> None:
    params = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "logprobs": 2, "frequency_penalty": 0.5}
    stream, other = sequence(1, [1, 2, 3, 4], prompt=3, **params), sequence(2, [5, 6])
    drafting = build_draft_sampling([(stream, 0), (stream, 1), (other, 0)], 64)
    judging = build_sampling(
        StepPlan((ScheduledChunk(with_drafts(stream, [5]), 3, 2, 2), ScheduledChunk(other, 1, 1, 1))), None
    )
    for name in ("temperature", "top_k", "top_p", "min_p"):
        assert drafting[name].tolist() == judging[name].tolist()
    assert drafting.seeds.tolist() == judging.seeds.tolist()
    assert drafting.positions.tolist() == judging.positions.tolist()
    # Penalties ignore draft tokens, and nothing is reported.
    assert [edit.answered.tolist() for edit in drafting.edits] == [[4], [4]]
    assert drafting.logprobs.tolist() == [-1, -1, -1]
    biased = sequence(3, [1], logit_bias={63: 1.0})
    assert build_draft_sampling([(biased, 0)], 64).edits
    assert not build_draft_sampling([(biased, 0)], 63).edits


@pytest.mark.parametrize("most", [1, 4, 8])
def test_runs_of_adapters_cover_each_row_once(most):
    slots = np.array([2, -1, 0, 5, 0, 5, 0, -1, 0, 0, 0, 0, 0, 0, 5], np.int32)
    rows, runs = adapted_runs(slots, most)
    assert (runs[:, 2] <= most).all()
    covered = [(rows[at], slot) for slot, first, count in runs.tolist() for at in range(first, first + count)]
    assert sorted(covered) == [(row, slot) for row, slot in enumerate(slots) if slot >= 0]
    assert len(runs) == 1 + -(-9 // most) + -(-3 // most)
    assert adapted_runs(np.full(3, -1, np.int32), most)[1].shape == (0, 3)


def test_bad_words_see_the_answer_and_its_drafts() -> None:
    """Prompt 1 2, answer 3 4, drafts 5 6: a word is banned if its last token would complete it in the answer."""
    words = ((7,), (3, 4, 8), (4, 5, 9), (5, 6, 10), (2, 3, 11), (1, 2, 3, 4, 12))
    stream = with_drafts(sequence(1, [1, 2, 3, 4], prompt=2, bad_words_token_ids=words), [5, 6])
    rows = build_sampling(StepPlan((ScheduledChunk(stream, 3, 3, 3),)), None)
    assert [sorted(edit.banned.tolist()) for edit in rows.edits] == [[7, 8], [7, 9], [7, 10]]
    assert stream.reads_history
    assert not sequence(1, [1], bad_words_token_ids=((7,),)).reads_history
    fresh = sequence(1, [1, 2, 3], bad_words_token_ids=words)
    assert build_sampling(StepPlan((ScheduledChunk(fresh, 2, 1, 1),)), None).edits[0].banned.tolist() == [7]


def test_allowed_tokens_are_masks_of_their_rows() -> None:
    """A parallel sample has its parent's mask, and a grammar's mask is narrowed unless nothing would be left."""
    some = mask_of([3, 40], 64)
    plain, parent = sequence(1, [1, 2]), sequence(2, [1, 2, 3], allowed_token_ids=(3, 40))
    other = sequence(3, [5, 6], allowed_token_ids=(9,))
    plan = StepPlan(
        (
            ScheduledChunk(plain, 1, 1, 1),
            ScheduledChunk(parent, 2, 1, 1, parallel_seeds=(7,)),
            ScheduledChunk(other, 1, 1, 1),
        )
    )
    masks = build_sampling(plan, None).masks
    assert masks is not None
    bits, there = masks.take()
    assert masks.rows.tolist() == [1, 2, 3]
    assert there.all()
    assert bits.tolist() == [some.tolist(), some.tolist(), mask_of([9], 64).tolist()]
    allowed = np.zeros((3, 64), bool)
    allowed[0, [1, 2]] = allowed[1, [40, 41]] = allowed[2, [10, 11]] = True
    masks = build_sampling(plan, GivenMasks(np.array([0, 2, 3]), allowed, [2])).masks
    assert masks is not None
    bits, there = masks.take()
    assert masks.rows.tolist() == [0, 1, 2, 3]
    assert there.tolist() == [True, True, True, False]
    wanted = [mask_of([1, 2], 64), some, mask_of([40], 64), mask_of([10, 11], 64)]
    assert bits.tolist() == [one.tolist() for one in wanted]
    logits = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    chosen = sample(logits, build_sampling(plan, None)).token_ids
    assert set(chosen[1:3]) <= {3, 40}
    assert chosen[3] == 9
