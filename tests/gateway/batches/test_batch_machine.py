"""Decisions of a batch under any order of results, refusals, restarts and ends."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pillion.gateway.batches.batch_machine import BACKOFF_S, FAULT_ATTEMPTS, MAX_BACKOFF_S, BatchMachine
from pillion.gateway.batches.batch_records import BatchRecord
from tests.support.examples import examples

NUMBERS = (1, 2, 4, 5, 7)
RECORD = BatchRecord(
    id="batch_a", tenant="t", endpoint="/v1/completions", input_file_id="f", created_at=0, expires_at=86400
)


def begun(done: tuple[tuple[int, bool], ...] = ()) -> BatchMachine:
    machine = BatchMachine(RECORD, NUMBERS, done)
    machine.begin(1.0)
    return machine


class BatchLife(RuleBasedStateMachine):
    """One batch over several processes: a kill preserves the journal and the record alone."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1.0
        self.journal: dict[int, bool] = {}
        self.cancelled = False
        self.machine = begun()
        self.kept = self.machine.record

    @property
    def ended(self) -> bool:
        return self.machine.record.over

    @precondition(lambda self: not self.ended)
    @rule()
    def start(self) -> None:
        number = self.machine.next_line(self.now_s)
        if number is not None:
            assert not self.machine.ending
            assert number not in self.journal
            assert number in NUMBERS

    @precondition(lambda self: self.machine.running and not self.ended)
    @rule(status=st.sampled_from([200, 400, 429, 500, 503]), after_s=st.sampled_from([0.0, 5.0]), data=st.data())
    def answer(self, status: int, after_s: float, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.machine.running)))
        if self.machine.is_final(number, status, after_s, self.now_s):
            assert number not in self.journal
            self.journal[number] = status != 200
            self.machine.finished(number, status != 200)
        else:
            assert status in (429, 500, 503)
            self.machine.requeue(number)
            assert self.machine.next_line(self.now_s) is None, "a refusal is followed by a pause"

    @rule(passed_s=st.sampled_from([0.1, 40.0, 30_000.0]))
    def wait(self, passed_s: float) -> None:
        self.now_s += passed_s

    @precondition(lambda self: not self.ended)
    @rule()
    def cancel(self) -> None:
        self.cancelled = True

    @precondition(lambda self: not self.ended)
    @rule(known=st.sampled_from([True, True, True, False]))
    def tick(self, known: bool) -> None:
        self.machine.tick(self.now_s, cancel=self.cancelled, tenant_known=known)
        if self.machine.ending:
            for number in sorted(self.machine.running):
                self.machine.requeue(number)
        self.kept = self.machine.record

    @precondition(lambda self: not self.ended)
    @rule()
    def kill(self) -> None:
        self.machine = BatchMachine(self.kept, NUMBERS, self.journal.items())
        self.machine.begin(self.now_s)

    @precondition(lambda self: self.machine.may_finish and not self.ended)
    @rule(killed=st.booleans())
    def finish(self, killed: bool) -> None:
        self.machine.finalize(self.now_s)
        self.kept = self.machine.record
        if killed:
            self.kill()
            return
        unserved = self.machine.unserved()
        assert not set(unserved) & set(self.journal)
        self.machine.end("out", "err", self.now_s)
        record = self.machine.record
        if record.status == "completed":
            assert set(self.journal) == set(NUMBERS)
        if record.status == "expired":
            assert record.completed + record.failed == len(NUMBERS)

    @invariant()
    def counts_are_the_journals(self) -> None:
        record = self.machine.record
        assert record.total == len(NUMBERS)
        assert record.completed == sum(not failed for failed in self.journal.values())
        assert record.failed - len(self.machine.unserved() if self.ended else ()) == sum(self.journal.values())
        assert not self.machine.running & set(self.journal)
        assert self.machine.queued == len(NUMBERS) - len(self.journal) - len(self.machine.running)

    def teardown(self) -> None:
        """Check that the batch ends."""
        for _ in range(200):
            if self.ended:
                return
            self.now_s += MAX_BACKOFF_S
            self.tick(True)
            self.start()
            for number in sorted(self.machine.running):
                self.journal[number] = False
                self.machine.finished(number, False)
            if self.machine.may_finish:
                self.finish(False)
        raise AssertionError("the batch does not end")


TestBatchLife = BatchLife.TestCase
TestBatchLife.settings = settings(max_examples=examples(150), stateful_step_count=30)


def test_each_line_runs_once() -> None:
    machine = begun()
    assert [machine.next_line(2.0) for _ in range(6)] == [*NUMBERS, None]
    assert not machine.may_finish
    for number in NUMBERS:
        assert machine.is_final(number, 200, 0.0, 2.0)
        machine.finished(number, False)
    assert machine.may_finish
    machine.finalize(3.0)
    assert machine.record.status == "finalizing"
    machine.end("o", None, 4.0)
    shown = machine.record.public()
    assert shown["request_counts"] == {"total": 5, "completed": 5, "failed": 0}
    assert (shown["status"], shown["in_progress_at"], shown["finalizing_at"], shown["completed_at"]) == (
        "completed",
        1,
        3,
        4,
    )
    assert "tenant" not in shown


def test_backoff_grows_and_resets_after_a_result() -> None:
    machine = begun()
    pauses, now_s = [], 10.0
    for _ in range(12):
        number = machine.next_line(now_s)
        assert number is not None
        assert not machine.is_final(number, 429, 0.0, now_s)
        machine.requeue(number)
        began_s = now_s
        while machine.next_line(now_s) is None:
            now_s += BACKOFF_S
        machine.requeue(next(iter(machine.running)))
        pauses.append(now_s - began_s)
    assert pauses[:4] == [BACKOFF_S, 2 * BACKOFF_S, 4 * BACKOFF_S, 8 * BACKOFF_S]
    assert max(pauses) == MAX_BACKOFF_S
    number = machine.next_line(now_s)
    assert number is not None
    machine.finished(number, False)
    number = machine.next_line(now_s)
    assert number is not None
    assert not machine.is_final(number, 429, 7.0, now_s)
    machine.requeue(number)
    assert machine.next_line(now_s + 6.9) is None
    assert machine.next_line(now_s + 7.0) is not None


@pytest.mark.parametrize("status", [500, 502, 504])
def test_a_fault_is_final_after_some_attempts(status: int) -> None:
    machine, now_s = begun(), 10.0
    for _ in range(FAULT_ATTEMPTS - 1):
        assert not machine.is_final(1, status, 0.0, now_s)
    assert machine.is_final(1, status, 0.0, now_s)


def test_an_expired_batch_lists_its_unserved_lines() -> None:
    machine = begun(((2, False), (4, True)))
    running = machine.next_line(2.0)
    machine.tick(86400.0, cancel=False, tenant_known=True)
    assert machine.next_line(86400.0) is None
    assert not machine.may_finish
    assert running == 1
    machine.requeue(running)
    assert machine.unserved() == [1, 5, 7]
    machine.end("o", "e", 86401.0)
    assert (machine.record.status, machine.record.completed, machine.record.failed) == ("expired", 1, 4)


def test_a_batch_without_its_tenant_fails() -> None:
    machine = begun(((2, False),))
    machine.tick(2.0, cancel=False, tenant_known=False)
    machine.end("o", None, 3.0)
    assert machine.record.status == "failed"
    assert [error.code for error in machine.record.errors] == ["unknown_tenant"]
