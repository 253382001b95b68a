"""The scheduler's rules, each isolated: collaborators are fakes, and steps return chosen tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from pillion.engine.scheduling.adapter_slots import AdapterSlots
from pillion.engine.scheduling.block_chain import AdoptedTicket
from pillion.engine.scheduling.block_manager import BlockManager
from pillion.engine.scheduling.grammars import Grammars
from pillion.engine.scheduling.scheduler import MAX_SCORED_ROWS, Scheduler, scored_rows
from pillion.engine.scheduling.sequence import ParallelSampleSpec, Sequence, SequenceState
from pillion.engine.scheduling.step_model import MIN_TAIL_TOKENS, StepModel
from pillion.engine.scheduling.step_plan import Outcome, StepPlan, Update
from pillion.errors import BrokenGrammar, BrokenModel, ConfigError, Internal, NotFound
from pillion.kernels.step import MASK_LATE, NO_TOKEN, Sampled
from pillion.rules.priority import Flow
from pillion.types import FinishReason, PoolingParams, SamplingParams, TokenLogprob
from tests.support.scheduler_harness import NumberedAdapter

BLOCK = 4
SCORE = TokenLogprob(1, -0.5)
NAN = TokenLogprob(1, math.nan)
BROKEN = Internal("it broke")
BROKEN_GRAMMAR = BrokenGrammar("it broke")


class CallRecorder:
    """A collaborator that records its calls and returns fixed answers, by method."""

    lacking_blocks = 0

    def __init__(self, **answers: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append((name, *arguments, *options.values()))
            answer = self._answers.get(name)
            return answer(*arguments) if callable(answer) else answer

        return call

    def named(self, *names: str) -> list[tuple[Any, ...]]:
        """Return the recorded calls of these methods."""
        return [call for call in self.calls if call[0] in names]


class FixedDrafts(CallRecorder):
    """Proposes ``tokens[seq_id]`` in each step, and reports 3 s of drafting."""

    draft_chains: Any = None

    def __init__(self, tokens: dict[int, list[int]] | None = None, **answers: Any) -> None:
        super().__init__(**{"may_run_ahead": False} | answers)
        self.tokens = tokens or {}

    def draft(self, scheduled: Seq[Any], *arguments: Any, **options: Any) -> float:
        self.calls.append(("draft", *arguments, options))
        for chunk in scheduled:
            tokens = self.tokens.get(chunk.sequence.seq_id)
            if tokens and not chunk.sequence.num_proposed:
                chunk.sequence.propose(np.array(tokens, np.int32))
        return 3.0


@dataclass
class FixedGrammar:
    """A grammar's state whose attributes the test sets."""

    forced: tuple[int, ...] = ()
    completes: bool = False
    failure: BrokenGrammar | None = None
    ready: bool = True
    may_run_ahead: bool = True
    taken: list[int] = field(default_factory=list)
    samples: list[FixedGrammar] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.taken)

    def follow(self) -> bool:
        return self.ready

    def take(self, tokens: Seq[int]) -> None:
        self.taken += tokens
        self.forced = self.forced[len(tokens) :]

    def sample(self) -> FixedGrammar:
        self.samples.append(FixedGrammar())
        return self.samples[-1]


class RuleWorker:
    """A scheduler whose steps return the given tokens."""

    def __init__(self, *, budget: int = 64, max_num_seqs: int = 4, **options: Any) -> None:
        self.blocks = BlockManager(BLOCK)
        options = {"grammars": Grammars(self.blocks.free_slots)} | options
        self.scheduler = Scheduler(
            blocks=self.blocks, max_num_batched_tokens=budget, max_num_seqs=max_num_seqs, **options
        )
        self._slots = itertools.count()

    def ticket(self, number: int, length: int, cached: int = 0) -> AdoptedTicket:
        slots = tuple(itertools.islice(self._slots, length // BLOCK + 1))
        return AdoptedTicket(number, slots[:cached], slots[cached:])

    def add(
        self, seq_id: int, length: int = 6, max_tokens: int = 8, *, grammar: FixedGrammar | None = None, **options: Any
    ) -> Sequence:
        """Add a stream with a prompt of ``length`` tokens; it has ticket number ``seq_id``."""
        chosen = {name: options.pop(name) for name in ("prompt_logprobs", "logprobs") if name in options}
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop_token_ids=(9,), **chosen)
        cached = options.pop("cached", 0)
        fields: dict[str, Any] = {"sampling": sampling, "max_model_len": 30_000} | options
        sequence = Sequence(
            self.ticket(seq_id, length, cached),
            BLOCK,
            0.0,
            seq_id=seq_id,
            token_ids=np.arange(seq_id, seq_id + length, dtype=np.int32),
            parent_hash=bytes(32),
            prompt_tokens=length,
            **fields,
        )
        if grammar is not None:
            sequence.follow_grammar(grammar)  # type: ignore[arg-type]
        self.scheduler.add(sequence, 0.0)
        return sequence

    def plan(self, now: float = 0.0) -> StepPlan:
        return self.scheduler.schedule(now)

    def step(self, *tokens: int, now: float = 0.0, **results: Any) -> Outcome:
        """Run a step whose rows choose these tokens."""
        plan = self.plan(now)
        outcome = self.scheduler.commit(plan, Sampled(tokens, **results), now)
        self.scheduler.check_integrity()
        return outcome

    def answer(self, sequence: Sequence, now: float = 0.0) -> Outcome:
        """Let the node accept the sequence's commit."""
        self.scheduler.committed(sequence.seq_id, sequence.slots(sequence.num_committed, sequence.num_sent), "", now)
        return self.scheduler.flush(now)

    def exhaust(self, now: float) -> None:
        """Let the node refuse the lease call."""
        assert self.blocks.free_slots.lease_under_way
        self.scheduler.granted((), now)

    def preempt(self, sequence: Sequence) -> None:
        self.scheduler._close(sequence, 0.0, commit_rest=True, resume=True)


def ids(plan: StepPlan) -> list[int]:
    return [chunk.sequence.seq_id for chunk in plan.scheduled]


def tokens(outcome: Outcome, seq_id: int) -> list[int]:
    return [token for update in outcome.updates if update.seq_id == seq_id for token in update.token_ids]


def ending(outcome: Outcome) -> dict[int, Any]:
    """Return the finish reason or error of each sequence that ended."""
    ends = {update.seq_id: update.ending for update in outcome.updates if update.ending is not None}
    return {seq_id: end.reason or end.error for seq_id, end in ends.items()}


def orders(outcome: Outcome) -> list[tuple[int, int]]:
    """Return (seq_id, blocks) of each commit order."""
    return [(order.seq_id, len(order.slots)) for order in outcome.commits]


def test_scored_rows_are_limited_by_number_and_bytes() -> None:
    assert scored_rows(1) == MAX_SCORED_ROWS
    assert (scored_rows(2**17), scored_rows(2**17 + 1)) == (128, 127)
    assert scored_rows(2**40) == 1


# Limits and targets.


def test_a_step_must_hold_all_decodes_and_an_unchunked_prompt() -> None:
    for budget, max_num_seqs, longest in ((4, 4, 0), (12, 4, 10), (1, 1, 1)):
        assert RuleWorker(
            budget=budget, max_num_seqs=max_num_seqs, max_whole_tokens=longest
        ).scheduler.whole_prompts == (longest > 0)
    for budget, max_num_seqs, longest in ((4, 0, 0), (4, 5, 0), (11, 4, 10)):
        with pytest.raises(ConfigError):
            RuleWorker(budget=budget, max_num_seqs=max_num_seqs, max_whole_tokens=longest)


def test_steps_have_targets_only_with_chunked_prefill() -> None:
    options: dict[str, Any] = {"target_itl_s": 2.0, "target_itl_steps": 3.0, "even_steps": True}
    for worker, targets in (
        (RuleWorker(), (0.0, 0.0, False)),
        (RuleWorker(**options), (2.0, 3.0, True)),
        (RuleWorker(max_whole_tokens=10, **options), (0.0, 0.0, False)),
        (RuleWorker(even_steps=False), (0.0, 0.0, False)),
    ):
        budget = worker.scheduler.budget
        assert (budget.target_s, budget.target_steps, budget.even) == targets
    pair_costs = []
    for worker in (RuleWorker(), RuleWorker(pair_tokens=0.5)):
        worker.add(1)
        worker.plan(1.0)
        worker.scheduler.budget.end(2.0)
        pair_costs.append(worker.scheduler.budget.cost.model.pair_s)
    assert pair_costs[0] < pair_costs[1]


# Proposals.


def test_accepted_drafts_end_at_the_first_wrong_one() -> None:
    drafts = FixedDrafts({1: [5, 6], 2: [5], 3: [5, 6], 4: [5, 9, 7]})
    worker = RuleWorker(drafts=drafts)
    for seq_id in (1, 2, 3):
        worker.add(seq_id)
    worker.add(4, grammar=FixedGrammar())
    worker.step(1, 1, 1, 1)
    # Right and wrong; wrong at once; a late mask; a stop id, which is no draft's fault.
    outcome = worker.step(*(5, 7, 8), *(4, 5), *(MASK_LATE, 5, 6), *(5, 9, 7, 8))
    assert [tokens(outcome, seq_id) for seq_id in (1, 2, 3, 4)] == [[5, 7], [4], [], [5, 9]]
    assert outcome.judged_draft_tokens == [(2, 1), (1, 0), (2, 0), (3, 1)]
    assert [(call[1].seq_id, *call[2:]) for call in drafts.named("judged")] == [(1, 2, 1), (2, 1, 0), (4, 3, 1)]
    assert outcome.forced_tokens == 0
    assert ending(outcome) == {4: FinishReason.STOP}


def test_a_plain_step_judges_no_draft() -> None:
    drafts = FixedDrafts()
    worker = RuleWorker(drafts=drafts)
    worker.add(1)
    worker.step(1)
    outcome = worker.step(2)
    assert not outcome.judged_draft_tokens
    assert not drafts.named("judged")
    # The first step had no decode to draft for.
    assert len(drafts.named("draft")) == 1
    worker = RuleWorker(grammars=None)
    worker.add(1)
    worker.step(1)
    assert tokens(worker.step(2), 1) == [2]


@pytest.mark.parametrize("logprobs", [None, 0])
def test_forced_tokens_are_counted_up_to_the_end(logprobs: int | None) -> None:
    drafts = FixedDrafts()
    worker = RuleWorker(drafts=drafts if logprobs is None else None)
    # Rows for forced tokens exist only if their log probabilities are reported.
    whole, stopped = FixedGrammar(), FixedGrammar()
    worker.add(1, 4, grammar=whole, logprobs=logprobs)
    worker.add(2, 4, grammar=stopped, logprobs=logprobs)
    worker.step(1, 1)
    whole.forced, stopped.forced = (4, 5), (4, 9, 5)
    rows = (6, 6) if logprobs is None else (4, 5, 6, 4, 9, 5, 6)
    outcome = worker.step(*rows)
    assert (tokens(outcome, 1), tokens(outcome, 2)) == ([4, 5, 6], [4, 9])
    assert outcome.forced_tokens == 2 + 2
    assert not outcome.judged_draft_tokens
    assert not drafts.named("judged")
    assert (whole.taken, stopped.taken) == ([1, 4, 5, 6], [1, 4, 9])
    assert ending(outcome) == {2: FinishReason.STOP}


def test_room_of_drafts_is_what_tails_and_forced_tokens_leave() -> None:
    drafts, grammar = FixedDrafts(), FixedGrammar()
    worker = RuleWorker(drafts=drafts, budget=64)
    worker.add(1, grammar=grammar)
    worker.add(2)
    worker.step(1, 1)
    worker.plan(5.0)
    spare, idle, now, options = drafts.named("draft")[-1][1:]
    assert (spare, idle, now) == (62, 62, 5.0)
    assert options == {"cost": worker.scheduler.budget.cost, "grammars": worker.scheduler.grammars}
    grammar.forced = (4,)
    worker.add(3, 10)
    worker.add(4, 12)
    worker.plan(5.0)
    spare, idle, _, _ = drafts.named("draft")[-1][1:]
    assert (spare, idle) == (62 - MIN_TAIL_TOKENS - 1, 62 - 22)


def test_unchunked_prompts_reserve_the_first_tail() -> None:
    drafts = FixedDrafts()
    worker = RuleWorker(drafts=drafts, budget=64, max_whole_tokens=30)
    worker.add(1)
    worker.step(1)
    worker.add(2, 10)
    worker.add(3, 12)
    worker.plan()
    assert drafts.named("draft")[-1][1:3] == (63 - 10, 63 - 22)


def test_no_drafts_in_steps_beyond_the_target() -> None:
    drafts = FixedDrafts()
    cost = StepModel(1.0, 0.01, 0.0, 0.0, 0.0)
    worker = RuleWorker(drafts=drafts, grammars=None, target_itl_s=0.5, expected_cost=cost)
    worker.add(1)
    worker.step(1)
    worker.plan()
    assert drafts.named("draft")[-1][1] == 0


def test_a_measured_step_begins_after_drafting() -> None:
    worker = RuleWorker(drafts=FixedDrafts())
    worker.add(1)
    worker.step(1)
    worker.plan(5.0)
    assert worker.scheduler.budget.end(10.0) == 2.0
    worker = RuleWorker()
    worker.add(1, grammar=FixedGrammar())
    worker.step(1)
    worker.scheduler.sequences[1].grammar.forced = (3,)  # type: ignore[union-attr]
    worker.plan(5.0)
    assert worker.scheduler.budget.end(10.0) == 5.0


def test_drafts_decide_whether_steps_run_ahead() -> None:
    assert RuleWorker().scheduler.may_run_ahead
    assert RuleWorker(drafts=FixedDrafts(may_run_ahead=True)).scheduler.may_run_ahead
    assert not RuleWorker(drafts=FixedDrafts()).scheduler.may_run_ahead


# Prompt tails.


def chunks(plan: StepPlan) -> list[tuple[int, int, int]]:
    """Return (seq_id, tokens, samples) of each chunk."""
    return [(chunk.sequence.seq_id, chunk.count, chunk.samples) for chunk in plan.scheduled]


@pytest.mark.parametrize("budget", [6, 7])
def test_tails_are_packed_up_to_the_last_token(budget: int) -> None:
    worker = RuleWorker(budget=budget)
    worker.add(1, 6)
    worker.add(2, 6)
    worker.add(3, 6)
    assert chunks(worker.plan()) == [(1, 6, 1), (2, 1, 0)][: budget - 5]


def test_a_tail_without_a_place_is_skipped_and_the_rest_is_filled() -> None:
    worker = RuleWorker(max_num_seqs=2, budget=10)
    worker.add(1, 30, priority=1)
    worker.step()
    worker.preempt(worker.add(2, 3))
    worker.scheduler.resumed(2, worker.ticket(22, 3), 0.0)
    worker.add(3, 3)
    plan = worker.plan()
    assert chunks(plan) == [(2, 3, 1), (1, 7, 0)]
    assert plan.budget_tokens == 10
    worker.scheduler.check_integrity()


def test_an_unchunked_prompt_waits_for_a_step_with_room() -> None:
    worker = RuleWorker(budget=12, max_whole_tokens=10, max_scored_rows=4)
    worker.add(1, 8)
    worker.add(2, 5)
    worker.add(3, 2)
    assert chunks(worker.plan()) == [(1, 8, 1)]
    # A prompt that is scored is chunked in any case; step ends are ignored.
    worker = RuleWorker(budget=12, max_whole_tokens=10, max_scored_rows=4)
    worker.add(1, 8, prompt_logprobs=0)
    worker.add(2, 8).step_ends = [4]
    assert chunks(worker.plan()) == [(1, 4, 0), (2, 8, 1)]


def test_a_blocked_stream_limits_the_room_of_tails() -> None:
    cost = StepModel(1.0, 0.01, 0.0, 0.0, 0.0)
    worker = RuleWorker(target_itl_s=0.5, expected_cost=cost)
    grammar = FixedGrammar()
    worker.add(1, grammar=grammar)
    worker.step(1)
    # A stream that waits for its grammar still has a reader.
    grammar.ready = False
    worker.add(2, 60)
    assert chunks(worker.plan()) == [(2, MIN_TAIL_TOKENS, 0)]


def test_a_chunk_ends_where_the_state_is_kept() -> None:
    worker = RuleWorker()
    worker.add(1, 8).step_ends = [4]
    worker.add(2, 8)
    assert chunks(worker.plan()) == [(1, 4, 0), (2, 8, 1)]


def test_a_prompts_grammar_is_asked_when_its_last_token_fits() -> None:
    worker = RuleWorker(budget=4)
    grammar = FixedGrammar()
    worker.add(1, 5, grammar=grammar)
    worker.add(2, 2)
    grammar.failure = BROKEN_GRAMMAR
    worker.step()
    assert worker.scheduler.sequences[1].num_computed == 4
    assert chunks(worker.plan()) == [(2, 2, 1)]
    assert ending(worker.scheduler.flush(0.0)) == {1: BROKEN_GRAMMAR}
    worker = RuleWorker(budget=5)
    grammar = FixedGrammar(ready=False)
    worker.add(1, 5, grammar=grammar)
    assert chunks(worker.plan()) == [(1, 4, 0)]
    worker = RuleWorker(budget=5)
    grammar = FixedGrammar()
    worker.add(1, 5, grammar=grammar)
    grammar.failure = BROKEN_GRAMMAR
    assert not ids(worker.plan())


def test_scored_rows_limit_only_scored_tokens() -> None:
    worker = RuleWorker(max_scored_rows=2)
    worker.add(1, 6, prompt_logprobs=0, scored_tokens=3)
    # The rows of a vector have no logits.
    worker.add(2, 6, 0, pooling=PoolingParams(rows=range(1, 5)))
    plan = worker.plan()
    assert [(chunk.count, chunk.scores, chunk.pools) for chunk in plan.scheduled] == [(5, 2, 0), (6, 0, 4)]
    # A chunk that ends before the row with logits uses none.
    worker = RuleWorker(max_scored_rows=1)
    pooling = PoolingParams(rows=range(5, 6), logits_of=(7,))
    worker.add(1, 6, 0, pooling=pooling).step_ends = [4]
    worker.add(2, 6, 0, pooling=pooling)
    worker.add(3, 6, 0, pooling=pooling)
    assert [(chunk.count, chunk.pools) for chunk in worker.plan().scheduled] == [(4, 0), (6, 1)]
    # Rows of launched steps do not count again.
    worker = RuleWorker(max_scored_rows=3)
    worker.add(1, 7, prompt_logprobs=0)
    for expected in ((0, 3, 3), (3, 3, 3), (6, 1, 0)):
        plan = worker.plan()
        assert [(chunk.start, chunk.count, chunk.scores) for chunk in plan.scheduled] == [expected]
        worker.scheduler.launched(plan)
    worker = RuleWorker()
    worker.add(1, 6, prompt_logprobs=0)
    assert chunks(worker.plan()) == [(1, 6, 1)]


def test_only_a_streams_last_chunk_chooses_a_token() -> None:
    worker = RuleWorker(budget=20, max_num_seqs=5)
    worker.add(1, 5, sampling=None, chunk_ends=(4,))
    worker.add(2, 4, 0)
    worker.add(3, 6, 0, pooling=PoolingParams(rows=range(2, 4)))
    worker.add(4, 6, parallel_samples=(ParallelSampleSpec(11, 7),))
    plan = worker.plan(2.0)
    assert chunks(plan) == [(1, 5, 0), (2, 4, 0), (3, 6, 0), (4, 5, 0)]
    assert [(chunk.pools, chunk.parallel_seeds) for chunk in plan.scheduled[2:]] == [(2, ()), (0, ())]
    rows = (np.zeros(2, np.float32),) * 2
    worker.scheduler.commit(plan, Sampled(pooled=rows), 3.0)
    plan = worker.plan(4.0)
    assert [(chunk.sequence.seq_id, chunk.parallel_seeds) for chunk in plan.scheduled] == [(4, (7,))]
    progress = plan.scheduled[0].sequence.progress
    assert (progress.first_step_s, progress.tail_steps) == (2.0, 2)


# Results of a step.


def test_a_late_mask_only_delays_its_stream_and_parallel_samples() -> None:
    worker = RuleWorker()
    grammar = FixedGrammar()
    worker.add(1, grammar=grammar, parallel_samples=(ParallelSampleSpec(11, 1), ParallelSampleSpec(12, 2)))
    worker.add(2)
    outcome = worker.step(MASK_LATE, 7, 8, 3)
    assert [(update.seq_id, update.token_ids) for update in outcome.updates] == [(2, (3,))]
    assert outcome.late_masks == 1
    assert not grammar.taken
    outcome = worker.step(4, 5, 6, 3)
    assert [tokens(outcome, seq_id) for seq_id in (1, 11, 12, 2)] == [[4], [5], [6], [3]]
    assert outcome.late_masks == 0
    # Each parallel sample has the grammar's start, and its own token.
    assert grammar.taken == [4]
    assert [sample.taken for sample in grammar.samples] == [[5], [6]]
    children: list[Any] = [worker.scheduler.sequences[seq_id].grammar for seq_id in (11, 12)]
    assert children == grammar.samples


def test_a_parallel_sample_may_end_with_its_first_token() -> None:
    worker = RuleWorker()
    worker.add(1, parallel_samples=tuple(ParallelSampleSpec(seq_id, 1) for seq_id in (11, 12, 13)))
    # One that has not started is dropped.
    worker.scheduler.cancel(13, 0.0)
    outcome = worker.step(4, 9, 5)
    assert ending(outcome) == {11: FinishReason.STOP}
    assert sorted(worker.scheduler.sequences) == [1, 12]
    assert [order.seq_id for order in outcome.resumes] == [12]
    assert all(update.progress is not None for update in outcome.updates if update.seq_id > 10)


@pytest.mark.parametrize("grammar", [None, FixedGrammar()])
def test_a_parallel_sample_copies_the_partial_block_of_its_prompt(grammar: FixedGrammar | None) -> None:
    worker = RuleWorker(max_num_seqs=3)
    parent = worker.add(1, 6, grammar=grammar, parallel_samples=(ParallelSampleSpec(11, 1),))
    worker.step(4, 5)
    worker.answer(parent)
    worker.preempt(worker.add(3, 2))
    worker.scheduler.resumed(3, worker.ticket(33, 2), 0.0)
    child = worker.scheduler.sequences[11]
    worker.scheduler.resumed(11, worker.ticket(22, 6, cached=1), 0.0)
    if grammar is not None:
        grammar.samples[0].ready = False
    plan = worker.plan()
    assert plan.copies == ((parent.slots(1, 2)[0], child.slots(1, 2)[0]),)
    assert (ids(plan), child.decoding) == ([1, 3] if grammar is not None else [1, 11, 3], True)


def test_broken_logits_fail_a_stream_with_its_parallel_samples() -> None:
    worker = RuleWorker()
    worker.add(1, parallel_samples=(ParallelSampleSpec(11, 1),))
    worker.add(2)
    outcome = worker.step(NO_TOKEN, 7, 3)
    assert isinstance(ending(outcome)[1], BrokenModel)
    assert (tokens(outcome, 2), outcome.late_masks) == ([3], 0)
    assert list(worker.scheduler.sequences) == [2]
    outcome = worker.step(NO_TOKEN)
    assert isinstance(ending(outcome)[2], BrokenModel)
    worker.answer(worker.scheduler.sequences[2])
    assert not worker.scheduler.sequences


@pytest.mark.parametrize("whole", [False, True])
def test_broken_scores_fail_a_stream_and_shift_no_other_row(whole: bool) -> None:
    """Rows of parallel samples are skipped only if the chunk has them."""
    worker = RuleWorker(max_scored_rows=9 if whole else 3)
    worker.add(1, prompt_logprobs=0, parallel_samples=(ParallelSampleSpec(11, 1),))
    worker.add(2)
    rows, scored = ((7, 7), 5) if whole else ((), 3)
    outcome = worker.step(*rows, 3, scored=(SCORE, NAN, *[SCORE] * (scored - 2)))
    assert isinstance(ending(outcome)[1], BrokenModel)
    assert tokens(outcome, 2) == [3]
    assert not any(update.prompt_logprobs for update in outcome.updates)
    assert list(worker.scheduler.sequences) == [2]


def test_scores_are_reported_before_tokens() -> None:
    worker = RuleWorker(max_scored_rows=3)
    worker.add(1, prompt_logprobs=0)
    outcome = worker.step(scored=(SCORE,) * 3)
    assert outcome.updates == [Update(seq_id=1, prompt_logprobs=(SCORE,) * 3)]
    outcome = worker.step(5, scored=(SCORE,) * 2)
    assert [(len(update.prompt_logprobs), update.token_ids) for update in outcome.updates] == [(2, ()), (0, (5,))]


def test_a_prompt_that_generates_nothing_ends_with_its_vector() -> None:
    worker = RuleWorker()
    pooling = PoolingParams(rows=range(2, 4))
    for seq_id in (1, 2):
        worker.add(seq_id, 6, 0, pooling=pooling)
    worker.add(3, 6, 0)
    rows = np.array([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0], [math.inf, 4.0]], np.float32)
    outcome = worker.step(pooled=tuple(rows))
    ends = {update.seq_id: update.ending for update in outcome.updates}
    assert ends[1] is not None
    assert np.frombuffer(ends[1].vector, "<f4").tolist() == [2.0, 3.0]
    assert ends[1].reason is FinishReason.LENGTH
    assert isinstance(ending(outcome)[2], BrokenModel)
    assert ends[3] is not None
    assert (ends[3].reason, ends[3].vector) == (FinishReason.LENGTH, b"")
    # Whole blocks of good texts are committed; nothing of the broken one is.
    assert orders(outcome) == [(1, 1), (3, 1)]
    assert outcome.releases == [2]
    assert [sequence.state for sequence in worker.scheduler.sequences.values()] == [SequenceState.CLOSING] * 2


def test_a_prompt_ends_with_its_last_step() -> None:
    worker = RuleWorker(budget=6, max_num_seqs=1)
    worker.add(1, 8, sampling=None, chunk_ends=(4, 8))
    worker.add(2, 7, 0)
    outcome = worker.step()
    assert (orders(outcome), outcome.commits[0].may_wait) == ([(1, 1)], False)
    assert worker.scheduler.sequences[1].state is SequenceState.RUNNING
    worker.step()
    assert worker.scheduler.sequences[1].state is SequenceState.CLOSING
    # Its end is reported with the node's last answer.
    assert not ending(worker.answer(worker.scheduler.sequences[1]))
    assert list(ending(worker.answer(worker.scheduler.sequences[1]))) == [1]
    outcome = worker.step()
    assert (orders(outcome), outcome.commits[0].may_wait, ending(outcome)) == ([(2, 1)], True, {})
    # Only streams need slots for further tokens.
    assert outcome.lease_blocks == 0
    assert ending(worker.step()) == {2: FinishReason.LENGTH}


# Grammars.


def test_a_grammar_blocks_only_its_own_stream() -> None:
    worker = RuleWorker()
    grammar = FixedGrammar()
    worker.add(1, grammar=grammar)
    worker.add(2)
    worker.step(1, 1)
    grammar.ready, grammar.failure = False, BrokenGrammar("not asked yet")
    assert ids(worker.plan()) == [2]
    grammar.failure = None
    assert not worker.scheduler.flush(0.0).updates
    grammar.ready = True
    assert ids(worker.plan()) == [1, 2]
    grammar.failure = BROKEN_GRAMMAR
    assert ids(worker.plan()) == [2]
    assert ending(worker.scheduler.flush(0.0)) == {1: grammar.failure}


def test_forced_tokens_that_complete_an_answer_need_no_step() -> None:
    worker = RuleWorker()
    grammar = FixedGrammar()
    stream = worker.add(1, 7, grammar=grammar)
    worker.step(1)
    worker.step(2)
    grammar.forced, grammar.completes = (3, 4), True
    assert not ids(worker.plan())
    outcome = worker.scheduler.flush(0.0)
    assert tokens(outcome, 1) == [3, 4]
    assert ending(outcome) == {1: FinishReason.STOP}
    assert outcome.forced_tokens == 2
    assert grammar.taken == [1, 2, 3, 4]
    # Its full blocks are still committed.
    assert stream.state is SequenceState.CLOSING
    assert orders(worker.answer(stream)) == [(1, 1)]


def test_a_stream_that_is_complete_on_arrival_ends_at_once() -> None:
    worker = RuleWorker()
    worker.add(1, grammar=FixedGrammar(completes=True))
    worker.add(2, max_tokens=0, grammar=FixedGrammar(failure=BrokenGrammar("not asked")))
    assert ending(worker.scheduler.flush(0.0)) == {1: FinishReason.STOP}
    assert ids(worker.plan()) == [2]


def test_a_blocked_prompt_is_computed_up_to_its_last_token() -> None:
    worker = RuleWorker()
    worker.add(1, 6, grammar=FixedGrammar(ready=False))
    worker.add(2, 1, grammar=FixedGrammar(ready=False))
    worker.add(3, 6)
    plan = worker.plan()
    assert [(chunk.sequence.seq_id, chunk.count, chunk.samples) for chunk in plan.scheduled] == [(1, 5, 0), (3, 6, 1)]


def test_a_step_follows_a_launched_one_only_if_the_grammar_allows_it() -> None:
    worker = RuleWorker(max_num_seqs=5)
    patient = FixedGrammar(may_run_ahead=False)
    worker.add(1)
    worker.add(2, grammar=FixedGrammar())
    worker.add(3, grammar=patient)
    worker.add(4, max_tokens=1)
    worker.add(5, max_tokens=1, grammar=FixedGrammar())
    plan = worker.plan()
    worker.scheduler.launched(plan)
    second = worker.plan()
    assert ids(second) == [1, 2]
    assert second.unknown == ((0, 0), (1, 1))


# Memory.


def full(worker: RuleWorker, *seq_ids: int) -> list[Sequence]:
    """Add streams that have filled both of their blocks; only the first block is sent to the node."""
    streams = [worker.add(seq_id, 7, 20) for seq_id in seq_ids]
    worker.step(*[1] * len(streams))
    worker.step(*[2] * len(streams))
    return streams


def test_side_users_free_slots_before_a_stream_is_preempted() -> None:
    worker = RuleWorker()

    def free(blocks: int, now: float) -> bool:
        worker.blocks.leased(1)
        worker.scheduler.free_slots.free([100])
        return True

    side = CallRecorder(yield_slots=free, side_chains=())
    worker.scheduler._side_users.append(side)
    full(worker, 1, 2)
    worker.exhaust(1.0)
    assert ids(worker.plan(1.0)) == [1, 2]
    assert side.named("yield_slots") == [("yield_slots", 1, 1.0)] * 2
    assert worker.scheduler.flush(1.0).preemptions == 0


def test_a_preempted_stream_commits_its_full_blocks_first() -> None:
    worker = RuleWorker()
    first, second = full(worker, 1, 2)
    # Its grammar is not asked once it is preempted.
    second.follow_grammar(FixedGrammar(failure=BROKEN_GRAMMAR, taken=[1, 2]))  # type: ignore[arg-type]
    worker.exhaust(1.0)
    # The node has no slots, and no stream waits for one yet.
    assert not worker.scheduler.flush(1.0).lease_blocks
    assert not ids(worker.plan(1.0))
    # The first stream waits for the slots of the second, whose commit is in flight.
    assert not ids(worker.plan(1.01))
    outcome = worker.scheduler.flush(1.01)
    assert (outcome.preemptions, outcome.hurry, outcome.lease_blocks > 0) == (1, True, True)
    assert not outcome.updates
    assert (first.state, second.state) == (SequenceState.RUNNING, SequenceState.CLOSING)
    outcome = worker.answer(second)
    assert (orders(outcome), outcome.releases) == ([(2, 1)], [])
    outcome = worker.answer(second)
    assert (outcome.releases, [order.seq_id for order in outcome.resumes]) == ([2], [2])
    assert second.state is SequenceState.RESUMING
    # With a slot, no stream waits for one.
    worker.exhaust(1.1)
    worker.scheduler.flush(1.1)
    worker.exhaust(1.1)
    worker.blocks.leased(1)
    worker.scheduler.free_slots.free([100])
    assert worker.step(3, now=1.1).lease_blocks == 0


def test_a_preempted_stream_leaves_the_step() -> None:
    """Short prompts go first, and the newest stream is preempted."""
    worker = RuleWorker(expected_cost=StepModel(0.0, 1.0, 0.0, 0.0, 0.0))
    worker.add(1, 1, 20)
    worker.add(2, 7, 20)
    newest = worker.add(3, 2, 20)
    worker.step(1, 1, 1)
    worker.step(2, 2, 2)
    worker.exhaust(1.0)
    assert ids(worker.plan(1.0)) == [1, 2]
    assert newest.state is SequenceState.RESUMING
    worker.scheduler.check_integrity()


def test_no_stream_is_preempted_during_a_lease_call() -> None:
    worker = RuleWorker()
    full(worker, 1, 2)
    assert not ids(worker.plan())
    assert worker.scheduler.flush(0.0).preemptions == 0


def test_a_closing_stream_that_ends_delays_no_preemption() -> None:
    worker = RuleWorker()
    first, second, third = full(worker, 1, 2, 3)
    worker.scheduler.cancel(3, 0.0)
    assert third.state is SequenceState.CLOSING
    worker.scheduler.flush(0.0)
    worker.exhaust(1.0)
    worker.plan(1.0)
    assert (first.state, second.state) == (SequenceState.RUNNING, SequenceState.CLOSING)
    assert worker.scheduler.flush(1.0).preemptions == 1


def test_a_resuming_stream_delays_no_preemption() -> None:
    worker = RuleWorker()
    _, second = full(worker, 1, 2)
    worker.preempt(worker.add(3, 2))
    assert worker.scheduler.sequences[3].state is SequenceState.RESUMING
    # The first answer may be older than the release.
    for _ in range(2):
        worker.exhaust(1.0)
        worker.scheduler.flush(1.0)
        worker.plan(1.0)
    assert second.state is SequenceState.CLOSING
    assert worker.scheduler.flush(1.0).preemptions == 1


def test_no_preemption_while_released_memory_waits_for_a_launched_step() -> None:
    worker = RuleWorker()
    worker.add(1, 7, 20)
    worker.add(2, 7, 20)
    # Its one slot is reused at once, but its ticket is released later.
    worker.add(3, 2, 20)
    worker.step(1, 1, 1)
    worker.scheduler.launched(worker.plan())
    worker.scheduler.cancel(3, 0.0)
    worker.scheduler.flush(0.0)
    assert worker.scheduler.in_flight.holding_back
    # The first answer may be older than the release.
    worker.exhaust(1.0)
    worker.scheduler.flush(1.0)
    worker.exhaust(1.0)
    assert ids(worker.plan(1.0)) == [1]
    assert worker.scheduler.flush(1.0).preemptions == 0


def test_a_stream_that_preempts_itself_gets_no_slot() -> None:
    worker = RuleWorker()
    (stream,) = full(worker, 1)
    worker.scheduler.committed(1, (), "refused", 0.0)
    worker.exhaust(1.0)
    assert not ids(worker.plan(1.0))
    assert stream.state is SequenceState.RESUMING
    assert not stream.owned_slots()
    outcome = worker.scheduler.flush(1.0)
    assert (outcome.preemptions, outcome.releases) == (1, [1])
    worker.scheduler.check_integrity()


def test_a_recall_is_passed_to_side_users_unless_it_is_zero() -> None:
    side = CallRecorder(side_chains=())
    worker = RuleWorker(partial_blocks=side)
    worker.add(1, 2, 20)
    worker.step(1)
    worker.scheduler.granted([100, 101, 102], 0.0)
    worker.scheduler.recall(0, 3.0)
    assert not worker.scheduler.flush(3.0).returned_slots
    assert not side.named("yield_slots")
    worker.scheduler.recall(2, 3.0)
    assert side.named("yield_slots") == [("yield_slots", 2, 3.0)]
    assert len(worker.scheduler.flush(3.0).returned_slots) == 2


def test_a_stream_frees_its_place_for_a_waiting_tenant() -> None:
    for launched in (False, True):
        worker = RuleWorker(max_num_seqs=2)
        second = [worker.add(seq_id, flow=Flow(b"a")) for seq_id in (1, 2)][1]
        worker.step(1, 1)
        if launched:
            worker.scheduler.launched(worker.plan())
        worker.add(3, flow=Flow(b"b"))
        assert ids(worker.plan()) == [1, 3]
        # It runs until the launched step has ended, and goes on if the tenant leaves before.
        assert second.state is (SequenceState.RUNNING if launched else SequenceState.PREEMPTED)
        worker.scheduler.cancel(3, 0.0)
        assert ids(worker.plan()) == [1, 2]


# Ends.


def test_a_reported_end_is_final() -> None:
    """A cancel or failure while the last blocks are committed changes nothing."""
    for end in ("cancel", "fail"):
        worker = RuleWorker()
        stream = worker.add(1, 7)
        worker.step(1)
        worker.step(9)
        assert stream.state is SequenceState.CLOSING
        if end == "cancel":
            worker.scheduler.cancel(1, 0.0)
        else:
            worker.scheduler.fail(1, BROKEN, 0.0)
            worker.scheduler.fail(99, BROKEN, 0.0)
        assert not worker.scheduler.flush(0.0).updates
        assert orders(worker.answer(stream)) == [(1, 1)]
        outcome = worker.answer(stream)
        assert (outcome.updates, outcome.releases) == ([], [1])
        assert not worker.scheduler.sequences


def test_a_cancelled_stream_commits_nothing_more() -> None:
    worker = RuleWorker()
    stream = worker.add(1, 7)
    worker.step(1)
    worker.step(2)
    worker.scheduler.cancel(1, 0.0)
    worker.scheduler.cancel(99, 0.0)
    outcome = worker.answer(stream)
    assert (orders(outcome), outcome.releases, outcome.updates) == ([], [1], [])


def test_a_resuming_stream_is_only_removed() -> None:
    worker = RuleWorker(max_num_seqs=1)
    for seq_id in (1, 2, 3):
        worker.add(seq_id, 3)
    worker.step(1)
    worker.preempt(worker.scheduler.sequences[2])
    assert worker.scheduler.positions() == {2: 0, 3: 1}
    assert worker.scheduler.flush(0.0).releases == [2]
    worker.scheduler.cancel(2, 0.0)
    outcome = worker.scheduler.flush(0.0)
    assert (outcome.releases, outcome.updates) == ([], [])
    assert list(worker.scheduler.sequences) == [1, 3]
    # The ticket that comes nonetheless is released.
    worker.scheduler.resumed(2, worker.ticket(22, 3), 0.0)
    assert worker.scheduler.flush(0.0).releases == [22]


def test_a_resumed_prompt_is_queued_by_the_work_that_is_left() -> None:
    worker = RuleWorker(max_num_seqs=1, expected_cost=StepModel(0.0, 1.0, 0.0, 0.0, 0.0))
    worker.add(1, 3)
    long = worker.add(2, 13)
    before = long.prompt_order
    worker.preempt(long)
    worker.scheduler.resumed(2, worker.ticket(22, 13, cached=3), 0.0)
    assert long.prompt_order < before
    assert long.state is SequenceState.PREEMPTED
    worker.scheduler.check_integrity()


def test_only_whole_prompts_end_without_a_step() -> None:
    worker = RuleWorker()
    worker.add(1, 8, cached=2, sampling=None, chunk_ends=(4, 8))
    worker.add(2, 8, cached=1, sampling=None, chunk_ends=(4, 8))
    outcome = worker.scheduler.flush(0.0)
    assert [(chunk.seq_id, chunk.end_tokens) for chunk in outcome.chunks] == [(1, 4), (1, 8), (2, 4)]
    assert list(ending(outcome)) == [1]
    outcome = worker.step()
    assert orders(outcome) == [(2, 1)]
    assert not outcome.commits[0].may_wait
    worker.answer(worker.scheduler.sequences[2])
    assert not worker.scheduler.sequences


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_refused_commit_fails_a_range_and_lets_a_stream_go_on(cancelled: bool) -> None:
    worker = RuleWorker(budget=7, max_num_seqs=2)
    part = worker.add(1, 8, sampling=None, chunk_ends=(4, 8))
    stream = worker.add(0, 3)
    assert orders(worker.step(5)) == [(1, 1)]
    if cancelled:
        worker.scheduler.cancel(1, 0.0)
    worker.scheduler.committed(1, (), "refused", 0.0)
    outcome = worker.scheduler.flush(0.0)
    assert [type(error) for error in ending(outcome).values()] == ([] if cancelled else [NotFound])
    assert outcome.releases == [1]
    assert part.state is SequenceState.CLOSING
    assert orders(worker.step(5)) == [(0, 1)]
    worker.scheduler.committed(0, (), "refused", 0.0)
    for _ in range(4):
        assert worker.step(5).commits == []
    assert (stream.state, stream.may_commit) == (SequenceState.RUNNING, False)


# Failed steps.


def test_a_failed_step_is_not_measured_and_ends_its_sequences() -> None:
    drafts = FixedDrafts()
    worker = RuleWorker(drafts=drafts, max_num_seqs=2)
    for seq_id in (1, 2, 3):
        worker.add(seq_id)
    first = worker.plan(1.0)
    worker.scheduler.launched(first)
    outcome = worker.scheduler.fail_step(first, BROKEN, 5.0)
    assert ending(outcome) == {1: BROKEN, 2: BROKEN}
    assert worker.scheduler.budget.largest_step_tokens == 0
    assert worker.scheduler.budget.cost.steps == 0
    worker.step(1, now=6.0)
    assert worker.scheduler.budget.largest_step_tokens == 6


def test_time_of_a_step_begins_with_the_failure_of_the_one_before() -> None:
    drafts = FixedDrafts()
    worker = RuleWorker(drafts=drafts, budget=6, max_num_seqs=1)
    worker.add(1, 12)
    first = worker.plan(1.0)
    worker.scheduler.launched(first)
    worker.add(2)
    second = worker.plan(2.0)
    worker.scheduler.launched(second)
    worker.scheduler.fail_step(first, BROKEN, 5.0)
    worker.scheduler.commit(second, Sampled((1,)), 9.0)
    assert [call[2] for call in drafts.named("stepped")] == [4.0]


def test_a_failed_placement_fails_all_users_of_the_adapter() -> None:
    worker = RuleWorker(max_num_seqs=1)
    worker.scheduler.adapters = AdapterSlots(1, worker.blocks.in_flight)
    for seq_id in (1, 2):
        worker.add(seq_id, adapter="a")
    worker.add(3)
    worker.scheduler.schedule(0.0)
    assert worker.scheduler.flush(0.0).adapter_orders == ["a"]
    worker.scheduler.adapter_loaded("a", NumberedAdapter(1), 0.0)
    worker.scheduler.cancel(3, 0.0)
    plan = worker.plan()
    assert (ids(plan), len(plan.placements)) == ([1], 1)
    assert ending(worker.scheduler.fail_step(plan, BROKEN, 0.0)) == {1: BROKEN, 2: BROKEN}


# Collaborators.


def test_an_adapter_that_cannot_be_loaded_fails_its_sequences() -> None:
    worker = RuleWorker()
    worker.scheduler.expect_adapter("a", 0.0)
    worker.scheduler.adapters = AdapterSlots(1, worker.blocks.in_flight)
    worker.scheduler.expect_adapter("a", 0.0)
    assert worker.scheduler.flush(0.0).adapter_orders == ["a"]
    worker.add(1, adapter="a")
    worker.plan()
    error = NotFound("no such adapter")
    worker.scheduler.adapter_failed("a", error, 0.0)
    assert ending(worker.scheduler.flush(0.0)) == {1: error}


def lives(worker: RuleWorker, *collaborators: CallRecorder) -> list[list[str]]:
    """Return the calls of each collaborator so far that concern the life of a sequence, and forget them."""
    found = []
    for one in collaborators:
        found.append([call[0] for call in one.named("join", "leave", "share", "keep", "failed")])
        one.calls.clear()
    return found


def test_collaborators_see_each_sequence_join_end_and_leave() -> None:
    states = CallRecorder(take_orders=(), side_chains=())
    partial, drafts = CallRecorder(side_chains=()), FixedDrafts()
    adapters: Any = CallRecorder(take_orders=[], take_evicted=0, place=lambda scheduled: ((), None))
    worker = RuleWorker(max_num_seqs=1, states=states, partial_blocks=partial, drafts=drafts, adapters=adapters)
    everybody = (states, drafts, adapters, partial)
    worker.add(1, 2)
    assert lives(worker, *everybody) == [["join"], ["join"], ["join"], ["share"]]
    worker.step(1)
    worker.step(9)
    assert lives(worker, *everybody) == [["keep", "leave"], ["leave"], ["leave"], ["keep"]]
    # Cancelled: nothing is kept.
    worker.add(2, 2)
    worker.step(1)
    lives(worker, *everybody)
    worker.scheduler.cancel(2, 0.0)
    assert lives(worker, *everybody) == [["leave"], ["leave"], ["leave"], []]
    # Preempted while it runs: only its state is kept.
    running, waiting = worker.add(3, 2), worker.add(4, 2)
    worker.step(1)
    lives(worker, *everybody)
    worker.preempt(running)
    assert lives(worker, *everybody) == [["keep", "leave"], ["leave"], ["leave"], []]
    worker.preempt(waiting)
    assert lives(worker, *everybody) == [["leave"], ["leave"], ["leave"], []]
    worker.scheduler.resumed(4, worker.ticket(44, 2), 0.0)
    assert lives(worker, *everybody) == [["join"], ["join"], ["join"], ["share"]]


@pytest.mark.parametrize("of_state", [True, False])
def test_answers_with_negative_ids_go_to_states_then_drafts(of_state: bool) -> None:
    chains = CallRecorder(side_chains=())
    drafts = FixedDrafts()
    drafts.draft_chains = chains
    worker = RuleWorker(states=CallRecorder(committed=of_state, side_chains=()), drafts=drafts)
    worker.scheduler.committed(-1, (5,), "", 0.0)
    assert chains.calls == ([] if of_state else [("committed", -1, (5,), "")])
    ticket = worker.ticket(5, 4)
    worker.scheduler.chain_opened(-1, ticket, 2.0)
    worker.scheduler.chain_opened(-2, None, 2.0)
    assert chains.named("opened") == [("opened", -1, ticket, 2.0), ("opened", -2, None, 2.0)]
    RuleWorker(states=CallRecorder(committed=False, side_chains=())).scheduler.committed(-1, (), "refused", 0.0)
    worker = RuleWorker(drafts=drafts)
    worker.scheduler.committed(-3, (), "refused", 0.0)
    assert chains.calls[-1] == ("committed", -3, (), "refused")


def test_only_steps_with_tokens_have_states_and_adapters() -> None:
    states = CallRecorder(begin="states", take_orders=["order"], side_chains=())
    adapters = CallRecorder(place=lambda scheduled: ("placements", "slots"), take_orders=["a"], take_evicted=2)
    worker = RuleWorker(states=states, adapters=adapters)
    plan = worker.plan()
    assert (plan.states, plan.placements, plan.adapters) == (None, (), None)
    assert not states.named("begin")
    assert not adapters.named("place")
    worker.add(1)
    plan = worker.plan()
    assert (plan.states, plan.placements, plan.adapters) == ("states", "placements", "slots")
    assert [call[0] for call in adapters.calls] == ["assign", "join", "assign", "place"]
    outcome = worker.scheduler.flush(0.0)
    assert (outcome.adapter_orders, outcome.evicted_adapters, outcome.commits) == (["a"], 2, ["order"])
    assert outcome.load.keys() >= {"adapters", "adapter_waits", "running_requests"}
    assert not RuleWorker().scheduler.flush(0.0).load


def test_hidden_states_go_to_the_draft_model_if_a_step_returned_them() -> None:
    drafts = FixedDrafts()
    drafts.draft_chains = CallRecorder(side_chains=())
    states = CallRecorder(take_orders=(), side_chains=())
    worker = RuleWorker(drafts=drafts, states=states)
    worker.add(1)
    worker.step(1)
    assert not drafts.draft_chains.named("store_states")
    hidden = np.zeros((1, 1))
    worker.step(1, states=hidden)
    ((_, scheduled, given),) = drafts.draft_chains.named("store_states")
    assert (scheduled[0].sequence.seq_id, given is hidden) == (1, True)
    assert len(states.named("end_step")) == 2
