"""A worker that stays fenced is killed: when, and that SIGKILL ends even a stopped process."""

from __future__ import annotations

import asyncio
import os
import pathlib
import signal
import sys
from collections.abc import Iterable

import psutil
import pytest

from lab.testbed.conditions import WITHIN_S, until
from pillion.config import KVNodeFlags
from pillion.kvstore.assemble import start_kvnode
from pillion.kvstore.client.attachment import attach
from pillion.supervisor import fence_watch as fences
from pillion.supervisor.fence_watch import FenceWatch, watch_fences
from pillion.supervisor.restarts import RestartPolicy
from pillion.supervisor.supervisor import ProcessSpec, Supervisor
from tests.pillion.supervisor.test_supervisor import pid_of
from tests.support.notices import RecordedNotices
from tests.support.processes import STAY

KILL_AFTER_S = 0.2


def test_a_fence_is_overdue_once_after_its_timeout() -> None:
    watch = FenceWatch(5.0)
    assert watch.overdue(1, ("a",), 10.0) == []
    assert watch.overdue(1, ("a", "b"), 14.5) == []
    assert watch.overdue(1, ("a", "b"), 15.5) == [("a", 5.5)]
    assert watch.overdue(1, ("a", "b"), 16.0) == [], "its death takes a moment; the time begins anew"
    assert watch.overdue(1, ("b",), 20.5) == [("b", 6.0)]


def test_returned_workers_are_not_overdue() -> None:
    watch = FenceWatch(5.0)
    assert watch.overdue(1, ("a",), 10.0) == []
    assert watch.overdue(1, (), 12.0) == []
    assert watch.overdue(1, ("a",), 14.0) == []
    assert watch.overdue(1, ("a",), 18.0) == []
    assert watch.overdue(2, ("a",), 19.5) == [], "another boot of the node: another fence"
    assert watch.overdue(2, ("a",), 24.5) == [("a", 5.0)]


def test_a_zero_timeout_makes_a_fence_overdue_at_once() -> None:
    assert FenceWatch(0.0).overdue(1, ("a",), 10.0) == [("a", 0.0)]


async def test_a_stopped_component_is_killed_and_started_again(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[float] = []

    class SeenWatch(FenceWatch):
        """Record when the node answered."""

        def overdue(self, boot_epoch: int, components: Iterable[str], now: float) -> list[tuple[str, float]]:
            answers.append(now)
            return super().overdue(boot_epoch, components, now)

    async def patience_is_over() -> None:
        begun = len(answers)
        await until("answers", lambda: answers[begun:] and answers[-1] - answers[begun] > 1.5 * KILL_AFTER_S)

    monkeypatch.setattr(fences, "FENCE_POLL_S", 0.02)
    monkeypatch.setattr(fences, "FenceWatch", SeenWatch)
    socket = f"{folder}/a.sock"
    # The node fences nobody for silence.
    flags = KVNodeFlags(node_listen=f"unix:{folder}/k.sock", attach_socket=socket, heartbeat_timeout_ms=600_000)
    node = await start_kvnode(flags)
    attached = await asyncio.to_thread(
        attach, socket, component_id="w", role="decode", block_bytes=4096, timeout_s=WITHIN_S
    )
    epoch = attached.epoch

    async def probe() -> bool:
        return True

    argv = (sys.executable, "-c", STAY)
    spec = ProcessSpec(component_id="w", level=0, argv=argv, environ=dict(os.environ), probe=probe)
    notices = RecordedNotices()
    supervisor = Supervisor([spec], notices, RestartPolicy(first_delay_ms=10))
    await supervisor.start()
    watching = asyncio.create_task(watch_fences(node.address, KILL_AFTER_S, supervisor.kill_component, notices))
    try:
        first = pid_of(supervisor, "w")
        assert first
        process = psutil.Process(first)
        process.send_signal(signal.SIGSTOP)
        await patience_is_over()
        assert process.status() == psutil.STATUS_STOPPED, "nobody called it fenced"
        node.pool.ledger.fence(epoch)
        await until("another process", lambda: pid_of(supervisor, "w") not in (first, None))
        attached.close()
        assert not process.is_running()
        assert [line for line in notices.lines if line.startswith("pillion: w has been fenced for ")]
        assert "pillion: w was ended by SIGKILL; restarting it at once" in notices.lines
        assert not supervisor.kill_component("nobody")
        second = pid_of(supervisor, "w")
        await patience_is_over()
        assert pid_of(supervisor, "w") == second
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await supervisor.stop()
        await node.stop(0.1)
