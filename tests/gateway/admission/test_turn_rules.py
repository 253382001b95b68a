"""Turns, giving way and predicted waits against plain models of the rules, on random scenes."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import given

from pillion.errors import Overloaded
from pillion.gateway.admission import giving_way
from pillion.gateway.admission.tenants import BACKGROUND_SHARE, BoundMet, ConcurrencyLimit, Tenant, share_of
from pillion.gateway.admission.turns import (
    ANSWER_RESERVE,
    JOB_BYTES,
    MIN_DEPARTURES,
    MIN_SPARE_SLOTS,
    RATE_HALF_LIFE_S,
    SMALL_JOB_BYTES,
    SPARE_SLOTS_SHARE,
    AdmissionPermit,
    DepartureRate,
    FairQueue,
    ModelTurns,
    ThreadTurns,
    WaitingRequest,
    YieldingRequests,
    shared_slots,
)
from pillion.rules.priority import OUTPUT_COST
from pillion.wire.registry import ComponentRecord
from tests.support.scenes import random_scenes

A, B, HEAVY, OWN = (
    Tenant(name="a"),
    Tenant(name="b"),
    Tenant(name="h", weight=3.0),
    Tenant(name="o", max_inflight_requests=4, max_inflight_tokens=6),
)
TENANTS = [A, B, HEAVY, OWN, A.in_background(), HEAVY.in_background(), Tenant(name="")]


def expected_to_give_way(
    waiting: list[AdmissionPermit], bound: ConcurrencyLimit, newcomer: AdmissionPermit, freed: Counter[str], own: bool
) -> list[AdmissionPermit]:
    """Return the candidates to give way next: several if tenants are equally far above their shares."""

    def level(one: AdmissionPermit) -> float:
        return (bound.of[one.tenant.name] - freed[one.tenant.name]) / one.tenant.weight

    def highest(some: list[AdmissionPermit]) -> list[AdmissionPermit]:
        return [one for one in some if level(one) == max(map(level, some))]

    tenant = newcomer.tenant
    if own:
        waiting = [one for one in waiting if one.tenant.name == tenant.name]
    last = [
        one
        for one in waiting
        if not any(
            other.tenant == one.tenant and (other.order, other.number) > (one.order, one.number) for other in waiting
        )
    ]
    hidden = [one for one in last if one.tenant.background]
    if hidden:
        return highest(hidden)
    others = highest([one for one in last if one.tenant.name != tenant.name])
    amount = giving_way.quota_units(newcomer, bound)
    if others and (bound.of[tenant.name] - freed[tenant.name] + amount) / tenant.weight < level(others[0]):
        return others
    return [one for one in last if one.tenant.name == tenant.name and one.order > newcomer.order]


@given(random_scenes())
def test_the_displaced_requests_match_the_reference_model(scenes: list[Random]) -> None:
    for rng in scenes:
        of_prompts = rng.random() < 0.5
        name = "max_inflight_tokens" if of_prompts else "max_inflight_requests"
        bound = ConcurrencyLimit(name, "requests", rng.randint(4, 16), of_prompts)
        yielding, waiting = YieldingRequests(), []
        tenants = [OWN, *rng.sample(TENANTS, 2)] if rng.random() < 0.5 else rng.sample(TENANTS, 3)
        for number in range(rng.randint(1, 12)):
            order = float(rng.randint(0, 4))
            one = AdmissionPermit(rng.choice(tenants), rng.randint(1, 2), order=order, number=number)
            one.weight = rng.choice([0, 1, 1, 3])
            bound.take(one.tenant.name, giving_way.quota_units(one, bound))
            if rng.random() < 0.7:
                yielding.add(one)
                waiting.append(one)
        bound.of = +bound.of
        for one in rng.sample(waiting, rng.randint(0, len(waiting)) // 3):
            yielding.remove(one)
            yielding.remove(one)
            waiting.remove(one)
        assert set(map(id, yielding)) == set(map(id, waiting))
        newcomer = AdmissionPermit(rng.choice(tenants), rng.randint(1, 2), order=float(rng.randint(0, 4)), number=99)
        newcomer.weight = amount = rng.randint(1, 4) if of_prompts else newcomer.answers
        if rng.random() < 0.3:
            yielding.add(newcomer)
        found = giving_way.choose(yielding, bound, newcomer, amount)
        left, freed = [one for one in waiting if giving_way.quota_units(one, bound)], Counter[str]()
        chosen = iter([] if isinstance(found, BoundMet) else found)
        while (met := bound.met(newcomer.tenant, amount, freed)) is not None:
            able = expected_to_give_way(left, bound, newcomer, freed, met.own)
            if not able or newcomer.tenant.background:
                assert isinstance(found, BoundMet)
                assert found == met or len(able) > 1
                break
            if isinstance(found, BoundMet):
                one = able[0]
                if len(able) > 1:
                    break
            else:
                one = next(chosen)
                assert any(one is other for other in able)
            left.remove(one)
            freed[one.tenant.name] += giving_way.quota_units(one, bound)
        else:
            assert not isinstance(found, BoundMet)
            assert next(chosen, None) is None


@dataclass
class LineModel:
    """Waiting requests of one kind, and each tenant's tokens divided by its weight."""

    counters: dict[str, float] = field(default_factory=dict)
    floor: float = 0.0
    waiting: list[AdmissionPermit] = field(default_factory=list)

    def of(self, name: str) -> list[AdmissionPermit]:
        return [one for one in self.waiting if one.tenant.name == name]

    def push(self, one: AdmissionPermit) -> None:
        name = one.tenant.name
        if not self.of(name):
            self.counters[name] = max(self.counters.get(name, 0.0), self.floor)
        self.waiting.append(one)

    def first(self, but: set[str]) -> AdmissionPermit | None:
        def turn(one: AdmissionPermit) -> tuple[float, float, int]:
            return self.counters[one.tenant.name], one.order, one.number

        return min((one for one in self.waiting if one.tenant.name not in but), key=turn, default=None)

    def pop(self, one: AdmissionPermit) -> None:
        self.waiting.remove(one)
        self.floor = max(self.floor, self.counters[one.tenant.name])
        self.counters[one.tenant.name] += one.tokens / one.tenant.weight

    def charge(self, one: AdmissionPermit, tokens: int) -> None:
        if one.tenant.name in self.counters:
            self.counters[one.tenant.name] += OUTPUT_COST * tokens / one.tenant.weight

    def retain(self, names: set[str]) -> None:
        self.counters = {name: at for name, at in self.counters.items() if name in names or self.of(name)}


@dataclass
class TurnModel:
    """Turns by the rules: by shares, background last, a tenant with nothing at the workers at once."""

    slots: int
    lines: dict[bool, LineModel] = field(default_factory=lambda: {False: LineModel(), True: LineModel()})
    running: list[AdmissionPermit] = field(default_factory=list)

    @property
    def answers(self) -> int:
        return sum(one.answers for one in self.running)

    def present(self) -> set[str]:
        return {one.tenant.name for one in self.running if not one.tenant.background}

    def fits(self, one: AdmissionPermit, share: float = 1.0) -> bool:
        if not self.slots or not self.answers or self.answers + one.answers <= int(self.slots * share):
            return True
        return one.tenant.name not in {"", *self.present()} and not one.tenant.background

    def next(self, now_s: float) -> tuple[AdmissionPermit, float] | None:
        hidden, first = self.lines[True].first(set()), self.lines[False].first(set())
        if hidden is not None and hidden.order <= now_s:
            found = hidden
        elif first is not None:
            found = first
        else:
            return None if hidden is None else (hidden, BACKGROUND_SHARE)
        if not self.fits(found):
            found = self.lines[False].first(self.present()) or found
        return found, 1.0

    def grant(self, now_s: float, gone: set[int]) -> list[int]:
        granted = []
        while (found := self.next(now_s)) is not None:
            one, share = found
            line = self.lines[one.tenant.background]
            if one.number in gone:
                line.waiting.remove(one)
                continue
            if not self.fits(one, share):
                break
            line.pop(one)
            self.running.append(one)
            granted.append(one.number)
        return granted


class NoTimes:
    """A predictor without measured steps: predicts nothing."""

    def ended(self, _: object) -> None:
        pass

    def seconds(self, *_: object) -> float:
        return 0.0


class Owner:
    def leave(self, permit: AdmissionPermit, generated_tokens: int) -> None:
        raise AssertionError("the queue itself frees nothing")


@given(random_scenes())
def test_turns_go_by_shares_and_slots(scenes: list[Random]) -> None:
    times: Any = NoTimes()
    for rng in scenes:
        model = TurnModel(rng.randint(0, 6))
        turns, owner, now_s = ModelTurns(lambda model=model: model.slots, times), Owner(), 0.0
        gone: set[int] = set()
        for number in range(rng.randint(1, 50)):
            now_s += rng.randint(0, 2)
            line = [one for line in model.lines.values() for one in line.waiting]
            kind = rng.choice(["wait", "wait", "wait", "free", "free", "give up", "gone", "keep"])
            if kind == "wait":
                order = now_s + rng.randint(-3, 3)
                one = AdmissionPermit(rng.choice(TENANTS), rng.randint(1, 2), order=order, number=number)
                one.tokens = rng.randint(1, 9)
                turns.wait(one, now_s)
                model.lines[one.tenant.background].push(one)
            elif kind == "free" and model.running:
                one, tokens = rng.choice(model.running), rng.randint(0, 9)
                assert one.queue is owner
                turns.free(one, tokens)
                assert one.queue is None
                assert one.generated_tokens == tokens
                model.running.remove(one)
                model.lines[one.tenant.background].charge(one, tokens)
            elif kind == "give up" and line:
                one = rng.choice(line)
                turns.give_up(one)
                turns.give_up(one)
                model.lines[one.tenant.background].waiting.remove(one)
            elif kind == "gone" and line:
                gone.add(rng.choice(line).number)
            elif kind == "keep":
                for queue, kept in ((turns.waiting, model.lines[False]), (turns.background, model.lines[True])):
                    queue.retain({"a"})
                    kept.retain({"a"})
            before = model.answers
            granted = turns.grant(owner, now_s, gone.__contains__)
            assert [one.number for one in granted] == model.grant(now_s, gone)
            for one in granted:
                before += one.answers
                assert (one.begun_s, one.beside, one.place) == (now_s, before, None)
            assert turns.running == model.answers
            assert turns.waiting.counts() == Counter(one.tenant.name for one in model.lines[False].waiting)
            turns.check_integrity()


@given(random_scenes())
def test_the_pace_of_departures_is_a_decaying_mean_without_its_longest_gap(scenes: list[Random]) -> None:
    for rng in scenes:
        rate, now_s, since_s = DepartureRate(), 0.0, None
        # Seconds between two ends, number of answers that ended, time of the second end.
        gaps: list[tuple[float, int, float]] = []
        for _ in range(rng.randint(1, 30)):
            now_s += rng.choice([0.5, 1.0, 4.0, 30.0])
            if rng.random() < 0.3:
                rate.began(now_s)
                since_s = now_s if since_s is None else since_s
                continue
            answers, waiting = rng.randint(1, 3), rng.random() < 0.7
            rate.left(answers, waiting, now_s)
            if since_s is not None:
                gaps.append((now_s - since_s, answers, now_s))
            since_s = now_s if waiting else None
        # Time without a queue is skipped: weights decay by the seconds of later gaps.
        weighted, later_s = [], 0.0
        for passed_s, answers, _ in reversed(gaps):
            kept = 0.5 ** (later_s / RATE_HALF_LIFE_S)
            weighted.append((passed_s * kept, answers * kept))
            later_s += passed_s
        ended = sum(count for _, count in weighted)
        ahead = rng.randint(0, 5)
        longest_s, longest_ended = max(weighted, default=(0.0, 0.0))
        if ended < MIN_DEPARTURES or ended - longest_ended < 1:
            assert rate.wait_s(ahead) == 0.0
            continue
        seconds = sum(passed_s for passed_s, _ in weighted) - longest_s
        assert rate.wait_s(ahead) == pytest.approx((ahead + 1) * seconds / (ended - longest_ended))


@dataclass
class ThreadModel:
    """Two queues for threads: large jobs never use the last thread, and go first if none is running."""

    threads: int
    lines: dict[bool, LineModel] = field(default_factory=lambda: {False: LineModel(), True: LineModel()})
    running: list[tuple[bool, AdmissionPermit]] = field(default_factory=list)

    def grant(self) -> list[int]:
        granted = []
        while len(self.running) < self.threads:
            firsts = {large: line.first(set()) for large, line in self.lines.items()}
            busy = sum(large for large, _ in self.running)
            if firsts[True] is not None and busy < self.threads - 1 and (firsts[False] is None or not busy):
                large = True
            elif firsts[False] is not None:
                large = False
            else:
                break
            one = firsts[large]
            assert one is not None
            self.lines[large].pop(one)
            self.running.append((large, one))
            granted.append(one.number)
        return granted


@given(random_scenes())
def test_jobs_get_threads_by_size_and_shares(scenes: list[Random]) -> None:
    for rng in scenes:
        threads, most = rng.randint(2, 4), rng.randint(3, 12)
        turns, model = ThreadTurns(threads, most), ThreadModel(threads)
        jobs: dict[int, Any] = {}
        of: Counter[str] = Counter()
        for _ in range(rng.randint(1, 40)):
            if rng.random() < 0.6:
                tenant = rng.choice([A, B, HEAVY, Tenant(name="")])
                size = rng.choice([0, 10, SMALL_JOB_BYTES, SMALL_JOB_BYTES + 1, 9 * SMALL_JOB_BYTES])
                others = of.total() - of[tenant.name]
                if of.total() >= most or of[tenant.name] >= share_of(tenant, most, others):
                    with pytest.raises(Overloaded):
                        turns.wait(tenant, size)
                else:
                    job = turns.wait(tenant, size)
                    assert job.large is (size > SMALL_JOB_BYTES)
                    number = job.place.number
                    one = AdmissionPermit(tenant, 1, order=0.0, number=number, tokens=JOB_BYTES + size)
                    model.lines[job.large].push(one)
                    jobs[number] = job
                    of[tenant.name] += 1
            elif jobs:
                number = rng.choice(list(jobs))
                job = jobs.pop(number)
                turns.end(job)
                of[job.tenant.name] -= 1
                line = model.lines[job.large]
                line.waiting = [one for one in line.waiting if one.number != number]
                model.running = [(large, one) for large, one in model.running if one.number != number]
            if rng.random() < 0.1:
                turns.retain({"a"})
                for line in model.lines.values():
                    line.retain({"a"})
            assert turns.jobs == of.total()
            assert [job.place.number for job in turns.grant()] == model.grant()


@given(random_scenes())
def test_a_gateway_gets_an_even_share_of_slots_plus_unused_ones(scenes: list[Random]) -> None:
    for rng in scenes:
        workers = [
            ComponentRecord(
                component_id=str(number),
                role="decode",
                address="x",
                max_step_tokens=rng.choice([64, 64, 64, 64, 0]),
                running_requests=rng.randint(0, 40),
                free_seqs=rng.choice([0, rng.randint(0, 90)]),
            )
            for number in range(rng.randint(0, 3))
        ]
        others = [rng.randint(0, 60) for _ in range(rng.choice([0, 1, 2, 16]))]
        found = shared_slots(workers, others)
        if not workers or any(not worker.max_step_tokens for worker in workers):
            assert found == 0
            continue
        sequences = sum(worker.running_requests + worker.free_seqs for worker in workers)
        slots = sequences + max(MIN_SPARE_SLOTS, int(sequences * SPARE_SLOTS_SHARE))
        even = slots // (len(others) + 1)
        assert found == slots - sum(min(even, running) for running in others)
        assert found >= max(1, even)
        assert type(found) is int


@given(random_scenes())
def test_requests_counted_as_ahead_are_served_before(scenes: list[Random]) -> None:
    """Among tenants with equal service the others go first, so that waits are overestimated."""
    for rng in scenes:
        queue, line = FairQueue(), LineModel()
        tenants = [A, B, Tenant(name="h", weight=2.0)]
        for number in range(rng.randint(0, 15)):
            one = AdmissionPermit(rng.choice(tenants), rng.randint(1, 3), order=float(rng.randint(0, 3)), number=number)
            one.tokens = rng.randint(1, 6)
            queue.push(one.tenant, WaitingRequest(one.order, number, one.tokens, one.answers))
            line.push(one)
            if rng.random() < 0.4:
                first = line.first(set())
                assert first is not None
                assert queue.pop().number == first.number
                line.pop(first)
        last = AdmissionPermit(rng.choice(tenants), 1, order=float(rng.randint(0, 3)), number=99, tokens=3)
        found = queue.ahead(last.tenant, WaitingRequest(last.order, 99, 3, 1))
        line.push(last)
        before = 0
        while True:
            heads = [
                min(line.of(name), key=lambda one: (one.order, one.number)) for name in {"a", "b", "h"} if line.of(name)
            ]
            turn = min(heads, key=lambda one: (line.counters[one.tenant.name], one.tenant == last.tenant))
            line.pop(turn)
            if turn is last:
                break
            before += turn.answers
        assert found == before


class FixedTimes:
    """A predictor with one time for all answers."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def ended(self, _: object) -> None:
        pass

    def seconds(self, *_: object) -> float:
        return self._seconds


@given(random_scenes())
def test_a_request_that_would_be_late_is_refused(scenes: list[Random]) -> None:
    """Refuse on arrival, with a margin; and at the turn, if the answer alone takes longer."""
    for rng in scenes:
        answer_s = rng.choice([0.0, 1.0, 4.0])
        model, pace, owner, now_s = TurnModel(rng.randint(1, 3)), DepartureRate(), Owner(), 0.0
        times: Any = FixedTimes(answer_s)
        turns = ModelTurns(lambda model=model: model.slots, times)
        line = model.lines[False]

        def lasts(one: AdmissionPermit, model: TurnModel = model, answer_s: float = answer_s) -> float:
            return answer_s if one.allowed_tokens and model.answers else 0.0

        for number in range(rng.randint(4, 40)):
            now_s += rng.choice([0.25, 1.0])
            if model.running and rng.random() < 0.5:
                one = rng.choice(model.running)
                turns.free(one, 3)
                model.running.remove(one)
                model.lines[one.tenant.background].charge(one, 3)
                left = one
            else:
                left = None
                one = AdmissionPermit(rng.choice(TENANTS), rng.randint(1, 2), order=now_s, number=number)
                one.tokens, one.allowed_tokens = rng.randint(1, 9), rng.choice([0, 9, 9])
                one.deadline_s = rng.choice([None, now_s + rng.choice([0.5, 1.25, 2.0, 5.0, 9.0])])
                hidden = one.tenant.background
                alone = one.tenant.name not in {"", *model.present()} and not hidden
                waits = not alone and (bool(line.waiting) or not model.fits(one))
                place = WaitingRequest(one.order, one.number, one.tokens, one.answers)
                wait_s = pace.wait_s(turns.waiting.ahead(one.tenant, place)) if waits else 0.0
                needs_s = wait_s + lasts(one) * ANSWER_RESERVE
                if one.deadline_s is not None and not hidden and needs_s >= one.deadline_s - now_s:
                    with pytest.raises(Overloaded) as caught:
                        turns.wait(one, now_s)
                    lacks_s = max(wait_s, needs_s - (one.deadline_s - now_s))
                    assert caught.value.retry_after_ms == max(1, math.ceil(lacks_s * 1000))
                    assert f"wait would take about {wait_s:.1f} s" in caught.value.message
                    continue
                turns.wait(one, now_s)
                model.lines[hidden].push(one)
            expected, given_up = [], []
            while (found := model.next(now_s)) is not None and model.fits(*found):
                turn = found[0]
                late = turn.deadline_s is not None and not turn.tenant.background
                if late and lasts(turn) >= (turn.deadline_s or 0.0) - now_s:
                    given_up.append(turn)
                    model.lines[turn.tenant.background].waiting.remove(turn)
                else:
                    model.lines[turn.tenant.background].pop(turn)
                    model.running.append(turn)
                expected.append(turn)
            assert turns.grant(owner, now_s, lambda _: False) == expected
            assert [one for one in expected if one.given_up is not None] == given_up
            if left is not None:
                turns.left(left, now_s)
                pace.left(left.answers, bool(line.waiting), now_s)
            elif one not in expected:
                turns.began(one, now_s)
                if not one.tenant.background:
                    pace.began(now_s)
