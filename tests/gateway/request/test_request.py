"""The request state machine, event by event: behaviour of each state, and cleanup at every end."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from lab.testbed.admitted import admitted_request
from pillion.errors import Internal, InvalidRequest, NotFound, Overloaded, PillionError, Unavailable
from pillion.gateway.planning.cluster_snapshot import ClusterSnapshot, parse_policy
from pillion.gateway.planning.planner import make_plan
from pillion.gateway.request import events as ev
from pillion.gateway.request import request_machine as module
from pillion.gateway.request.request_machine import LAST_ACK_WAIT_MS, RequestMachine, RequestState
from pillion.types import FinishReason, TokenLogprob, Usage
from pillion.v1.decode_pb2 import DecodeTimings
from pillion.v1.prefill_pb2 import ChunkAck
from pillion.wire.registry import ComponentRecord

PARTS = tuple(
    ComponentRecord(component_id=f"{role}-0", role=role, address="x", node_id="kv-0")
    for role in ("kvnode", "prefill", "decode")
)
REMOTE = tuple(replace(one, node_id="kv-1") if one.role == "prefill" else one for one in PARTS)
FAR = ComponentRecord(component_id="kv-1", role="kvnode", address="x", node_id="kv-1")
EOS = 7
GONE = Unavailable("gone")


def what(look_up: ev.Action) -> tuple[int, frozenset[str], int, int | None]:
    """Return the arguments of a look-up."""
    assert isinstance(look_up, ev.LookUp)
    return look_up.attempt, look_up.avoid, look_up.after_ms, look_up.unscored_from


def planned(
    attempt: int,
    tokens: int,
    hits: int = 0,
    policy: str = "disaggregated",
    avoid=frozenset(),
    far: int = 0,
    components=PARTS,
) -> ev.PlanMade:
    """Return a plan on kv-0, with optional hits on kv-1."""
    snapshot = ClusterSnapshot(model="toy", prompt_tokens=tokens, hits={"kv-0": hits, "kv-1": far},
                      components=(*components, FAR),
                      policy=parse_policy(policy), block_size=4, chunk_tokens=8, avoid=avoid)  # fmt: skip
    return ev.PlanMade(attempt, make_plan(snapshot))


PATIENCE_S = 40.0


def machine(prompt: int = 21, max_tokens: int = 5, attempts: int = 4, arrived: float = 0.0) -> RequestMachine:
    return RequestMachine(
        admitted_request(tuple(range(100, 100 + prompt)), max_tokens, (EOS,), max_attempts=attempts, arrived=arrived)
    )


def ack(n: int, end: int) -> ChunkAck:
    return ChunkAck(chunk_index=n, end_tokens=end, queue_ms=0, compute_ms=1)


def hold(number: int = 1) -> ev.TicketHold:
    return ev.TicketHold("kv-0", 5, number)


def kinds(actions) -> list[str]:
    return [type(action).__name__ for action in actions]


def to_decoding(m: RequestMachine, attempt: int = 1, now: float = 1.0) -> ev.SubmitDecode:
    """Return a machine after plan and ticket, with everything cached."""
    m.handle(planned(attempt, len(m.tokens())), now)
    (submit,) = m.handle(ev.TicketGranted(attempt, hold(attempt), 99), now)
    assert isinstance(submit, ev.SubmitDecode)
    return submit


def test_a_request_passes_through_all_its_states() -> None:
    m = machine(arrived=10.0)
    (look_up,) = m.start()
    assert what(look_up) == (1, frozenset(), 0, None)
    (opened,) = m.handle(planned(1, 21), 10.1)
    assert isinstance(opened, ev.OpenTicket)
    assert opened.plan.total_blocks == 6
    prefill_range, submit = m.handle(ev.TicketGranted(1, hold(), 1), 10.2)
    assert isinstance(prefill_range, ev.RunPrefill)
    assert isinstance(submit, ev.SubmitDecode)
    assert (m.tokens(), submit.awaited_blocks) == (m.prompt, 5)
    assert (prefill_range.plan.cached_tokens, prefill_range.plan.split_tokens, prefill_range.plan.chunks) == (
        4,
        20,
        (8, 8),
    )
    assert m.handle(ev.ChunkAcked(1, ack(0, 12)), 10.4) == []
    assert m.handle(ev.ChunkAcked(1, ack(1, 20)), 10.5) == []
    assert m.handle(ev.PrefillEnded(1, 20), 10.5) == []
    assert m.handle(ev.TokensSampled(1, (1, 2)), 10.7) == [ev.Emit((1, 2))]
    assert m.handle(ev.TokensSampled(1, (3,)), 10.8) == [ev.Emit((3,))]
    done = DecodeTimings(tail_tokens=1, tail_steps=1, queue_ms=3.0, preemptions=2, guessed_tokens=9, accepted_tokens=5)
    assert m.handle(ev.DecodeFinished(1, FinishReason.STOP, done), 11.0) == [
        ev.ReleaseTicket(hold()), ev.Finish(FinishReason.STOP),
    ]  # fmt: skip
    timings, usage = m.timings(99.0), m.usage()
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (21, 4, 3)
    assert (timings.cached_tokens, timings.prefilled_tokens, timings.tail_tokens) == (4, 16, 1)
    assert (timings.prefill_chunks, timings.tail_steps, timings.preemptions) == (2, 1, 2)
    assert (timings.guessed_tokens, timings.accepted_tokens) == (9, 5)
    assert (usage.guessed_tokens, usage.accepted_tokens) == (9, 5)
    times = (timings.admission_ms, timings.prefill_ms, timings.decode_queue_ms, timings.time_to_first_token_ms)
    assert (*times, timings.total_ms) == pytest.approx((200, 300, 3, 700, 1000))
    assert (timings.prefill_worker, timings.decode_worker, timings.replays) == ("prefill-0", "decode-0", 0)


def test_the_ticket_is_transferred_once() -> None:
    m = machine()
    to_decoding(m)
    assert m.handle(ev.TicketAdopted(1), 2.0) == [ev.ReleaseTicket(hold())]
    assert m.handle(ev.TicketAdopted(1), 2.0) == []
    assert m.handle(ev.DecodeFinished(1, FinishReason.STOP, None), 3.0) == [ev.Finish(FinishReason.STOP)]


def test_everything_cached_needs_no_prefill() -> None:
    m = machine()
    submit = to_decoding(m)
    assert (submit.plan.split_tokens, m.timings(2.0).tail_tokens, m.timings(2.0).prefill_worker) == (20, 1, "")


def opening(hits: int = 5) -> RequestMachine:
    """The index reports all whole blocks, so the decode worker opens the ticket."""
    m = machine(arrived=1.0)
    (submit,) = m.handle(planned(1, 21, hits), 1.0)
    assert isinstance(submit, ev.SubmitDecode)
    assert (submit.hold, submit.awaited_blocks, m.state) == (None, 0, RequestState.OPENING)
    return m


def test_without_split_or_fetch_the_decode_worker_opens_the_ticket() -> None:
    m = opening()
    assert m.handle(ev.StillQueued(1, 3), 1.5) == []
    assert m.handle(ev.TicketAdopted(1, 5), 2.0) == []
    assert m.handle(ev.TokensSampled(1, (1,)), 2.5) == [ev.Emit((1,))]
    assert m.handle(ev.DecodeFinished(1, FinishReason.STOP, None), 3.0) == [ev.Finish(FinishReason.STOP)]
    assert (m.usage().cached_tokens, m.timings(3.0).admission_ms, m.timings(3.0).tail_tokens) == (20, 1000.0, 1)
    for split in (planned(1, 21, 4), planned(1, 21, 4, "colocated", far=5)):
        assert kinds(machine().handle(split, 1.0)) == ["OpenTicket"]
    assert kinds(machine().handle(planned(1, 21, 4, "colocated"), 1.0)) == ["SubmitDecode"]


def test_with_fewer_pinned_blocks_the_gateway_opens_the_ticket() -> None:
    m = opening()
    lost = ev.DecodeLost(1, NotFound("2 of 5 blocks are here"), True)
    # Its turn in the node's memory queue has passed.
    assert m.handle(lost, 2.0) == [ev.OpenTicket(1, m.plan, resume=True)]
    assert m.handle(ev.TicketAdopted(1, 5), 2.0) == []
    assert kinds(m.handle(ev.TicketGranted(1, hold(), 2), 2.5)) == ["Fetch"]
    assert kinds(m.handle(ev.BlocksFetched(1, 2), 2.5)) == ["RunPrefill", "SubmitDecode"]
    assert (m.attempt, m.usage().cached_tokens) == (1, 8)
    # Too late if the worker has kept the ticket.
    m = opening()
    assert m.handle(ev.TicketAdopted(1, 2), 2.0) == []
    assert m.timings(2.0).plan_reason.endswith("no longer split: the decode worker already has the ticket")
    assert (m.state, m.timings(2.0).tail_tokens, m.timings(2.0).prefill_chunks) == (RequestState.DECODING, 13, 0)


def test_a_ticket_refused_to_the_decode_worker_fails_or_is_replanned() -> None:
    m, full = opening(), Overloaded("no KV memory came free", 1000)
    assert m.handle(ev.DecodeLost(1, full, False), 2.0) == [ev.Fail(full)]
    m = opening()
    (look_up,) = m.handle(ev.DecodeLost(1, GONE, True), 2.0)
    assert (look_up.attempt, look_up.avoid) == (2, frozenset({"decode-0"}))
    assert kinds(opening().handle(ev.AttemptSilent(1), 400.0)) == ["CancelDecode", "LookUp"]


def test_draft_tokens_of_all_attempts_are_counted() -> None:
    m = machine()
    for attempt in (1, 2):
        to_decoding(m, attempt)
        for drafted in (3, 7):
            told = DecodeTimings(guessed_tokens=drafted, accepted_tokens=attempt)
            m.handle(ev.TokensSampled(attempt, (1,), told), 2.0)
        if attempt == 1:
            m.handle(ev.DecodeLost(1, GONE, True), 3.0)
            assert m.usage().guessed_tokens == 7
    assert (m.usage().guessed_tokens, m.usage().accepted_tokens) == (14, 3)
    assert (m.timings(9.0).guessed_tokens, m.timings(9.0).accepted_tokens) == (14, 3)


def test_a_lost_stream_is_replayed_with_what_was_emitted() -> None:
    m = machine()
    to_decoding(m)
    m.handle(ev.TokensSampled(1, (1, 2)), 2.0)
    released, look_up = m.handle(ev.DecodeLost(1, GONE, True), 3.0)
    assert released == ev.ReleaseTicket(hold(1))
    assert what(look_up) == (2, frozenset({"decode-0"}), module.FIRST_RETRY_DELAY_MS, None)
    assert m.tokens() == (*m.prompt, 1, 2)
    assert m.handle(ev.TokensSampled(1, (3,)), 3.0) == []
    assert m.handle(ev.DecodeFinished(1, FinishReason.LENGTH, None), 3.0) == []
    to_decoding(m, 2, 4.0)
    assert m.tokens() == (*m.prompt, 1, 2)
    assert m.handle(ev.TokensSampled(2, (3, 4, 5, 6)), 5.0) == [ev.Emit((3, 4, 5))]
    # Usage and timings refer to the client's prompt, whatever the replay found.
    m.handle(ev.DecodeFinished(2, FinishReason.LENGTH, None), 6.0)
    timings = m.timings(6.0)
    assert (timings.replays, m.usage().completion_tokens, m.usage().cached_tokens) == (1, 5, 20)
    assert timings.cached_tokens + timings.prefilled_tokens + timings.tail_tokens == 21


@pytest.mark.parametrize(("last", "reason"), [((1, EOS), FinishReason.STOP), ((1, 2, 3, 4, 5), FinishReason.LENGTH)])
def test_losing_a_worker_after_its_last_token_is_harmless(last: tuple[int, ...], reason: FinishReason) -> None:
    m = machine()
    to_decoding(m)
    m.handle(ev.TokensSampled(1, last), 2.0)
    assert m.handle(ev.DecodeLost(1, GONE, True), 3.0)[-1] == ev.Finish(reason)


def test_a_lost_prefill_range_is_replanned_without_its_worker() -> None:
    m = machine()
    m.handle(planned(1, 21), 1.0)
    m.handle(ev.TicketGranted(1, hold(), 0), 1.0)
    m.handle(ev.ChunkAcked(1, ack(0, 8)), 1.0)
    actions = m.handle(ev.PrefillLost(1, GONE, True), 1.0)
    assert kinds(actions) == ["CancelDecode", "ReleaseTicket", "LookUp"]
    assert isinstance(actions[2], ev.LookUp)
    assert actions[2].avoid == frozenset({"prefill-0"})
    assert plan_is_colocated(m, actions[2])


def plan_is_colocated(m: RequestMachine, look_up: ev.LookUp) -> bool:
    actions = m.handle(planned(look_up.attempt, len(m.tokens()), 2, avoid=look_up.avoid), 2.0)
    return kinds(actions) == ["SubmitDecode"] and m.state is RequestState.OPENING


@pytest.mark.parametrize(("ended", "split"), [(0, 4), (12, 12), (15, 12), (20, 20), (99, 20)])
def test_the_decode_worker_computes_the_rest_of_a_prefill_range(ended: int, split: int) -> None:
    m = machine()
    m.handle(planned(1, 21, components=REMOTE), 1.0)
    assert kinds(m.handle(ev.TicketGranted(1, hold(), 1), 1.0)) == ["RunPrefill"]
    (submit,) = m.handle(ev.PrefillEnded(1, ended), 1.0)
    assert isinstance(submit, ev.SubmitDecode)
    assert (submit.plan.cached_tokens, submit.plan.split_tokens, sum(submit.plan.chunks)) == (4, split, split - 4)
    assert ("ended" in submit.plan.reason) == (split < 20)
    assert (m.usage().cached_tokens, m.tokens(), submit.awaited_blocks) == (4, m.prompt, 0)


def prefilling() -> RequestMachine:
    """Return a machine with a prefill range of two chunks and its stream, the first chunk acknowledged."""
    m = machine()
    m.handle(planned(1, 21), 1.0)
    assert kinds(m.handle(ev.TicketGranted(1, hold(), 1), 1.0)) == ["RunPrefill", "SubmitDecode"]
    m.handle(ev.ChunkAcked(1, ack(0, 12)), 1.5)
    return m


@pytest.mark.parametrize(
    ("late", "left"),
    [(ev.ChunkAcked(1, ack(1, 20)), ["CancelDecode", "StopWork"]), (ev.PrefillEnded(1, 20), ["CancelDecode"]),
     (ev.PrefillLost(1, GONE, True), ["CancelDecode"])],
)  # fmt: skip
def test_a_streams_first_token_implies_all_chunks(late: ev.Event, left: list[str]) -> None:
    m = prefilling()
    assert m.handle(ev.TicketAdopted(1), 2.0) == [ev.ReleaseTicket(hold())]
    assert m.state is RequestState.DECODING
    assert m.handle(late, 2.5) == []
    timings = m.timings(3.0)
    assert (timings.prefilled_tokens, timings.prefill_chunks, timings.prefill_ms) == (16, 2, 1000)
    assert kinds(m.handle(ev.RequestCancelled(), 3.0)) == [*left, "Fail"]


def test_an_answer_waits_briefly_for_its_last_acknowledgement() -> None:
    m = prefilling()
    m.handle(ev.TokensSampled(1, (7,)), 2.0)
    finished = m.handle(ev.DecodeFinished(1, FinishReason.LENGTH, None), 2.0)
    assert finished == [ev.StopWork(1, LAST_ACK_WAIT_MS), ev.ReleaseTicket(hold()), ev.Finish(FinishReason.LENGTH)]
    assert m.handle(ev.ChunkAcked(1, ack(1, 20)), 2.1) == []


def test_a_prefill_range_survives_an_early_loss_of_its_stream() -> None:
    """Blocks are computed once: the next attempt starts when they are committed, and finds them."""
    m = prefilling()
    assert m.handle(ev.DecodeLost(1, GONE, True), 2.0) == []
    assert m.handle(ev.ChunkAcked(1, ack(1, 20)), 3.0) == []
    released, look_up = m.handle(ev.PrefillEnded(1, 20), 3.0)
    assert released == ev.ReleaseTicket(hold())
    assert what(look_up) == (2, frozenset({"decode-0"}), module.FIRST_RETRY_DELAY_MS, None)
    submit = to_decoding(m, 2)
    assert (submit.plan.split_tokens, submit.awaited_blocks) == (20, 0)
    timings = m.timings(4.0)
    assert (timings.prefilled_tokens, timings.replays) == (16, 1)


def test_a_prefill_range_without_its_stream_can_be_lost_or_cancelled() -> None:
    m = prefilling()
    m.handle(ev.DecodeLost(1, GONE, True), 2.0)
    *_, look_up = m.handle(ev.PrefillLost(1, GONE, True), 3.0)
    assert what(look_up) == (2, frozenset({"decode-0", "prefill-0"}), module.FIRST_RETRY_DELAY_MS, None)
    m = prefilling()
    m.handle(ev.DecodeLost(1, GONE, True), 2.0)
    assert kinds(m.handle(ev.RequestCancelled(), 3.0)) == ["StopWork", "ReleaseTicket", "Fail"]
    m = prefilling()
    assert kinds(m.handle(ev.DecodeLost(1, InvalidRequest("defect"), False), 2.0))[-1] == "Fail"


def test_a_prefill_range_that_ends_early_blocks_no_stream() -> None:
    m = prefilling()
    assert kinds(m.handle(ev.PrefillEnded(1, 12), 2.0)) == ["CancelDecode", "ReleaseTicket", "LookUp"]


def test_attempts_are_bounded() -> None:
    m = machine(attempts=2)
    to_decoding(m)
    m.handle(ev.DecodeLost(1, GONE, True), 1.0)
    to_decoding(m, 2)
    *_, last = m.handle(ev.DecodeLost(2, NotFound("no such ticket"), True), 1.0)
    assert isinstance(last, ev.Fail)
    assert last.error.message == "given up after 2 attempts; the last one: no such ticket"


def test_a_stream_with_progress_is_always_retried() -> None:
    """Only attempts without progress are limited."""
    m = machine(attempts=2, max_tokens=9)
    for attempt in range(1, 6):
        to_decoding(m, attempt)
        m.handle(ev.TokensSampled(attempt, (50,)), 1.0)
        *_, again = m.handle(ev.DecodeLost(attempt, GONE, True), 1.0)
        assert isinstance(again, ev.LookUp)
    assert m.emitted == [50] * 5
    to_decoding(m, 6)
    assert kinds(m.handle(ev.DecodeLost(6, GONE, True), 1.0))[-1] == "LookUp"
    to_decoding(m, 7)
    *_, last = m.handle(ev.DecodeLost(7, GONE, True), 1.0)
    assert isinstance(last, ev.Fail)
    assert last.error.message.startswith("given up after 2 attempts")


@pytest.mark.parametrize("error", [Overloaded("line is full"), InvalidRequest("defect")])
def test_final_errors_are_not_retried(error: PillionError) -> None:
    m = machine()
    m.handle(planned(1, 21), 1.0)
    assert m.handle(ev.TicketLost(1, error, False), 1.0) == [ev.StopWork(1), ev.Fail(error)]


def test_only_a_running_request_waits_for_a_lost_part() -> None:
    fresh = machine()
    fresh.start()
    assert fresh.handle(ev.PlanFailed(1, GONE, False), 0.0) == [ev.StopWork(1), ev.Fail(GONE)]
    m = machine()
    to_decoding(m)
    m.handle(ev.DecodeLost(1, GONE, True), 10.0)
    (again,) = m.handle(ev.PlanFailed(2, GONE, False, PATIENCE_S), 20.0)
    assert isinstance(again, ev.LookUp)
    assert (again.attempt, again.after_ms) == (2, module.COMPONENT_POLL_MS)
    last = m.handle(ev.PlanFailed(2, GONE, False, PATIENCE_S), 10.0 + PATIENCE_S)
    assert last == [ev.StopWork(2), ev.Fail(GONE)]


def test_a_request_whose_part_was_lost_during_planning_waits() -> None:
    m = machine()
    m.start()
    leaving, again = m.handle(ev.PlanFailed(1, GONE, True), 10.0)
    assert (leaving, what(again)) == (ev.StopWork(1), (2, frozenset(), module.FIRST_RETRY_DELAY_MS, None))
    (again,) = m.handle(ev.PlanFailed(2, GONE, False, PATIENCE_S), 20.0)
    assert what(again) == (2, frozenset(), module.COMPONENT_POLL_MS, None)


def test_waiting_for_workers_of_a_restarted_node_costs_no_attempt() -> None:
    m = machine(attempts=2)
    to_decoding(m)
    m.handle(ev.DecodeLost(1, GONE, True), 10.0)
    for number, now in enumerate(range(11, 21)):
        m.handle(planned(2, len(m.tokens())), now)
        (again,) = m.handle(ev.TicketLost(2, GONE, True, PATIENCE_S), now)
        pause_ms = min(module.MAX_RETRY_DELAY_MS, module.COMPONENT_POLL_MS * 2**number)
        assert what(again) == (2, frozenset({"decode-0", "kv-0"}), pause_ms, None)
    assert to_decoding(m, 2).attempt == 2
    m = machine(attempts=2)
    to_decoding(m)
    m.handle(ev.DecodeLost(1, GONE, True), 10.0)
    m.handle(planned(2, len(m.tokens())), 10.0 + PATIENCE_S)
    *_, last = m.handle(ev.TicketLost(2, GONE, True, PATIENCE_S), 10.0 + PATIENCE_S)
    assert isinstance(last, ev.Fail)
    assert last.error.message == "given up after 40 s without the components that it needs; the last loss: gone"


def test_a_new_request_waits_for_workers_of_a_restarted_node() -> None:
    m = machine(attempts=1)
    m.start()
    m.handle(planned(1, 21), 30.0)
    *_, again = m.handle(ev.TicketLost(1, GONE, True, PATIENCE_S), 30.0)
    assert what(again) == (2, frozenset({"kv-0"}), module.FIRST_RETRY_DELAY_MS, None)
    assert to_decoding(m, 2).attempt == 2


@pytest.mark.parametrize("lost", [ev.DecodeLost, ev.PrefillLost])
def test_a_returning_worker_costs_time_but_no_attempt(lost: type[ev.AttemptLoss]) -> None:
    """Only the time spent looking for components counts, not that of computing in between."""
    m, now = machine(attempts=2), 0.0

    def lose() -> ev.Action:
        m.handle(planned(m.attempt, 21, 99 if lost is ev.DecodeLost else 0), now)
        m.handle(ev.TicketGranted(m.attempt, hold(m.attempt), 99 if lost is ev.DecodeLost else 0), now)
        return m.handle(lost(m.attempt, GONE, True, PATIENCE_S), now + 100.0)[-1]

    for _ in range(4):
        assert isinstance(lose(), ev.LookUp)
        now += 110.0
    last = lose()
    assert isinstance(last, ev.Fail)
    assert last.error.message.startswith("given up after 40 s without the components that it needs")


def test_progress_resets_the_waiting_time() -> None:
    m = machine(attempts=1, max_tokens=99)
    for attempt in range(1, 7):
        to_decoding(m, attempt, 30.0 * attempt)
        m.handle(ev.TokensSampled(attempt, (50,)), 30.0 * attempt)
        assert isinstance(m.handle(ev.DecodeLost(attempt, GONE, True, PATIENCE_S), 30.0 * attempt)[-1], ev.LookUp)


def lose_worker(m: RequestMachine, name: str) -> ev.Action:
    to_decoding(m, m.attempt)
    return m.handle(ev.DecodeLost(m.attempt, GONE, True, killed=name), 2.0)[-1]


def test_a_request_that_killed_two_workers_ends() -> None:
    m = machine()
    assert isinstance(lose_worker(m, "decode-0"), ev.LookUp)
    assert isinstance(lose_worker(m, ""), ev.LookUp)
    last = lose_worker(m, "decode-1")
    assert isinstance(last, ev.Fail)
    assert isinstance(last.error, Internal)
    assert "(decode-0, decode-1)" in last.error.message


def test_progress_between_deaths_clears_the_blame() -> None:
    m = machine(max_tokens=99)
    for _ in range(6):
        assert isinstance(lose_worker(m, "decode-0"), ev.LookUp)
        to_decoding(m, m.attempt)
        m.handle(ev.TokensSampled(m.attempt, (50,)), 3.0)
        m.handle(ev.DecodeLost(m.attempt, GONE, True), 3.0)


def test_silence_counts_as_loss() -> None:
    m = machine()
    to_decoding(m)
    assert kinds(m.handle(ev.AttemptSilent(1), 9.0)) == ["CancelDecode", "ReleaseTicket", "LookUp"]
    assert m.handle(ev.AttemptSilent(1), 9.0) == []


def follower(max_tokens: int = 5) -> RequestMachine:
    return RequestMachine(admitted_request(tuple(range(100, 121)), max_tokens, (EOS,)), 1)


def test_a_follower_has_its_own_work_only_after_a_loss_past_the_first_token() -> None:
    m = follower()
    assert m.start() == []
    assert m.handle(ev.LeaderSubmitted(1, planned(1, 21).plan), 1.0) == []
    assert m.handle(ev.LeaderStarted(), 1.0) == []
    assert m.handle(ev.TokensSampled(1, (1, 2)), 1.0) == [ev.Emit((1, 2))]
    (again,) = m.handle(ev.DecodeLost(1, GONE, True), 2.0)
    assert what(again) == (2, frozenset({"decode-0"}), module.FIRST_RETRY_DELAY_MS, None)
    to_decoding(m, 2)
    assert m.tokens() == (*m.prompt, 1, 2)


def test_a_follower_ignores_losses_before_the_first_token() -> None:
    m = follower()
    m.handle(ev.LeaderSubmitted(1, planned(1, 21).plan), 1.0)
    assert m.handle(ev.DecodeLost(1, GONE, True), 1.0) == []
    assert m.handle(ev.AttemptSilent(1), 1.0) == []
    # The failed attempt's stream is cancelled, and its late events are dropped.
    assert m.handle(ev.LeaderRetried(2), 1.0) == [ev.CancelDecode(1)]
    assert m.handle(ev.LeaderRetried(2), 1.0) == []
    assert m.handle(ev.TokensSampled(1, (8,)), 1.0) == m.handle(ev.TokensSampled(2, (8,)), 1.0) == []
    m.handle(ev.LeaderSubmitted(2, planned(2, 21).plan), 1.0)
    assert (m.state, m.handle(ev.TokensSampled(2, (9,)), 1.0), m.state) == (
        RequestState.FOLLOWING,
        [ev.Emit((9,))],
        RequestState.DECODING,
    )
    assert m.handle(ev.LeaderRetried(3), 1.0) == m.handle(ev.LeaderSubmitted(3, planned(3, 21).plan), 1.0) == []
    assert m.attempt == 2


def test_a_lost_parallel_sample_is_retried_once_the_first_answer_has_a_token() -> None:
    m = follower()
    m.handle(ev.LeaderSubmitted(1, planned(1, 21).plan), 1.0)
    m.handle(ev.DecodeLost(1, GONE, True), 1.0)
    assert kinds(m.handle(ev.LeaderStarted(), 2.0)) == ["LookUp"]
    other = follower()
    other.handle(ev.LeaderSubmitted(1, planned(1, 21).plan), 1.0)
    full = Overloaded("full")
    other.handle(ev.DecodeLost(1, full, False), 1.0)
    assert other.handle(ev.LeaderStarted(), 2.0)[-1] == ev.Fail(full)


def test_log_probabilities_are_sent_with_their_tokens() -> None:
    m = machine(max_tokens=2)
    to_decoding(m)
    logprobs = tuple(TokenLogprob(n, -n / 4) for n in (1, 2, 3))
    assert m.handle(ev.TokensSampled(1, (1, 2, 3), None, logprobs), 1.0) == [ev.Emit((1, 2), logprobs[:2])]


def test_a_stop_string_ends_the_stream_on_the_worker_too() -> None:
    m = machine()
    to_decoding(m)
    m.handle(ev.TokensSampled(1, (1, 2, 3), DecodeTimings(guessed_tokens=4, accepted_tokens=2)), 2.0)
    assert kinds(m.handle(ev.StopStringFound(2), 2.0)) == ["CancelDecode", "ReleaseTicket", "Finish"]
    assert m.usage() == Usage(21, 20, 2, guessed_tokens=4, accepted_tokens=2)


@pytest.mark.parametrize("event", [ev.RequestCancelled(), ev.DeadlinePassed()])
@pytest.mark.parametrize("state", RequestState)
def test_every_end_frees_everything_in_every_state(event: ev.Event, state: RequestState) -> None:
    m = machine()
    m.start()
    expected = {RequestState.FOLLOWING: ["CancelDecode", "Fail"], RequestState.PLANNING: ["StopWork", "Fail"],
                RequestState.OPENING: ["CancelDecode", "Fail"], RequestState.PINNING: ["StopWork", "Fail"],
                RequestState.FETCHING: ["StopWork", "ReleaseTicket", "Fail"],
                RequestState.PREFILLING: ["CancelDecode", "StopWork", "ReleaseTicket", "Fail"],
                RequestState.DECODING: ["CancelDecode", "ReleaseTicket", "Fail"], RequestState.DONE: []}  # fmt: skip
    if state is RequestState.FOLLOWING:
        m = follower()
        m.handle(ev.LeaderSubmitted(1, planned(1, 21).plan), 1.0)
    if state is not RequestState.PLANNING:
        m.handle(planned(1, 21, {RequestState.FETCHING: 1, RequestState.OPENING: 5}.get(state, 0)), 1.0)
    if state in (RequestState.FETCHING, RequestState.PREFILLING):
        m.handle(ev.TicketGranted(1, hold(), 0), 1.0)
    if state in (RequestState.DECODING, RequestState.DONE):
        m.handle(ev.TicketGranted(1, hold(), 99), 1.0)
    if state is RequestState.DONE:
        m.handle(ev.StopStringFound(0), 1.0)
    assert m.state is state
    assert kinds(m.handle(event, 2.0)) == expected[state]
    assert m.handle(ev.TicketGranted(1, hold(9), 3), 3.0) == [ev.ReleaseTicket(hold(9))]
