"""The driver over a target that is a coroutine: order and accounting, not times."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from lab.testbed.conditions import loop_turns
from pillion.loadgen.drive import LoadDriver
from pillion.loadgen.load import LoadSession, Turn
from pillion.loadgen.target import AnswerMessage, TargetError, TokenCounts

# So many that no answer ends before it is stopped.
ENDLESS_TOKENS = 10_000_000


class FakeTarget:
    """Answers with the requested number of tokens, one per turn of the event loop; records its requests."""

    def __init__(self, fail=lambda request: None, together=1):
        self.asked = []
        self.together = asyncio.Barrier(together)
        self.now = self.most = 0
        self.fail = fail

    async def stream(self, request):
        self.asked.append(request)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await self.together.wait()
            for number in range(request.output_tokens):
                await loop_turns(1)
                self.fail(request)
                yield AnswerMessage(f"t{number} ", 1)
            yield AnswerMessage("", 0, TokenCounts(7, 3, request.output_tokens))
        finally:
            self.now -= 1

    async def describe(self):
        return {}

    async def aclose(self):
        pass


def single(at_s, ids=(1, 2), tokens=3):
    return LoadSession(at_s, (Turn(tokens, ids=ids),))


async def drive(target, sessions, **more):
    return await LoadDriver(target, sessions, **more).run()


async def test_an_open_loop_measures_from_the_scheduled_arrival():
    # It answers only after all four have asked.
    target, done = FakeTarget(together=4), []
    times = [0.0, 0.001, 0.002, 0.05]
    run = await drive(target, [single(at_s) for at_s in times], on_done=done.append)
    assert [record.due_s for record in run.records] == times
    assert len(done) == 4
    for record in run.records:
        assert record.ok
        assert record.due_s <= record.sent_s < record.messages[0][0] <= record.messages[-1][0] <= record.ended_s
        assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (7, 3, 3)
    assert run.duration_s >= max(record.ended_s for record in run.records)


async def test_a_concurrency_cap_adds_waits_to_the_latency():
    target = FakeTarget()
    run = await drive(target, [single(0.0) for _ in range(4)], max_concurrency=1)
    assert target.most == 1
    assert [record.due_s for record in run.records] == [0.0] * 4
    by_turn = sorted(run.records, key=lambda record: record.sent_s)
    for before, after in itertools.pairwise(by_turn):
        assert after.sent_s >= before.messages[-1][0]
        assert after.ttft_s > before.e2e_s
        assert after.held_s > 0
        assert after.lag_s == after.sent_s - after.held_s


async def test_a_closed_loop_keeps_its_concurrency():
    target = FakeTarget()
    run = await drive(target, [single(0.0) for _ in range(9)], concurrency=3)
    assert target.most == 3
    assert len(run.records) == 9
    first_end = min(record.ended_s for record in run.records)
    assert sum(record.due_s < first_end for record in run.records) == 3


async def test_turns_include_the_real_answers_and_start_after_them():
    target = FakeTarget()
    turns = (Turn(2, text="one"), Turn(1, text="two", think_s=0.02), Turn(1, text="three"))
    run = await drive(target, [LoadSession(0.0, turns, "be brief")])
    assert [[m["content"] for m in request.messages] for request in target.asked] == [
        ["be brief", "one"],
        ["be brief", "one", "t0 t1 ", "two"],
        ["be brief", "one", "t0 t1 ", "two", "t0 ", "three"],
    ]
    assert [m["role"] for m in target.asked[2].messages] == ["system", "user", "assistant", "user", "assistant", "user"]
    first, second, third = run.records
    assert second.due_s == first.ended_s + 0.02
    assert third.due_s == second.ended_s
    assert [record.turn for record in run.records] == [0, 1, 2]


async def test_failures_are_kept_by_kind_and_end_their_session():
    def fail(request):
        if request.messages[-1]["content"] == "bad":
            raise TargetError("HTTP 500", "broken")

    chat = LoadSession(0.0, (Turn(1, text="good"), Turn(1, text="bad"), Turn(1, text="never sent")))
    empty = LoadSession(0.0, (Turn(0, text="nothing"),))
    slow = LoadSession(0.0, (Turn(ENDLESS_TOKENS, text="slow"),))
    run = await drive(FakeTarget(fail), [chat, empty, slow], timeout_s=2.0)
    kinds = {(record.session, record.turn): record.status for record in run.records}
    assert kinds == {(0, 0): "ok", (0, 1): "HTTP 500", (1, 0): "empty", (2, 0): "timeout"}
    assert run.unsent == 1
    assert "2 s" in next(record.error for record in run.records if record.status == "timeout")


async def test_token_ids_sent_as_chat_become_words_with_shared_prefixes():
    target = FakeTarget()
    await drive(target, [single(0.0, (5, 6, 7), 1), single(0.0, (5, 6, 8), 1)], as_chat=True)
    one, two = (request.messages[0]["content"].split() for request in target.asked)
    assert one[:2] == two[:2]
    assert one[2] != two[2]
    assert not target.asked[0].ids


async def test_cancelling_ends_every_request():
    began = asyncio.Event()
    target = FakeTarget(lambda request: began.set(), together=5)
    running = asyncio.create_task(drive(target, [single(0.0, tokens=ENDLESS_TOKENS) for _ in range(5)]))  # noqa: RUF006
    await began.wait()
    assert target.now == 5
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert target.now == 0
