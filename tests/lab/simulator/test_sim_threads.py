"""Blocking code of simulated processes waits on the virtual clock, and ends with its process."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from random import Random
from typing import Any

from lab.simulator.sim_threads import SimThread, SimThreadPool, park
from lab.simulator.virtual_loop import Process, VirtualLoop


class BlockingProcess:
    """A pool of two threads in a process, and the outputs of its jobs."""

    def __init__(self) -> None:
        self.loop = VirtualLoop(Random(1))  # type: ignore[abstract]
        self.process: Process = self.loop.process("blocking")
        self.threads: list[SimThread] = []
        self.pool = self.process.context.run(SimThreadPool, self.loop, self.threads, 2)
        self.said: list[tuple[str, float]] = []

    def work(self, name: str) -> str:
        try:
            park(1.0)
            self.said.append((name, round(self.loop.time() - 1000)))
            return name
        finally:
            self.said.append((f"{name} left", round(self.loop.time() - 1000)))

    def submit(self, *names: str) -> list[Future[Any]]:
        return [self.pool.submit(self.work, name) for name in names]

    def run(self, seconds: float) -> None:
        async def wait() -> None:
            await asyncio.sleep(seconds)

        self.loop.run(self.loop.spawn(self.loop.outside, wait()))


def test_threads_wait_on_the_virtual_clock_and_take_turns() -> None:
    line = BlockingProcess()
    jobs = line.submit("a", "b", "c")
    line.run(1.5)
    assert [job.done() for job in jobs] == [True, True, False]
    line.run(1.0)
    assert jobs[2].result() == "c"
    assert [at for name, at in line.said if "left" not in name] == [1, 1, 2]


def test_a_paused_process_threads_wait_and_a_killed_one_unwind() -> None:
    line = BlockingProcess()
    jobs = line.submit("a")
    line.run(0.5)
    line.loop.pause(line.process)
    line.run(5.0)
    assert line.said == []
    line.loop.resume(line.process)
    line.run(0.1)
    assert jobs[0].result() == "a"
    (job,) = line.submit("b")
    line.run(0.5)
    line.loop.kill(line.process)
    assert line.said[-1][0] == "b left"
    assert not job.done()


def test_the_loop_runs_jobs_of_the_pool() -> None:
    line = BlockingProcess()

    async def ask() -> str:
        return await asyncio.get_running_loop().run_in_executor(line.pool, line.work, "d")

    task = line.loop.spawn(line.process, ask())
    line.loop.run(task)
    assert task.result() == "d"
