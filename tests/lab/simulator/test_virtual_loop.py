"""The simulation's event loop: its clock, its processes, and the order drawn from a seed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from random import Random
from typing import Any

import pytest

from lab.simulator.virtual_loop import PROCESS, TASKS_BEFORE_SWEEP, Process, Stuck, VirtualLoop


def finish(loop: VirtualLoop, work: Coroutine[Any, Any, Any], process: Process | None = None) -> Any:
    task = loop.spawn(process or loop.outside, work)
    loop.run(task)
    return task.result()


def test_the_virtual_clock_jumps_to_the_next_timer() -> None:
    loop = VirtualLoop(Random(1))

    async def wait() -> float:
        began = loop.time()
        await asyncio.sleep(3600)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await asyncio.Event().wait()
        return loop.time() - began

    assert finish(loop, wait()) == pytest.approx(3660)
    assert loop.events < 20


def test_a_killed_process_runs_no_cleanup() -> None:
    loop, said = VirtualLoop(Random(1)), []
    victim = loop.process("victim")

    async def live() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            said.append("cleaned up")

    async def world() -> None:
        loop.spawn(victim, live())
        await asyncio.sleep(1)
        loop.kill(victim)
        await asyncio.sleep(60)

    finish(loop, world())
    assert said == []


def test_a_paused_process_finds_its_timers_due() -> None:
    loop, woke = VirtualLoop(Random(1)), []
    sleeper = loop.process("sleeper")

    async def live() -> None:
        await asyncio.sleep(1)
        woke.append(loop.time())

    async def world() -> float:
        loop.spawn(sleeper, live())
        began = loop.time()
        await asyncio.sleep(0.5)
        loop.pause(sleeper)
        await asyncio.sleep(5)
        assert woke == []
        loop.resume(sleeper)
        await asyncio.sleep(0)
        await asyncio.sleep(0.1)
        return began

    began = finish(loop, world())
    assert woke == [pytest.approx(began + 5.5)]


def test_tasks_belong_to_the_process_of_their_parent() -> None:
    loop = VirtualLoop(Random(1))
    process = loop.process("one")

    async def inner() -> str:
        return PROCESS.get().name

    async def live() -> list[str]:
        return [await asyncio.create_task(inner()), await asyncio.to_thread(lambda: PROCESS.get().name)]

    assert finish(loop, live(), process) == ["one", "one"]


def test_a_seed_decides_the_order_between_processes_and_none_within_one() -> None:
    def order(seed: int) -> list[tuple[str, int]]:
        loop, seen = VirtualLoop(Random(seed)), list[tuple[str, int]]()
        done = loop.create_future()
        for name in "abc":
            process = loop.process(name)
            for number in range(3):
                loop.post(process, seen.append, (name, number))
        loop.call_later(1, done.set_result, None)
        loop.run(done)
        return seen

    orders = [order(seed) for seed in range(20)]
    assert order(3) == orders[3]
    assert len({tuple(one) for one in orders}) > 10
    for one in orders:
        for name in "abc":
            assert [number for who, number in one if who == name] == [0, 1, 2]


def test_a_world_without_events_is_stuck() -> None:
    loop = VirtualLoop(Random(1))
    with pytest.raises(Stuck):
        loop.run(loop.create_future())


def test_exceptions_of_callbacks_are_recorded() -> None:
    loop = VirtualLoop(Random(1))
    done = loop.create_future()
    loop.call_soon(lambda: 1 / 0)
    loop.call_later(1, done.set_result, None)
    loop.run(done)
    assert isinstance(loop.failures[0]["exception"], ZeroDivisionError)


def test_an_unretrieved_task_exception_is_reported() -> None:
    loop = VirtualLoop(Random(1))
    victim = loop.process("victim")

    async def die() -> None:
        raise ZeroDivisionError

    async def work() -> None:
        pass

    async def world() -> list[asyncio.Task[None]]:
        held = [loop.spawn(loop.outside, die(), "keeper"), loop.spawn(loop.outside, die()), loop.spawn(victim, die())]
        # Enough to sweep out finished tasks.
        held += [loop.spawn(loop.outside, work()) for _ in range(2 * TASKS_BEFORE_SWEEP)]
        await asyncio.sleep(1)
        loop.kill(victim)
        # Retrieved exceptions count as seen, those of a killed process never do.
        assert isinstance(held[1].exception(), ZeroDivisionError)
        return held

    held = finish(loop, world())
    assert [death["message"] for death in loop.unseen_deaths()] == ["task keeper of world died unseen:"]
    # asyncio reports nothing as long as tasks are referenced.
    assert (len(held), loop.failures) == (3 + 2 * TASKS_BEFORE_SWEEP, [])
    held[2].exception()
