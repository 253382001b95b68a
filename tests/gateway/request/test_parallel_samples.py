"""Parallel samples as pure decisions: no leaks, each token exactly once, one failure reported."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.testbed.admitted import admitted_request
from lab.testbed.toy_tokenizer import byte_tokenizer
from pillion.errors import Cancelled, NotFound, Overloaded, Unavailable
from pillion.gateway.request import events as ev
from pillion.gateway.request.request_machine import ParallelSamples, RequestMachine, RequestState
from pillion.gateway.request.request_runner import Outbox, rank_answers
from pillion.gateway.request.validation import answer_seed
from pillion.gateway.tokens.answer_text import AnswerDelta, AnswerText, new_detokenizer, stop_strings
from pillion.types import FinishReason, GenerateRequest, SamplingParams, Timings, TokenLogprob, Usage
from pillion.v1.decode_pb2 import DecodeTimings
from tests.gateway.request.test_request import EOS, GONE, ack, hold, planned
from tests.support.examples import examples

CODEC = byte_tokenizer()
PROMPT = tuple(range(100, 121))


def choices(
    count: int = 3, max_tokens: int = 5, attempts: int = 4, prompt: tuple[int, ...] = PROMPT
) -> ParallelSamples:
    admitted = admitted_request(prompt, max_tokens, (EOS,), max_attempts=attempts)
    return ParallelSamples([RequestMachine(admitted, n) for n in range(count)])


def outbox(generated: int, answers: int, logprobs: int | None = None) -> Outbox:
    asked = GenerateRequest(sampling=SamplingParams(logprobs=logprobs))
    return Outbox(admitted_request(asked=asked, sampling=SamplingParams(n=answers)), generated)


def actions_of(todos) -> list[tuple[int, str]]:
    return [(index, type(action).__name__) for index, action in todos]


def submitted(c: ParallelSamples, attempt: int = 1) -> ev.SubmitDecode:
    c.handle(0, planned(attempt, len(PROMPT)), 1.0)
    ((index, submit),) = c.handle(0, ev.TicketGranted(attempt, hold(attempt), 99), 1.0)
    assert index == 0
    assert isinstance(submit, ev.SubmitDecode)
    return submit


def test_one_submit_begins_all() -> None:
    c = choices()
    assert actions_of(c.start()) == [(0, "LookUp")]
    assert submitted(c).parallel_samples == (1, 2)
    assert c.handle(2, ev.TokensSampled(1, (5,)), 2.0) == [(2, ev.Emit((5,)))]
    assert c.handle(0, ev.TokensSampled(1, (6,)), 2.0) == [(0, ev.Emit((6,)))]
    assert {machine.state for machine in c.machines} == {RequestState.DECODING}
    for index in (1, 2, 0):
        worker = DecodeTimings(guessed_tokens=4, accepted_tokens=index)
        finished = ev.DecodeFinished(1, FinishReason.STOP, worker)
        assert actions_of(c.handle(index, finished, 3.0 + index))[-1] == (index, "Finish")
    assert c.usage() == Usage(21, 20, 2, guessed_tokens=12, accepted_tokens=3)
    assert c.timings(99.0).total_ms == 5000
    assert (c.timings(99.0).guessed_tokens, c.timings(99.0).accepted_tokens) == (12, 3)


def test_before_the_first_token_the_first_answer_retries_for_all() -> None:
    c = choices()
    c.start()
    submitted(c)
    c.handle(2, ev.TokensSampled(1, (5,)), 2.0)
    assert actions_of(c.handle(0, ev.DecodeLost(1, GONE, True), 2.0)) == [
        (0, "ReleaseTicket"),
        (0, "LookUp"),
        (1, "CancelDecode"),
    ]
    assert c.handle(1, ev.DecodeLost(1, GONE, True), 2.0) == []
    assert actions_of(c.handle(2, ev.DecodeLost(1, GONE, True), 2.0)) == [(2, "LookUp")]
    assert submitted(c, 2).parallel_samples == (1,)
    assert c.handle(1, ev.TokensSampled(2, (7,)), 3.0) == [(1, ev.Emit((7,)))]


def test_after_the_first_token_each_sample_retries_by_itself() -> None:
    c = choices()
    c.start()
    submitted(c)
    c.handle(0, ev.TokensSampled(1, (6,)), 2.0)
    for index, emitted in enumerate([(6,), (), ()]):
        *_, (at, look_up) = c.handle(index, ev.DecodeLost(1, GONE, True), 2.0)
        assert isinstance(look_up, ev.LookUp)
        assert (at, c.machines[index].tokens(), look_up.attempt) == (index, PROMPT + emitted, 2)


def test_one_failure_ends_all_and_is_reported_once() -> None:
    c = choices()
    c.start()
    submitted(c)
    for index in range(3):
        c.handle(index, ev.TokensSampled(1, (6,)), 2.0)
    error = Overloaded("full")
    assert c.handle(1, ev.DecodeLost(1, error, False), 2.0) == [
        (0, ev.CancelDecode(1)), (0, ev.ReleaseTicket(hold(1))), (2, ev.CancelDecode(1)), (1, ev.Fail(error)),
    ]  # fmt: skip
    assert c.handle_all(ev.RequestCancelled(), 3.0) == []


def test_with_fewer_pinned_blocks_a_new_submit_restarts_all() -> None:
    c = choices()
    c.start()
    assert actions_of(c.handle(0, planned(1, len(PROMPT), 5), 1.0)) == [(0, "SubmitDecode")]
    lost = ev.DecodeLost(1, NotFound("2 of 5 blocks are here"), True)
    assert actions_of(c.handle(0, lost, 1.0)) == [(0, "OpenTicket"), (1, "CancelDecode"), (2, "CancelDecode")]
    ((_, submit),) = c.handle(0, ev.TicketGranted(1, hold(), 99), 1.0)
    assert (submit.hold, submit.parallel_samples) == (hold(), (1, 2))
    assert c.handle(1, ev.TokensSampled(1, (5,)), 2.0) == [(1, ev.Emit((5,)))]


def test_events_of_the_request_apply_to_all_samples() -> None:
    c = choices()
    c.start()
    submitted(c)
    c.handle(1, ev.TokensSampled(1, (6,)), 2.0)
    *others, last = c.handle_all(ev.RequestCancelled(), 3.0)
    assert actions_of(others) == [(0, "CancelDecode"), (0, "ReleaseTicket"), (1, "CancelDecode"), (2, "CancelDecode")]
    assert isinstance(last[1], ev.Fail)
    assert isinstance(last[1].error, Cancelled)


def test_seeds_wrap_around() -> None:
    top = 2**63 - 1
    assert [answer_seed(5, 0), answer_seed(5, 2), answer_seed(-1, 1)] == [5, 7, 0]
    assert [answer_seed(top, 0), answer_seed(top, 1), answer_seed(-(2**63), 1)] == [top, -(2**63), -(2**63) + 1]


def token_at(index: int, position: int) -> int:
    """Return the token of a sample, whose own seed and position determine it on every worker (I6)."""
    return 1000 * (index + 1) + position


@dataclass
class AnswersWorld:
    """Parts that answer in any order, late or never, with a log of the commands that they got."""

    choices: ParallelSamples
    opened: set[ev.TicketHold] = field(default_factory=set)
    released: list[ev.TicketHold] = field(default_factory=list)
    streams: dict[int, int] = field(default_factory=dict)
    sent: dict[tuple[int, int], int] = field(default_factory=dict)
    emitted: dict[int, list[int]] = field(default_factory=dict)
    finishes: list[int] = field(default_factory=list)
    fails: list[ev.Fail] = field(default_factory=list)

    def perform(self, todos) -> None:
        for index, action in todos:
            match action:
                case ev.ReleaseTicket():
                    self.released.append(action.hold)
                case ev.Emit():
                    assert not self.fails
                    self.emitted.setdefault(index, []).extend(action.token_ids)
                case ev.Finish():
                    self.finishes.append(index)
                case ev.Fail():
                    self.fails.append(action)
                case ev.SubmitDecode():
                    assert action.hold in {None} | self.opened - set(self.released)
                    tokens = self.choices.machines[index].tokens()
                    assert not action.parallel_samples or (index == 0 and tokens == self.choices.machines[0].prompt)
                    for begun in (index, *action.parallel_samples):
                        assert begun not in self.streams, "an answer has one stream"
                        self.streams[begun] = action.attempt
                        self.sent[begun, action.attempt] = len(tokens)
                case ev.CancelDecode():
                    assert self.streams.pop(index, action.attempt) == action.attempt
                case ev.LookUp() if index:
                    first = self.choices.machines[0]
                    own = self.emitted.get(index) or first.emitted or first.state is RequestState.DONE
                    assert own, "a follower began work of its own"

    def tell(self, draw) -> None:
        index = draw(st.integers(0, len(self.choices.machines) - 1))
        machine = self.choices.machines[index]
        attempt = draw(st.sampled_from([machine.attempt] * 4 + list(range(1, machine.attempt + 1))))
        error, name = draw(st.sampled_from([GONE, NotFound("ticket")])), draw(st.sampled_from(EVENTS))
        event: ev.Event
        match name:
            case "planned":
                event = planned(attempt, len(machine.tokens()), draw(st.integers(0, 9)))
            case "granted":
                made = hold(len(self.opened) + 1)
                self.opened.add(made)
                event = ev.TicketGranted(attempt, made, draw(st.integers(0, 9)))
            case "acked":
                event = ev.ChunkAcked(attempt, ack(0, draw(st.integers(0, 40))))
            case "tokens":
                at, count = self.sent.get((index, attempt), 0), draw(st.integers(1, 3))
                self.sent[index, attempt] = at + count
                event = ev.TokensSampled(attempt, tuple(token_at(index, p) for p in range(at, at + count)))
            case "prefillended" | "fetched":
                event = {"prefillended": ev.PrefillEnded, "fetched": ev.BlocksFetched}[name](
                    attempt, draw(st.integers(0, 40))
                )
            case "adopted" | "silent":
                event = {"adopted": ev.TicketAdopted, "silent": ev.AttemptSilent}[name](attempt)
            case "stop":
                if not machine.emitted:
                    return
                event = ev.StopStringFound(len(machine.emitted))
            case "cancelled" | "deadline":
                both = {"cancelled": ev.RequestCancelled(), "deadline": ev.DeadlinePassed()}
                self.perform(self.choices.handle_all(both[name], 1.0))
                return
            case "finished" | "decodelost":
                if self.streams.get(index) == attempt:
                    del self.streams[index]
                event = ev.DecodeLost(attempt, error, draw(st.integers(0, 9)) > 0)
                if name == "finished":
                    event = ev.DecodeFinished(attempt, FinishReason.LENGTH, None)
            case _:
                lost = {
                    "planfailed": partial(ev.PlanFailed, patience_s=60.0),
                    "ticketlost": ev.TicketLost,
                    "prefilllost": ev.PrefillLost,
                }
                event = lost[name](attempt, error, name != "planfailed" or draw(st.booleans()))
        self.perform(self.choices.handle(index, event, 1.0))


EVENTS = ["planned", "granted", "granted", "fetched", "prefillended",
    "tokens", "tokens", "tokens", "decodelost"] * 4 + [
    "acked", "adopted", "ticketlost", "prefilllost", "finished", "stop", "stop", "silent", "planfailed",
    "cancelled", "deadline",
]  # fmt: skip


@given(st.data())
@settings(max_examples=examples(120))
def test_invariants_hold_in_any_order_of_events(data) -> None:
    count, length = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 20))
    c = choices(count, data.draw(st.integers(1, 9)), attempts=6, prompt=tuple(range(length)))
    world = AnswersWorld(c)
    world.perform(c.start())
    # Most histories begin well, to reach cases with several streams.
    if data.draw(st.booleans()):
        world.opened.add(hold(1))
        world.perform(c.handle(0, planned(1, length, data.draw(st.sampled_from([0, 99]))), 0.0))
        world.perform(c.handle(0, ev.TicketGranted(1, hold(1), 99), 0.0))
    for _ in range(data.draw(st.integers(0, 80))):
        world.tell(data.draw)
        for index, ids in world.emitted.items():
            assert ids == [token_at(index, length + n) for n in range(len(ids))]
    world.perform(c.handle_all(ev.RequestCancelled(), 1.0))
    assert all(machine.state is RequestState.DONE for machine in c.machines)
    assert len(world.finishes) == len(set(world.finishes))
    assert len(world.fails) == (len(world.finishes) < count), "one failure, or every answer's end"
    assert not world.streams, "a stream that nobody wants runs on"
    assert sorted(world.released, key=lambda one: one.ticket_id) == sorted(world.opened, key=lambda one: one.ticket_id)


def by_hand(text: str, stops: list[str], min_tokens: int) -> tuple[str, int]:
    """Return text and number of tokens (one per letter) of an answer, by a search from the front."""
    for end in range(min_tokens + 1, len(text) + 1):
        matches = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if matches:
            return text[: end - max(matches)], end
    return text, len(text)


@given(
    st.text("ab", max_size=10),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.integers(0, 8),
    st.integers(1, 5),
)
@settings(max_examples=examples(500))
def test_stop_strings_text_and_log_probabilities_are_cut_together(
    text: str, stops: list[str], min_tokens: int, step: int
) -> None:
    expected, tokens = by_hand(text, stops, min_tokens)
    strings, ids = stop_strings(tuple(stops)), CODEC.encode(text).ids
    answer = AnswerText(new_detokenizer(CODEC), strings, frozenset(), min_tokens)
    given_, taken = "", []
    for at in range(0, len(ids), step):
        batch = ids[at : at + step]
        piece = answer.push(batch, [TokenLogprob(one, 0.0) for one in batch])
        assert [one.token_id for one in piece.logprobs] == list(piece.token_ids)
        given_ += piece.text
        taken += piece.token_ids
        assert expected.startswith(given_), "nothing of a stop string is let out, even for a moment"
        if answer.stopped:
            break
    given_ += answer.flush().text
    assert (given_, taken, answer.completion_tokens) == (expected, ids[:tokens], tokens)
    assert answer.stopped == (expected != text)


def test_a_stop_string_may_begin_in_the_first_tokens_and_end_after_them() -> None:
    answer = AnswerText(new_detokenizer(CODEC), stop_strings(("END", "N")), frozenset(), min_tokens=4)
    assert answer.push(CODEC.encode("N EN").ids).text == "N "
    assert (answer.push(CODEC.encode("Dx").ids).text, answer.stopped) == ("", True)
    assert answer.completion_tokens == 5


def probs(*values: float) -> list[TokenLogprob]:
    return [TokenLogprob(n, value) for n, value in enumerate(values)]


def test_answers_are_ranked_by_mean_log_probability() -> None:
    answers = [
        probs(-1.0, -1.0, -1.0),
        probs(-2.0),
        probs(-0.5, -1.0, -0.5, -0.5),
        probs(),
        probs(-1.0),
    ]
    assert rank_answers(answers, 5) == [2, 0, 4, 1, 3]
    assert rank_answers(answers, 2) == [2, 0]


TIMES, USED = Timings(), Usage(3, 0, 9)


def test_unread_deltas_are_merged_per_answer() -> None:
    box = outbox(2, 2, logprobs=0)
    box.add(1, AnswerDelta("a", (1,), tuple(probs(-1.0))))
    box.add(0, AnswerDelta("b", (2,), tuple(probs(-1.0))))
    box.add(1, AnswerDelta("c", (3, 4), tuple(probs(-2.0, -3.0))))
    one, two = box.take(), box.take()
    assert (one.index, one.text, one.token_ids) == (1, "ac", (1, 3, 4))
    assert [logprob.logprob for logprob in one.logprobs] == [-1.0, -2.0, -3.0]
    assert (two.index, two.text, two.token_ids, two.finish_reason) == (0, "b", (2,), None)
    assert not box.pending
    box.finish(1, AnswerDelta("d", ()), FinishReason.STOP)
    box.add(0, AnswerDelta("e", (5,)))
    box.finish(0, AnswerDelta("", ()), FinishReason.LENGTH)
    box.end(USED, TIMES)
    one, two = box.take(), box.take()
    assert (one.index, one.text, one.finish_reason, one.usage, one.timings) == (1, "d", FinishReason.STOP, None, None)
    assert (two.index, two.finish_reason, two.usage, two.timings) == (0, FinishReason.LENGTH, USED, TIMES)
    assert box.over


def test_best_of_emits_nothing_before_the_end() -> None:
    box = outbox(3, 2)
    for index, value in enumerate((-3.0, -1.0, -2.0)):
        box.add(index, AnswerDelta(f"text {index}", (index,), tuple(probs(value))))
        box.finish(index, AnswerDelta("!", ()), FinishReason.STOP)
        assert not box.pending
    box.end(USED, TIMES)
    deltas = [box.take(), box.take()]
    assert [(d.index, d.text, d.logprobs, d.usage) for d in deltas] == [
        (0, "text 1!", (), None),
        (1, "text 2!", (), USED),
    ]
    assert box.over


@pytest.mark.parametrize("given_", [1, 2])
def test_a_failure_is_raised_after_pending_deltas(given_: int) -> None:
    box = outbox(2, given_)
    box.add(0, AnswerDelta("a", (1,)))
    box.fail(Unavailable("gone"))
    if given_ == 2:
        assert box.take().text == "a"
    assert box.pending
    with pytest.raises(Unavailable):
        box.take()
    assert (box.over, box.pending) == (True, False)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.booleans()), max_size=40))
def test_every_token_is_delivered_at_any_reading_pace(steps: list[tuple[int, int, bool]]) -> None:
    box, counter = outbox(3, 3, logprobs=0), itertools.count()
    put: dict[int, list[int]] = {0: [], 1: [], 2: []}
    got: dict[int, list[int]] = {0: [], 1: [], 2: []}

    def take() -> None:
        delta = box.take()
        assert [logprob.token_id for logprob in delta.logprobs] == list(delta.token_ids)
        got[delta.index].extend(delta.token_ids)

    for index, count, reads in steps:
        ids = tuple(next(counter) for _ in range(count))
        box.add(index, AnswerDelta("", ids, tuple(TokenLogprob(one, 0.0) for one in ids)))
        put[index].extend(ids)
        if reads and box.pending:
            take()
    for index in put:
        box.finish(index, AnswerDelta("", ()), FinishReason.STOP)
    box.end(USED, TIMES)
    while not box.over:
        take()
    assert got == put
