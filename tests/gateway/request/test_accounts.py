"""Timings and token accounts of a request against plain sums over random attempts; accounts of further answers."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest
from hypothesis import given
from msgspec.structs import replace

from lab.testbed.admitted import admitted_request
from pillion.errors import Unavailable
from pillion.gateway.planning.cluster_snapshot import StatePages
from pillion.gateway.planning.planner import replan
from pillion.gateway.request import events as ev
from pillion.gateway.request.admitted_request import AdmittedRequest
from pillion.gateway.request.request_machine import ParallelSamples, RequestMachine, RequestState
from pillion.types import (
    AnswerSoFar,
    FinishReason,
    GenerateRequest,
    Resume,
    SamplingParams,
    StreamOrigin,
    TokenLogprob,
    Usage,
)
from pillion.v1.decode_pb2 import DecodeTimings
from tests.gateway.request.test_request import EOS, PARTS, REMOTE, ack, follower, hold, machine, planned, to_decoding
from tests.support.scenes import random_scenes

BLOCK = 4
GONE = Unavailable("gone")


class AttemptSums:
    """One request over several attempts, and its expected timings."""

    def __init__(self, rng: Random) -> None:
        self.rng, self.now = rng, 10.0
        self.machine: RequestMachine = machine(rng.randint(9, 30), max_tokens=50, attempts=9, arrived=10.0)
        self.admitted: float | None = None
        self.first_token: float | None = None
        self.cached: int | None = None
        self.reached = self.chunks = 0
        self.prefill_ms = 0.0
        # Draft tokens of earlier attempts, and of this one: all, accepted.
        self.drafted, self.drafting = [0, 0], [0, 0]
        self.machine.start()

    def pass_time(self) -> None:
        self.now += self.rng.choice([0.25, 0.5, 1.0])

    def happen(self, event: ev.Event) -> list[ev.Action]:
        return self.machine.handle(event, self.now)

    def run_attempt(self) -> None:
        rng, m, attempt = self.rng, self.machine, self.machine.attempt
        self.pass_time()
        remote = rng.random() < 0.3
        hits, far = rng.randint(0, 9), rng.randint(0, 9)
        avoid = frozenset({"prefill-0"} if attempt > 1 and rng.random() < 0.3 else ())
        policy = rng.choice(["disaggregated", "fraction:0.5"])
        parts = REMOTE if remote else PARTS
        plan_made = planned(attempt, len(m.tokens()), hits, policy, avoid, far, parts)
        plan = plan_made.plan
        (action,) = self.happen(plan_made)
        self.pass_time()
        if isinstance(action, ev.SubmitDecode):
            pinned = rng.randint(0, 9)
            self.happen(ev.TicketAdopted(attempt, pinned))
            cached, submit = min(pinned, plan.limit_blocks), None
            assert m.plan is not None
            assert (m.plan.split_tokens, m.plan.chunks) == (cached * BLOCK, ())
            assert ("no longer split" in m.plan.reason) is bool(replan(plan, pinned).chunks)
        else:
            pinned = cached = min(rng.randint(0, 9), plan.limit_blocks)
            actions = self.happen(ev.TicketGranted(attempt, hold(attempt), pinned))
            if isinstance(actions[0], ev.Fetch):
                fetched = rng.randint(0, 9)
                self.admitted = self.now if self.admitted is None else self.admitted
                self.pass_time()
                cached = min(max(pinned, fetched), plan.limit_blocks)
                actions = self.happen(ev.BlocksFetched(attempt, fetched))
            submit = actions
        self.admitted = self.now if self.admitted is None else self.admitted
        self.cached = cached * BLOCK if self.cached is None else self.cached
        if submit is not None:
            assert submit[0].plan.cached_tokens == cached * BLOCK
            if m.state is RequestState.PREFILLING:
                self.prefill(attempt, submit)
        if m.state is RequestState.DECODING:
            self.decode(attempt)

    def prefill(self, attempt: int, actions: list[ev.Action]) -> None:
        rng, plan, sent, before = self.rng, actions[0].plan, self.now, self.chunks
        # In a replay, answer tokens do not count as prompt, and the last one is never prefilled.
        limit = min(plan.split_tokens, (len(self.machine.prompt) - 1) // BLOCK * BLOCK)
        if not plan.remote:
            awaited = actions[1].awaited_blocks
            assert (awaited, type(awaited)) == (plan.split_tokens // BLOCK, int)
        end = plan.cached_tokens
        for count in plan.chunks[: rng.randint(0, len(plan.chunks))]:
            self.pass_time()
            end += count
            self.happen(ev.ChunkAcked(attempt, ack(0, end)))
            self.prefill_ms += (self.now - sent) * 1000
            sent = self.now
            self.reached = max(self.reached, min(end, limit))
            self.chunks += 1
        self.pass_time()
        if plan.remote or rng.random() < 0.5:
            ended = rng.choice([end, plan.split_tokens, plan.split_tokens + BLOCK])
            if not plan.remote:
                ended = max(ended, plan.split_tokens)
            self.happen(ev.PrefillEnded(attempt, ended))
            self.reached = max(self.reached, min(ended, limit))
        else:
            # The stream's first token implies that all chunks are done.
            self.sample(attempt)
            self.chunks = before + len(plan.chunks)
            self.prefill_ms += (self.now - sent) * 1000
            self.reached = max(self.reached, limit)

    def sample(self, attempt: int) -> None:
        drafting = self.rng.randint(0, 3), self.rng.randint(0, 3)
        told = self.rng.random() < 0.5
        timings = DecodeTimings(guessed_tokens=drafting[0], accepted_tokens=drafting[1]) if told else None
        self.happen(ev.TokensSampled(attempt, (5,), timings))
        self.first_token = self.now if self.first_token is None else self.first_token
        if told:
            self.drafting = list(drafting)

    def decode(self, attempt: int) -> None:
        for _ in range(self.rng.randint(0, 2)):
            self.pass_time()
            self.sample(attempt)

    def lose(self) -> None:
        if self.rng.random() < 0.7:
            self.pass_time()
        self.happen(ev.DecodeLost(self.machine.attempt, GONE, True))
        self.drafted = [before + now for before, now in zip(self.drafted, self.drafting, strict=True)]
        self.drafting = [0, 0]

    def check(self) -> None:
        m, prompt = self.machine, len(self.machine.prompt)
        found, cached = m.timings(self.now), self.cached or 0
        prefilled = max(0, self.reached - cached)
        assert (found.cached_tokens, found.prefilled_tokens) == (cached, prefilled)
        assert found.tail_tokens == prompt - cached - prefilled
        assert found.prefill_chunks == self.chunks
        assert found.prefill_ms == pytest.approx(self.prefill_ms)
        for ms, at in ((found.admission_ms, self.admitted), (found.time_to_first_token_ms, self.first_token)):
            assert ms == pytest.approx(((self.now if at is None else at) - 10.0) * 1000)
        assert found.total_ms == pytest.approx((self.now - 10.0) * 1000)
        assert found.replays == m.attempt - 1
        drafts = [before + now for before, now in zip(self.drafted, self.drafting, strict=True)]
        assert [found.guessed_tokens, found.accepted_tokens] == drafts
        has_prefill = m.plan is not None and m.plan.prefill is not None and self.chunks
        assert found.prefill_worker == ("prefill-0" if has_prefill else "")
        drafted = {"guessed_tokens": drafts[0], "accepted_tokens": drafts[1]} if drafts[0] else {}
        assert m.usage() == Usage(prompt, cached, len(m.emitted), **drafted)


@given(random_scenes())
def test_timings_are_sums_over_attempts(scenes: list[Random]) -> None:
    for rng in scenes:
        sums = AttemptSums(rng)
        for _ in range(rng.randint(1, 4)):
            sums.run_attempt()
            sums.check()
            if sums.machine.state is not RequestState.DECODING:
                break
            sums.lose()
            sums.check()


def test_a_queued_request_has_no_worker_timings() -> None:
    found = machine(arrived=10.0).timings(12.0)
    assert (found.decode_worker, found.prefill_worker, found.plan_reason) == ("", "", "")
    assert (found.admission_ms, found.total_ms, found.tail_tokens) == (2000.0, 2000.0, 21)


def resumed_request(
    prompt: int, max_tokens: int, answer: tuple[int, ...], reason: FinishReason | None, scored: int = 0
) -> AdmittedRequest:
    """Return a machine for a request that another gateway began, with prompt log probabilities."""
    resume = Resume(StreamOrigin(0, bytes(32), 8), (AnswerSoFar(answer, reason),), scored)
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=(EOS,), prompt_logprobs=0)
    asked = GenerateRequest(resume=resume)
    return admitted_request(tuple(range(prompt)), max_attempts=9, asked=asked, sampling=sampling)


@given(random_scenes())
def test_prompt_tokens_are_scored_once_over_all_attempts(scenes: list[Random]) -> None:
    """The first token has no score, ``scored_tokens`` are not requested, and a new attempt scores only the rest."""
    for rng in scenes:
        skipped = rng.randint(0, 9)
        m = RequestMachine(resumed_request(12, 9, (), None, skipped))
        (look_up,) = m.start()
        scored: list[TokenLogprob] = []
        losses = 0
        while True:
            wanted = len(m.prompt) - 1 - skipped - len(scored)
            assert isinstance(look_up, ev.LookUp)
            assert look_up.unscored_from == (skipped + len(scored) if wanted else None)
            submit = to_decoding(m, m.attempt)
            assert submit.scored_tokens == skipped + len(scored)
            count = rng.randint(0, 5)
            ahead = tuple(TokenLogprob(skipped + len(scored) + n + 1, -1.0) for n in range(count))
            actions = m.handle(ev.PromptScored(m.attempt, ahead), 1.0)
            assert actions == ([ev.EmitScores(ahead[:wanted])] if ahead[:wanted] else [])
            scored += ahead[:wanted]
            if not wanted:
                break
            # Scores are progress, so such attempts are not limited.
            look_up = m.handle(ev.DecodeLost(m.attempt, GONE, True), 1.0)[-1]
            if not isinstance(look_up, ev.LookUp):
                break
            losses = 0 if count else losses
            assert look_up.after_ms == min(500, 20 * 4**losses)
            losses += 1
        assert [one.token_id for one in scored] == list(range(skipped + 1, skipped + 1 + len(scored)))


def several(count: int = 2, max_tokens: int = 5) -> ParallelSamples:
    return ParallelSamples([machine(max_tokens=max_tokens), *(follower(max_tokens) for _ in range(count - 1))])


def test_further_answers_add_no_prompt_tokens() -> None:
    answers = several()
    leader, other = answers.machines
    answers.start()
    answers.handle(0, planned(1, 21), 1.0)
    answers.handle(0, ev.TicketGranted(1, hold(), 2), 1.0)
    answers.handle(0, ev.TokensSampled(1, (1,)), 2.0)
    answers.handle(1, ev.TokensSampled(1, (2,)), 3.0)
    answers.handle(1, ev.DecodeLost(1, GONE, True), 3.0)
    answers.handle(1, planned(2, 22), 4.0)
    answers.handle(1, ev.TicketGranted(2, hold(2), 5), 4.0)
    assert (leader.usage(), other.usage()) == (Usage(21, 8, 1), Usage(21, 20, 1))
    assert answers.usage() == Usage(21, 8, 2)
    found = answers.timings(9.0)
    assert (found.cached_tokens, found.admission_ms, found.replays) == (8, 1000.0, 0)


def test_a_parallel_sample_is_charged_memory_from_its_first_token() -> None:
    parts = planned(1, 21, 2, components=[replace(one, block_bytes=40) for one in PARTS]).plan
    each = 40 / BLOCK
    for starts in ([ev.TokensSampled(1, (5,) * 4)], [ev.LeaderStarted(), ev.TokensSampled(1, (5,) * 4)]):
        m = follower()
        m.handle(ev.LeaderSubmitted(1, parts), 1.0)
        for event in starts:
            m.handle(event, 3.0)
        m.handle(ev.DecodeFinished(1, FinishReason.STOP, None), 7.0)
        assert m.held.byte_s == pytest.approx(4.0 * each * 2)
        assert m.held.token_byte_s == pytest.approx(4.0 * each)
        assert m.held.computed_tokens == 0


def test_answers_without_tokens_end_with_the_prompts_scores() -> None:
    m = follower(max_tokens=0)
    m.handle(ev.LeaderSubmitted(1, planned(1, 21).plan), 1.0)
    assert m.handle(ev.LeaderStarted(), 1.0) == [ev.CancelDecode(1), ev.Finish(FinishReason.LENGTH)]


def test_uncomputed_tokens_cost_nothing() -> None:
    answers = several()
    answers.handle_all(ev.RequestCancelled(), 1.0)
    assert set(answers.receipt(Usage(21, 0, 0)).values()) == {0}


def test_costs_are_never_negative_after_rounding() -> None:
    answers = several(1)
    held = answers.machines[0].held
    held.byte_s, held.token_byte_s = 1.4, 0.7
    found = answers.receipt(Usage(2, 2, 0, fetched_tokens=1))
    assert (found["kv_pool_byte_seconds"], found["kv_fetched_byte_seconds"]) == (1, 1)
    assert found["kv_computed_byte_seconds"] == 0


def test_no_token_follows_the_last_one() -> None:
    m = machine(max_tokens=2)
    to_decoding(m)
    assert m.handle(ev.TokensSampled(1, (1, 2)), 1.0) == [ev.Emit((1, 2))]
    assert m.handle(ev.TokensSampled(1, (3,)), 1.0) == []
    assert m.emitted == [1, 2]


def test_an_end_without_timings_keeps_the_earlier_ones() -> None:
    m = machine()
    to_decoding(m)
    m.handle(ev.TokensSampled(1, (1,), DecodeTimings(tail_steps=3, guessed_tokens=4)), 1.0)
    m.handle(ev.DecodeFinished(1, FinishReason.STOP, None), 2.0)
    assert (m.timings(3.0).tail_steps, m.timings(3.0).guessed_tokens) == (3, 4)


@pytest.mark.parametrize(
    ("answer", "reason", "actions"),
    [
        ((), None, ["LookUp"]),
        ((1, 2), None, ["LookUp"]),
        ((1, EOS), None, ["StopWork", "Finish"]),
        ((1,) * 5, None, ["StopWork", "Finish"]),
        ((1, 2), FinishReason.STOP, []),
    ],
)
def test_a_resumed_answer_continues_after_its_tokens(
    answer: tuple[int, ...], reason: FinishReason | None, actions: list[str]
) -> None:
    m = RequestMachine(resumed_request(21, 5, answer, reason))
    assert [type(action).__name__ for action in m.start()] == actions
    assert m.state is (RequestState.PLANNING if actions == ["LookUp"] else RequestState.DONE)
    assert m.tokens() == (*range(21), *answer)
    if actions == ["LookUp"]:
        to_decoding(m)
    assert m.usage() == Usage(21, 8, len(answer)), "what the first gateway found is what counts"


def test_cancelling_a_parallel_sample_without_a_stream_only_fails_it() -> None:
    (fail,) = follower().handle(ev.RequestCancelled(), 1.0)
    assert isinstance(fail, ev.Fail)


@pytest.mark.parametrize("tokens", [0, 1])
def test_an_end_shows_that_the_whole_prompt_was_computed(tokens: int) -> None:
    m = machine()
    m.handle(planned(1, 21, 2), 1.0)
    m.handle(ev.TicketGranted(1, hold(), 2), 1.0)
    m.handle(ev.TokensSampled(1, (5,) * tokens), 2.0)
    m.handle(ev.DecodeFinished(1, FinishReason.LENGTH, None), 3.0)
    assert m.held.computed_tokens == 21 - 8


def test_an_attempt_that_was_lost_at_once_has_computed_nothing() -> None:
    m = machine()
    m.handle(planned(1, 21, 2), 1.0)
    m.handle(ev.TicketGranted(1, hold(), 2), 1.0)
    m.handle(ev.PrefillLost(1, GONE, True), 2.0)
    assert m.held.computed_tokens == 0


def test_states_count_like_tokens() -> None:
    parts = [replace(one, block_bytes=40) for one in PARTS]
    made = planned(1, 21, 9, components=parts)
    held = []
    for pages in (0, 3):
        m = machine()
        m.handle(ev.PlanMade(1, dataclasses.replace(made.plan, states=StatePages(1, pages))), 1.0)
        m.handle(ev.TicketAdopted(1, 9), 1.0)
        m.handle(ev.DecodeFinished(1, FinishReason.STOP, None), 3.0)
        held.append(m.held.byte_s)
    assert held[1] - held[0] == pytest.approx(2.0 * 3 * 40)


@pytest.mark.parametrize(
    ("index", "wanted", "resumed", "scored"),
    [(0, True, None, 0), (0, True, 5, 5), (0, True, 99, 20), (0, False, None, 20), (1, True, None, 20)],
)
def test_only_the_first_answer_scores_what_is_left_of_the_prompt(
    index: int, wanted: bool, resumed: int | None, scored: int
) -> None:
    sampling = SamplingParams(max_tokens=5, prompt_logprobs=0 if wanted else None)
    origin = StreamOrigin(0, bytes(32), 8)
    asked = GenerateRequest(resume=None if resumed is None else Resume(origin, (AnswerSoFar((), None),), resumed))
    admitted = admitted_request(tuple(range(21)), asked=asked, sampling=sampling)
    assert RequestMachine(admitted, index).scored_tokens == scored
