"""Steps that are launched before the one before has landed: the same streams, no bubble, and nothing goes back to the
node too early.

Whatever a step under way uses is checked against the ledger after every launch, landing and answer (AheadHarness).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.engine.scheduling.block_chain import AdoptedTicket
from pillion.engine.scheduling.block_manager import BlockManager
from pillion.engine.scheduling.in_flight import InFlightSteps
from pillion.engine.scheduling.scheduler import Scheduler
from pillion.engine.scheduling.sequence import Sequence, SequenceState
from pillion.engine.scheduling.step_cost import TokenBudget
from pillion.engine.scheduling.step_plan import ScheduledChunk, StepPlan
from pillion.kernels.step import Int32, Sampled
from pillion.kvstore.ledger.integrity import check_integrity
from pillion.types import PoolingParams
from tests.engine.drafts.test_drafts import OracleDrafter
from tests.engine.scheduling.test_properties import ANSWER, CANCEL, CROWD, FLOW, LOAD, PUNCTUAL, STEP, begin_with
from tests.engine.scheduling.test_step_cost import decodes
from tests.support.ahead_harness import BROKEN, AheadHarness
from tests.support.examples import examples
from tests.support.scheduler_harness import BLOCK, GREEDY, ROOT, answer, prompt


def run_out(harness: AheadHarness) -> None:
    harness.finish()
    harness.check_answers()


def planned(harness: AheadHarness, seq_id: int, plan: StepPlan) -> int | None:
    """Return where each sequence's chunk starts."""
    return next((chunk.start for chunk in plan.scheduled if chunk.sequence.seq_id == seq_id), None)


def test_a_plain_stream_never_waits() -> None:
    """From its first token on, each step runs on the token sampled by the previous one; its last one is foreseen."""
    harness = AheadHarness(budget=4)
    harness.submit(prompt(1, 9), 33, seed=2)
    run_out(harness)
    assert harness.launches == 3 + 32
    assert harness.device.resolved == 32
    assert harness.void_rows == 0


def test_prompt_tails_and_prefill_ranges_run_ahead() -> None:
    harness = AheadHarness(budget=8, slots=200)
    harness.submit(prompt(1, 80), 0, chunks=(24, 48, 80))
    run_out(harness)
    assert harness.launches == 10
    harness.submit(prompt(2, 40), 5)
    run_out(harness)
    assert harness.launches == 10 + 5 + 4, "steps of eight tokens, then one for each token but the first"
    assert [chunk.end_tokens for chunk in harness.records[1].chunks] == [24, 48, 80]


def test_a_stop_id_voids_the_row_after_it() -> None:
    """The stream ends there; its slots are released only once the unused row has landed."""
    expected = answer(prompt(1, 9), 0, 40)
    at = next(place for place in range(8, 40) if expected[place] not in expected[:place])
    harness = AheadHarness()
    harness.submit(prompt(1, 9), 40, stop=frozenset(expected[at : at + 1]))
    while harness.records[1].end is None:
        harness.step()
        while harness.answer():
            pass
    assert len(harness.out) == 1
    # The last run of blocks is still uncommitted; then the ticket's release waits.
    harness.receive_flush()
    while harness.answer():
        pass
    harness.receive_flush()
    while harness.answer():
        pass
    assert harness.ledger.holders[harness.worker].tickets, "the ticket was released under a step that reads its blocks"
    harness.step()
    while harness.answer():
        pass
    assert not harness.ledger.holders[harness.worker].tickets
    run_out(harness)
    assert harness.records[1].token_ids == expected[: at + 1]
    assert harness.void_rows == 1


def test_penalties_do_not_delay_forward_passes() -> None:
    """The forward pass is launched ahead as well; only sampling waits for the previous step."""
    harness = AheadHarness()
    harness.submit(prompt(1, 9), 12, penalty=0.5)
    harness.submit(prompt(2, 7), 24)
    starts = []
    while harness.records[1].end is None:
        starts.append(planned(harness, 1, harness.step()))
        while harness.answer():
            pass
    assert starts[:5] == [0, 9, 10, 11, 12]
    assert harness.late_choices == 11, "all but the first, whose history is the prompt"
    run_out(harness)
    assert harness.launches == 24
    assert harness.late_choices == 11, "the other one is chosen at its launch when it is alone"


def test_a_parallel_sample_cancelled_in_flight_drops_only_its_token() -> None:
    harness = AheadHarness()
    harness.submit(prompt(1, 9), 6, seed=1, parallel_seeds=(2, 3, 4))
    harness.step()
    harness.cancel(3)
    run_out(harness)
    assert harness.records[3].token_ids == []
    assert harness.void_rows == 1
    for seq_id in (1, 2, 4):
        assert len(harness.records[seq_id].token_ids) == 6


def test_a_stream_cancelled_in_flight_leaves_at_once() -> None:
    harness = AheadHarness()
    harness.submit(prompt(1, 20), 40)
    for _ in range(8):
        harness.step()
        while harness.answer():
            pass
    harness.cancel(1)
    assert harness.scheduler.sequences == {}
    harness.receive_flush()
    while harness.answer():
        pass
    leased = harness.ledger.status().leased_blocks
    assert leased, "the slots went back under a step that writes there"
    harness.scribble()
    harness.step()
    harness.settle()


def stream(seq_id: int, length: int, slots: range, stop: frozenset[int] = frozenset()) -> Sequence:
    return Sequence(
        AdoptedTicket(seq_id, (), tuple(slots)),
        BLOCK,
        0.0,
        seq_id=seq_id,
        token_ids=np.array(prompt(seq_id, length), dtype=np.int32),
        parent_hash=ROOT,
        prompt_tokens=length,
        sampling=replace(GREEDY, stop_token_ids=tuple(stop), max_tokens=50),
        max_model_len=1000,
    )


def test_memory_freed_by_a_pending_step_avoids_a_preemption() -> None:
    """A stream stops while the node, not yet informed, reports exhaustion: streams without slots wait for the landing
    and the next answer instead of preempting the newest."""
    scheduler, stop = Scheduler(blocks=BlockManager(BLOCK), max_num_batched_tokens=64, max_num_seqs=8), 7
    for number in (1, 2, 3):
        scheduler.add(stream(number, 6, range(10 * number, 10 * number + 2)), 0.0)
    scheduler.add(stream(4, 5, range(40, 42), frozenset({stop})), 0.0)
    newest = stream(5, 2, range(50, 54))
    scheduler.add(newest, 0.0)
    flight, asked, released, ran = None, 0, [], []
    for turn in range(5):
        now = turn / 100
        if asked:
            scheduler.granted((), now)
            asked = 0
        plan = scheduler.schedule(now)
        ran.append({chunk.sequence.seq_id for chunk in plan.scheduled})
        outcomes = [scheduler.flush(now)]
        scheduler.launched(plan)
        if flight is not None:
            # The fourth stops with the token of the second step, while the third runs.
            chosen = [stop if turn == 2 and chunk.sequence.seq_id == 4 else 1 for chunk in flight.scheduled]
            outcomes.append(scheduler.commit(flight, Sampled(tuple(chosen)), now))
        for out in outcomes:
            for order in out.commits:
                scheduler.committed(order.seq_id, (), "no", now)
            asked += out.lease_blocks
            released.append((turn, out.releases))
        assert sum(out.preemptions for out in outcomes) == 0
        flight = plan
    assert ran[3] == {1, 2, 5}, "its two slots are used at once; the third needs one more"
    assert [(turn, tickets) for turn, tickets in released if tickets] == [(3, [4])]
    assert newest.state is SequenceState.RUNNING


def test_rows_launched_under_an_older_ticket_are_void() -> None:
    in_flight, sequence = InFlightSteps(), stream(1, 6, range(4))
    sequence.start_running()
    plan = StepPlan((ScheduledChunk(sequence, 0, 6, 1),))
    in_flight.launched(plan)
    sequence.adopt(AdoptedTicket(2, (), (5, 6)), SequenceState.WAITING)
    sequence.start_running()
    assert in_flight.retire(plan, Sampled((3,))) == ([], Sampled())
    assert sequence.num_in_flight == 0


@pytest.mark.parametrize("gone", range(3))
def test_a_text_that_ends_in_flight_gets_its_own_vector(gone: int) -> None:
    in_flight = InFlightSteps()
    texts = [stream(n, 6, range(4 * n, 4 * n + 4)) for n in (1, 2, 3)]
    for text in texts:
        text.pooling, text.max_tokens = PoolingParams(rows=range(5, 6)), 0
        text.start_running()
    plan = StepPlan(tuple(ScheduledChunk(text, 0, 6, 0, pools=1) for text in texts))
    in_flight.launched(plan)
    texts[gone].adopt(AdoptedTicket(9, (), (1, 2)), SequenceState.WAITING)
    scheduled, found = in_flight.retire(plan, Sampled(pooled=tuple(np.full(2, n, np.float32) for n in range(3))))
    left = [n for n in range(3) if n != gone]
    assert [chunk.sequence for chunk in scheduled] == [texts[n] for n in left]
    assert [vector.tolist() for vector in found.pooled] == [[n, n] for n in left]


@pytest.mark.parametrize("slots", [16, 20, 24])
def test_a_stream_preempted_in_flight_emits_every_token_once(slots: int) -> None:
    harness = AheadHarness(slots=slots, max_num_seqs=4, budget=32)
    for kind in range(4):
        harness.submit(prompt(kind, 9), 24, seed=kind)
    run_out(harness)
    assert harness.preemptions
    assert harness.void_rows, "nobody was preempted with a token under way"


def test_a_failed_launch_loses_no_earlier_token() -> None:
    harness = AheadHarness()
    harness.submit(prompt(1, 9), 20)
    for _ in range(5):
        harness.step()
        harness.answer()
    assert len(harness.records[1].token_ids) == 4
    harness.breaks = "launch"
    harness.step()
    assert len(harness.records[1].token_ids) == 5
    end = harness.records[1].end
    assert end is not None
    assert end.ending is not None
    assert end.ending.error is not None
    assert end.ending.error.message == BROKEN
    harness.submit(prompt(2, 9), 3)
    run_out(harness)
    assert len(harness.records[2].token_ids) == 3


def test_a_step_that_fails_on_completion_fails_only_its_sequences() -> None:
    harness = AheadHarness(budget=8)
    harness.submit(prompt(1, 9), 20)
    for _ in range(5):
        harness.step()
        harness.answer()
    harness.submit(prompt(2, 9), 5)
    harness.breaks = "landing"
    # The failing step carries only the first stream; the next one, already under way, both.
    harness.step()
    assert harness.records[1].end is not None
    assert harness.records[2].end is None
    run_out(harness)
    assert len(harness.records[2].token_ids) == 5


def test_a_step_fails_after_one_of_its_streams_was_cancelled() -> None:
    harness = AheadHarness()
    for kind in (1, 2):
        harness.submit(prompt(kind, 6), 20)
    harness.step()
    harness.cancel(1)
    harness.breaks = "landing"
    harness.step()
    assert harness.records[2].end is not None
    run_out(harness)


def test_a_commit_race_is_lost_while_a_step_reads_the_block() -> None:
    harness = AheadHarness(slots=64, budget=32)
    harness.submit(prompt(1, 15), 12)
    harness.submit(prompt(1, 15), 12)
    run_out(harness)
    assert harness.swaps


class SometimesDrafter(OracleDrafter):
    """Drafts only texts of some lengths."""

    def __init__(self, knows: Callable[[int], bool]) -> None:
        super().__init__()
        self._knows = knows

    def _propose(self, sequence: Sequence, most: int) -> Int32:
        return super()._propose(sequence, most if self._knows(sequence.num_tokens) else 0)


def test_steps_run_ahead_while_nothing_is_drafted() -> None:
    """Drafts follow known tokens, so drafting streams wait for each step; others never do."""
    drafting = AheadHarness(budget=32, drafter=OracleDrafter())
    drafting.submit(prompt(1, 9), 33)
    run_out(drafting)
    assert drafting.launches < 20
    assert drafting.device.resolved <= 1, "the first decode was scheduled before anybody had measured anything"
    silent = AheadHarness(budget=32, drafter=SometimesDrafter(lambda length: False))
    silent.submit(prompt(1, 9), 33)
    run_out(silent)
    assert silent.launches == 33
    assert silent.device.resolved >= 31, "only the first steps waited, until the drafter had said that it knows nothing"


def test_a_stream_is_drafted_once_its_drafter_matches() -> None:
    harness = AheadHarness(slots=100, budget=32, drafter=SometimesDrafter(lambda length: length > 40))
    harness.submit(prompt(1, 9), 90)
    run_out(harness)
    assert 20 < harness.device.resolved < 45
    assert harness.launches < 70


def test_a_queued_step_is_timed_from_the_end_of_the_previous_one() -> None:
    budget, scheduled = TokenBudget(256), decodes(4, 100)
    seen = []
    budget.cost.observe = lambda found, seconds, borrowed_s: seen.append(round(seconds, 6))  # type: ignore[method-assign]
    budget.begin(scheduled, 0.0)
    budget.begin(scheduled, 0.001, 1)
    budget.end(0.010)
    budget.begin(scheduled, 0.011, 1)
    budget.end(0.020, ok=False)
    budget.end(0.035)
    budget.begin(scheduled, 0.050)
    budget.end(0.058)
    assert seen == [0.010, 0.015, 0.008], "from its own launch, or from the landing before it, a failed one's too"


ARRIVE = st.tuples(
    st.just("arrive"),
    st.integers(0, 3),
    st.integers(1, 40),
    st.integers(0, 24),
    st.integers(-1, 1),
    st.integers(0, 5),
    st.sampled_from([0, 0, 0, 1, 3]),
    st.sampled_from([0, 0, 0, 5, 40]),
    st.sampled_from([0, 0, 1]),
    st.sampled_from([-1, -1, 0, 1, 2]),
    st.sampled_from([0, 0, 1]),
    # The adapter's number; 3 fails to load.
    st.sampled_from([0, 0, 0, 1, 2, 3]),
    FLOW,
)
SPAN = st.tuples(
    st.just("prefill range"), st.integers(0, 3), st.integers(1, 5), st.integers(1, 5), st.integers(0, 2), FLOW
)
TROUBLE = st.tuples(st.sampled_from(["scribble", "refuse", "launch", "landing"]))
SHAPES = st.tuples(st.integers(17, 60), st.integers(4, 24), st.integers(1, 4))
EVENTS = st.lists(st.one_of(ARRIVE, ARRIVE, SPAN, STEP, STEP, STEP, ANSWER, ANSWER, LOAD, CANCEL, TROUBLE), max_size=60)


def play(harness: AheadHarness, kind: str, numbers: list[int]) -> None:
    if kind == "arrive":
        text, length, most, priority, seed, parallel_samples, stops, penalized, grammar, scored, adapter, flow = numbers
        harness.submit(
            prompt(text, length),
            most,
            stop=frozenset(range(stops)),
            priority=priority,
            seed=seed,
            parallel_seeds=tuple(seed + 1 + number for number in range(parallel_samples if most else 0)),
            penalty=float(penalized),
            grammar=None if grammar < 0 else grammar,
            scored=bool(scored),
            adapter=adapter if harness.max_loras else 0,
            flow=flow,
        )
    elif kind == "prefill range":
        text, first, second, adapter, flow = numbers
        ends = BLOCK * first, BLOCK * (first + second)
        adapter = adapter if harness.max_loras else 0
        harness.submit(prompt(text, ends[1]), 0, chunks=ends, adapter=adapter, flow=flow)
    elif kind == "cancel":
        harness.receive_flush()
        alive = [seq_id for seq_id, record in harness.records.items() if record.end is None and not record.cancelled]
        if alive:
            harness.cancel(alive[numbers[0] % len(alive)])
    elif kind == "step":
        for _ in range(numbers[0]):
            harness.step()
    elif kind == "answer":
        for _ in range(numbers[0]):
            harness.answer()
    elif kind == "load":
        harness.load(numbers[0])
    elif kind == "preload":
        if harness.max_loras:
            harness.expect_adapter(numbers[0])
    elif kind == "scribble":
        harness.scribble()
    elif kind == "refuse":
        harness.refuse_commits += 1
    else:
        harness.breaks = kind
    harness.scheduler.check_integrity()
    check_integrity(harness.ledger)


@settings(max_examples=examples(300))
@given(
    SHAPES,
    EVENTS,
    st.integers(0, 99),
    PUNCTUAL,
    st.integers(0, 2),
    st.none() | st.integers(0, 3).map(OracleDrafter),
    CROWD,
)
def test_any_request_history_with_a_step_in_flight(
    shape: tuple[int, int, int],
    events: list[tuple[object, ...]],
    draws: int,
    punctual: float,
    max_loras: int,
    drafter: OracleDrafter | None,
    crowd: int,
) -> None:
    slots, budget, max_num_seqs = shape
    harness = AheadHarness(
        slots=slots,
        budget=max(budget, max_num_seqs),
        max_num_seqs=max_num_seqs,
        draws=draws,
        punctual=punctual,
        max_loras=max_loras,
        drafter=drafter,
    )
    harness.broken_adapters = {3}
    begin_with(harness, crowd)
    for kind, *arguments in events:
        play(harness, str(kind), [number for number in arguments if isinstance(number, int)])
    harness.breaks, harness.refuse_commits = "", 0
    run_out(harness)
    assert all(s.state is not SequenceState.RUNNING for s in harness.scheduler.sequences.values())


@settings(max_examples=examples(100))
@given(
    SHAPES,
    st.lists(st.one_of(SPAN, SPAN, STEP, STEP, ANSWER, CANCEL, TROUBLE), max_size=60),
    st.integers(0, 99),
    st.integers(0, 2),
    st.integers(3, 5),
)
def test_any_prefill_range_history_in_a_pipeline(
    shape: tuple[int, int, int], events: list[tuple[object, ...]], draws: int, max_loras: int, stages: int
) -> None:
    slots, budget, max_num_seqs = shape
    harness = AheadHarness(
        slots=slots,
        budget=max(budget, max_num_seqs),
        max_num_seqs=max_num_seqs,
        draws=draws,
        max_loras=max_loras,
        max_in_flight=stages,
    )
    for kind, *arguments in events:
        play(harness, str(kind), [number for number in arguments if isinstance(number, int)])
    harness.breaks, harness.refuse_commits = "", 0
    run_out(harness)


def test_several_chunks_of_a_prompt_are_in_flight_together() -> None:
    """As many as there are stages; the next prompt follows without a gap."""
    harness = AheadHarness(budget=8, slots=200, max_in_flight=4)
    for kind in (1, 2):
        harness.submit(prompt(kind, 40), 0, chunks=(40,))
    under_way = []
    for _ in range(10):
        harness.step()
        under_way.append(len(harness.out))
    assert under_way == [1, 2, *[3] * 8], "one more is under way while it waits for the oldest"
    run_out(harness)
    assert harness.launches == 10
