"""Scheduler queues against a plain model of their rules: service order, preemption, places, and tenants' counters."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import given

from pillion.engine.scheduling import queues as queues_module
from pillion.engine.scheduling.queues import SchedulerQueues
from pillion.engine.scheduling.sequence import SequenceState
from pillion.engine.scheduling.step_cost import TokenBudget
from pillion.rules.priority import MAX_PRIORITY, PRIORITY_AGING_S, Flow
from tests.support.scenes import random_scenes

RUNNING, PREEMPTED, WAITING = SequenceState.RUNNING, SequenceState.PREEMPTED, SequenceState.WAITING
FLOWS = [Flow(b"a"), Flow(b"b", 2.0), Flow(b"c", 0.5), Flow(b"d"), Flow(b"e")]
PRIORITIES = [-1, 0, 0, 1, MAX_PRIORITY]


@dataclass(eq=False)
class QueuedSequence:
    """A sequence as the queues see one."""

    seq_id: int
    state: SequenceState
    priority: int
    flow: Flow
    queue_order: float
    prompt_order: float
    num_tokens: int
    num_computed: int
    num_in_flight: int = 0
    decoding: bool = False
    awaits_adapter: bool = False
    may_give_way: bool = True
    uncharged_tokens: int = 0

    @property
    def next_start(self) -> int:
        return self.num_computed + self.num_in_flight

    @property
    def left_to_compute(self) -> int:
        return self.num_tokens - self.num_computed

    def take_charge(self) -> int:
        tokens, self.uncharged_tokens = self.uncharged_tokens, 0
        return tokens

    def start_running(self) -> None:
        self.state = RUNNING

    def give_way(self) -> None:
        self.state, self.decoding = PREEMPTED, False

    @property
    def in_background(self) -> bool:
        return self.priority == MAX_PRIORITY

    @property
    def service_order(self) -> tuple[float, int]:
        """Preempted ones go before those that came within PRIORITY_AGING_S."""
        return self.prompt_order - (PRIORITY_AGING_S if self.state is PREEMPTED else 0.0), self.seq_id

    @property
    def rank(self) -> int:
        return 0 if self.priority < 0 else 2 if self.in_background else 1


@dataclass
class Steps:
    """Launched steps, of which all up to ``landed`` have ended."""

    last_launched: int = 1
    landed: int = 0

    def has_retired(self, number: int) -> bool:
        return number <= self.landed


def sequences(rng: Random, flows: int = 3, most: int = 9) -> list[QueuedSequence]:
    found = []
    # Few of what differs in each scene, so that the same is often equal.
    states = rng.choices([RUNNING, PREEMPTED, WAITING], k=rng.randint(2, 3))
    keys = rng.sample(FLOWS[:flows], rng.randint(1, flows))
    urgencies = rng.choices(PRIORITIES, k=rng.randint(1, 3))
    for seq_id in range(1, rng.randint(1, most) + 1):
        tokens, state = rng.randint(2, 12), rng.choice(states)
        decoding = state is RUNNING and rng.random() < 0.7
        computed = tokens - 1 if decoding else rng.randrange(tokens)
        order = float(rng.randint(0, 25))
        found.append(
            QueuedSequence(
                seq_id,
                state,
                rng.choice(urgencies),
                rng.choice(keys),
                order,
                order + rng.randint(0, 9),
                tokens,
                computed,
                num_in_flight=rng.randint(0, tokens - computed),
                decoding=decoding,
                awaits_adapter=state is not RUNNING and rng.random() < 0.2,
                may_give_way=rng.random() < 0.8,
                uncharged_tokens=rng.choice([0, 4, 4, rng.randint(0, 12)]) if state is not WAITING else 0,
            )
        )
    rng.shuffle(found)
    return found


def crowded(rng: Random) -> list[QueuedSequence]:
    """One or two tenants run, and others wait without a place."""
    found = sequences(rng, flows=5, most=14)
    runs = FLOWS[: rng.randint(1, 2)]
    for one in found:
        one.state = RUNNING if one.flow in runs else rng.choice([PREEMPTED, WAITING])
        one.decoding = one.state is RUNNING and rng.random() < 0.9
        one.num_computed = one.num_tokens - 1 if one.decoding else one.num_computed
        one.num_in_flight = min(one.num_in_flight, one.left_to_compute)
        one.awaits_adapter &= one.state is not RUNNING
        one.uncharged_tokens *= one.state is not WAITING
        if one.state is RUNNING and rng.random() < 0.5:
            one.priority, one.uncharged_tokens = rng.choice([0, 1, 5, MAX_PRIORITY]), rng.randint(0, 12)
    return found


def queued(members: list[QueuedSequence], max_num_seqs: int) -> SchedulerQueues:
    queues = SchedulerQueues(max_num_seqs)
    for sequence in members:
        queues.join(sequence)
    queues.check_integrity(members)
    return queues


def counters(queues: SchedulerQueues, members: list[QueuedSequence]) -> dict[bytes, float]:
    """Each tenant's tokens over its weight, those that were not charged yet included."""
    found = {key: account.counter for key, account in queues.flows.accounts.items()}
    for one in members:
        if one.state is not WAITING:
            found[one.flow.key] += one.uncharged_tokens / one.flow.weight
    return found


def ids(found: Any) -> list[int]:
    return [one.seq_id for one in found]


def room(members: list[QueuedSequence], spare: int) -> int:
    return sum(one.state is RUNNING for one in members) + spare


@given(random_scenes())
def test_victims_are_chosen_by_priority_then_service_then_age(scenes: list[Random]) -> None:
    for rng in scenes:
        members, spare = sequences(rng), rng.randint(0, 3)
        queues = queued(members, room(members, spare))
        head = min(members, key=lambda one: (one.queue_order, one.seq_id))
        left = [one for one in members if one is not head] or [head]
        least_urgent = [one for one in left if one.priority == max(other.priority for other in left)]
        had = counters(queues, members)
        most = max(had[one.flow.key] for one in least_urgent)
        assert queues.victim().seq_id == max(one.seq_id for one in least_urgent if had[one.flow.key] == most)


def tails_in_turn(
    tails: list[QueuedSequence], places: dict[bytes, int], had: dict[bytes, float], most: int
) -> list[int]:
    """Order tails by a tenant's service within a rank, and by place between ranks. Begun ones and ``most`` others."""
    had, places, left, found = dict(had), dict(places), sorted(tails, key=lambda one: one.service_order), []
    while left:
        first = {one.flow.key: one for one in reversed(left)}.values()
        ranks = defaultdict(list)
        for one in first:
            ranks[one.rank].append(one)
        turns = [
            min(ones, key=lambda one: (had[one.flow.key], places[one.flow.key], one.service_order))
            for ones in ranks.values()
        ]
        turn = min(turns, key=lambda one: one.service_order)
        left.remove(turn)
        places[turn.flow.key] += 1
        if turn.state is RUNNING or most > 0:
            most -= turn.state is not RUNNING
            found.append(turn.seq_id)
            had[turn.flow.key] += turn.left_to_compute / turn.flow.weight
    return found


@given(random_scenes())
def test_prompt_tails_are_ordered_by_shares_and_queue_order(scenes: list[Random]) -> None:
    for rng in scenes:
        members, free = sequences(rng), rng.randint(0, 3)
        queues = queued(members, room(members, free))
        running = [one for one in members if one.state is RUNNING]
        begun = [one for one in running if not one.decoding and one.next_start < one.num_tokens]
        able = [one for one in members if one.state is not RUNNING and not one.awaits_adapter]
        flows = {one.flow.key for one in members}
        if len(flows) > 1:
            places = {key: sum(one.flow.key == key for one in running) for key in flows}
            tails = begun + (able if free else [])
            assert ids(queues.prompt_tails()) == tails_in_turn(tails, places, counters(queues, members), 2 * free)
            in_line = tails_in_turn(
                [one for one in members if one.state is not RUNNING], places, counters(queues, members), len(members)
            )
        else:
            tails = list(begun)
            for state in (PREEMPTED, WAITING):
                line = [one for one in able if one.state is state]
                tails += sorted(line, key=lambda one: (one.prompt_order, one.seq_id))[:free]
            assert ids(queues.prompt_tails()) == ids(sorted(tails, key=lambda one: one.service_order))
            in_line = [
                one.seq_id
                for state in (PREEMPTED, WAITING)
                for one in sorted(members, key=lambda one: (one.prompt_order, one.seq_id))
                if one.state is state
            ]
        expected = {seq_id: place for place, seq_id in enumerate(in_line, 1)}
        expected |= {one.seq_id: 0 for one in running if not one.decoding}
        assert queues.positions() == expected


@given(random_scenes())
def test_the_load_counts_each_sequence_once(scenes: list[Random]) -> None:
    for rng in scenes:
        members = sequences(rng)
        queues = queued(members, len(members))
        budget = TokenBudget(64, 0.0)
        load = queues.load(budget)
        waiting = [one for one in members if one.state is not RUNNING]
        decodes = [one for one in members if one.decoding]
        begun = [one for one in members if one.state is RUNNING and not one.decoding]
        assert load["running_requests"] == len(decodes) + len(begun)
        assert load["waiting_requests"] == len(waiting)
        assert load["waiting_tokens"] == sum(one.left_to_compute for one in waiting)
        assert load["queued_tokens"] == sum(one.left_to_compute for one in waiting + begun)
        assert load["decoding_requests"] == len(decodes)
        assert load["context_tokens"] == sum(one.num_computed for one in decodes)


@given(random_scenes())
def test_only_foreground_prompts_of_a_lone_tenant_lengthen_steps(scenes: list[Random]) -> None:
    for rng in scenes:
        alone, members = sequences(rng, flows=1), sequences(rng)
        line = queued(alone, len(alone)).lengthening_tails(alone)
        assert line == [(one.next_start, one.num_tokens) for one in alone if not one.in_background]
        several = len({one.flow.key for one in members}) > 1
        assert not several or queued(members, len(members)).lengthening_tails(members) == []


def start_waiting(queues: SchedulerQueues) -> None:
    """Start as many waiting sequences as there are places."""
    waiting = [one for one in queues.prompt_tails() if one.state is not RUNNING]
    for one in waiting[: queues.free_seqs]:
        queues.start_running(one)


def places_given_up(queues: SchedulerQueues, members: list[QueuedSequence]) -> list[QueuedSequence]:
    """Return the decodes that give up their places, one per tenant that waits without any, the least served first:
    of the background, else of the tenant that was served most and has several."""
    had = counters(queues, members)
    running = [one for one in members if one.state is RUNNING]
    free = queues.max_num_seqs - len(running)
    keys = {one.flow.key for one in members}
    without = {key for key in keys if not any(one.flow.key == key for one in running)}
    able = [one for one in members if one.state is not RUNNING and not one.awaits_adapter and not one.in_background]
    order = list(queues.flows.accounts)
    claims = sorted(without & {one.flow.key for one in able}, key=lambda key: (had[key], order.index(key)))
    found: list[QueuedSequence] = []
    for key in claims[free:] if free < len(without) else []:
        left = [one for one in running if one not in found]
        givers = [
            one
            for one in left
            if one.decoding
            and one.may_give_way
            and (one.in_background or sum(other.flow.key == one.flow.key for other in left) > 1)
        ]
        givers.sort(key=lambda one: (one.in_background, had[one.flow.key], one.priority, one.seq_id))
        if not givers or (not givers[-1].in_background and had[givers[-1].flow.key] < had[key]):
            break
        found.append(givers[-1])
    return found


@given(random_scenes())
def test_places_go_to_tenants_without_any_once_launched_steps_have_ended(scenes: list[Random]) -> None:
    for rng in scenes:
        members = crowded(rng) if rng.random() < 0.8 else sequences(rng)
        queues = queued(members, room(members, rng.choice([0, 0, 1])))
        expected = places_given_up(queues, members)
        free = queues.free_seqs
        queues.make_way(Steps())
        assert ids(queues.yielding) == ids(expected)
        assert set(ids(queues.to_decode())) == set(ids(queues.running)) - set(ids(expected))
        assert queues.free_seqs == free + len(expected)
        for one in expected:
            # A grammar has forced tokens after the one that was launched.
            one.decoding, one.num_tokens = False, one.num_tokens + 3
        assert not set(ids(queues.prompt_tails())) & set(ids(expected))
        start_waiting(queues)
        # Later steps are launched without them, and are not waited for.
        queues.make_way(Steps(last_launched=2))
        assert ids(queues.yielding)[: len(expected)] == ids(expected)
        assert all(one.state is RUNNING for one in expected)
        queues.make_way(Steps(last_launched=3, landed=1))
        assert all(one.state is PREEMPTED and one in queues.preempted for one in expected)
        queues.check_integrity(members)


@given(random_scenes())
def test_a_freed_place_spares_the_sequence_that_was_to_yield_last(scenes: list[Random]) -> None:
    for rng in scenes:
        members = crowded(rng)
        queues = queued(members, room(members, 0))
        queues.make_way(Steps())
        given_up = list(queues.yielding)
        start_waiting(queues)
        gone = next((one for one in queues.running if one not in given_up), None)
        if not given_up or gone is None:
            continue
        for one in (gone, *queues.waiting, *queues.preempted):
            queues.leave(one)
        queues.make_way(Steps())
        assert ids(queues.yielding) == ids(given_up[:-1]), "the last one that was chosen keeps its place"


@dataclass
class TenantModel:
    """The counters by their definition: what each tenant was served over its weight, from where it began to wait."""

    limit: int
    counter: dict[bytes, float] = field(default_factory=dict)
    absent: dict[bytes, float] = field(default_factory=dict)
    members: list[QueuedSequence] = field(default_factory=list)

    def now(self, key: bytes) -> float:
        served = sum(one.uncharged_tokens / one.flow.weight for one in self.members if one.flow.key == key)
        return self.counter[key] + served

    def of(self, key: bytes) -> list[QueuedSequence]:
        return [one for one in self.members if one.flow.key == key]

    def join(self, sequence: QueuedSequence) -> None:
        key = sequence.flow.key
        if not self.of(key):
            self.counter[key] = self.absent.pop(key, 0.0)
        waits = [one for one in self.members if one.state is not RUNNING]
        others = {one.flow.key for one in self.members} - {key}
        if others and sequence.state is not RUNNING and not any(one.flow.key == key for one in waits):
            late = [self.now(one.flow.key) for one in waits if one.flow.key != key]
            level = min(late) if late else max(self.now(other) for other in others)
            self.counter[key] += max(0.0, level - self.now(key))
            if level > self.now(key):
                raise AssertionError("a tenant begins before those that wait")
        self.members.append(sequence)

    def leave(self, sequence: QueuedSequence) -> None:
        key = sequence.flow.key
        self.members.remove(sequence)
        self.counter[key] += sequence.uncharged_tokens / sequence.flow.weight
        if self.of(key):
            return
        self.absent[key] = self.counter.pop(key)
        if not self.members:
            self.absent.clear()
        elif len(self.absent) > self.limit:
            del self.absent[min(self.absent, key=self.absent.__getitem__)]


@given(random_scenes())
def test_counters_match_the_service_of_each_tenant(scenes: list[Random]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queues_module, "MAX_ABSENT_FLOWS", 1)
        for rng in scenes:
            queues, model = SchedulerQueues(100), TenantModel(1)
            for number in range(rng.randint(1, 30)):
                kind = rng.choice(["join", "join", "leave", "run", "serve", "serve"])
                one = rng.choice(model.members) if model.members else None
                if kind == "join" or one is None:
                    state = rng.choice([WAITING, WAITING, PREEMPTED, RUNNING])
                    place = float(rng.randint(0, 9))
                    one = QueuedSequence(number, state, 0, rng.choice(FLOWS), 0.0, place, 9, 0)
                    model.join(one)
                    queues.join(one)
                elif kind == "leave":
                    model.leave(one)
                    queues.leave(one)
                elif kind == "run" and one.state is not RUNNING:
                    queues.start_running(one)
                elif kind == "serve" and one.state is RUNNING:
                    one.uncharged_tokens += rng.randint(1, 9)
                queues.check_integrity(model.members)
                found = queues.flows.counters([*queues.running, *queues.preempted])
                assert found == pytest.approx({key: model.now(key) for key in model.counter})
                assert queues.flows.absent == pytest.approx(model.absent)


def test_removing_an_unqueued_sequence_has_no_effect() -> None:
    """Neither one that would be before the queue's own, nor one after it, nor one in another state."""
    own = QueuedSequence(2, WAITING, 0, FLOWS[0], 0.0, 5.0, 9, 0)
    queues = queued([own], 1)
    for seq_id, state in ((1, WAITING), (3, WAITING), (2, SequenceState.RESUMING)):
        queues.leave(QueuedSequence(seq_id, state, 0, FLOWS[0], 0.0, 5.0, 9, 0))
        assert list(queues) == [own]
        queues.check_integrity([own])
