"""Real rank processes with the fake model: steps, deaths, and no leftovers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import psutil
import pytest
import torch

from lab.testbed.cluster import alive
from lab.testbed.conditions import until, wait_for, within
from pillion.engine.adapters.adapter_forms import PlainForm
from pillion.engine.adapters.adapter_weights import AdapterWeights, LowRank, bits_of
from pillion.engine.backends.backend import BackendLost, warm_up_batches
from pillion.engine.ranks import rank_processes
from pillion.engine.ranks.ranked_backend import RankedAdapter, RankedAheadBackend, RankedBackend
from pillion.errors import ConfigError, Internal
from pillion.kvstore.memory.segment import Segment, map_shared
from pillion.wire.attach import AttachReply
from pillion.wire.json_lines import line_to_bytes
from tests.support import fake_ranks
from tests.support.batches import Sequences
from tests.support.fake_backend import greedy
from tests.support.sampling import RowParameters, rows_of
from tests.support.workers import BLOCK, connected, running_workers, submit_of

TOKENS = [(position * 7) % 95 for position in range(30)]
UNAVAILABLE = 14
FORKED = pytest.mark.usefixtures("forked_ranks")
PAIRS = (LowRank(0, torch.ones(2, 3), torch.zeros(4, 2, dtype=torch.float32)),)


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "MODULE", "tests.support.fake_ranks")


def gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) and alive(psutil.Process(pid)) for pid in pids)


@FORKED
async def test_a_worker_of_three_ranks_answers_like_one() -> None:
    async with running_workers(decode={"tensor_parallel_size": 3}, load=fake_ranks.load_ranks) as workers:
        backend = workers.decode.worker.model.backend
        assert isinstance(backend, RankedBackend)
        async with connected(workers) as connection:
            tickets = [await workers.ticket(TOKENS[first:]) for first in range(4)]
            streams = [
                (first, await connection.submit(submit_of(first + 1, ticket, TOKENS[first:], 12)))
                for first, ticket in enumerate(tickets)
            ]
            for first, answer in streams:
                await answer.ended()
                assert answer.token_ids == greedy(TOKENS[first:], 12)
            await workers.release(*tickets)
        await workers.quiet()
        backend.check_integrity()
        pids = backend.ranks.pids()
        assert len(pids) == 2
        assert not gone(pids)
        # No step runs, so only the next one would notice.
        os.kill(pids[1], signal.SIGKILL)
        reason = await within("the decode worker to fail", workers.decode.wait_failed())
        assert reason == "rank 2 ended with status -9"
    assert gone(pids)


@pytest.mark.long
@pytest.mark.parametrize("how", ["stopped", "broken"])
@FORKED
async def test_a_worker_ends_with_a_rank_that_is_lost(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        running_workers(decode={"tensor_parallel_size": 2}, load=fake_ranks.load_ranks) as workers,
        connected(workers) as connection,
    ):
        backend = workers.decode.worker.model.backend
        assert isinstance(backend, RankedBackend)
        own = backend.own
        assert isinstance(own, fake_ranks.FakeShare)
        own.hold_after = 10
        tickets = [await workers.ticket(TOKENS)]
        answer = await connection.submit(submit_of(1, tickets[0], TOKENS, 800))
        await until("some tokens and a step at the gate", lambda: answer.token_ids and own.waiting.is_set())
        said = list(answer.token_ids)
        if how == "broken":
            breaking = [fake_ranks.BROKEN] * 3
            tickets.append(await workers.ticket(breaking))
            await connection.submit(submit_of(2, tickets[1], breaking))
        else:
            os.kill(backend.ranks.pids()[0], signal.SIGSTOP)
            monkeypatch.setattr(rank_processes, "STEP_SILENCE_MS", 300)
        own.gate.set()
        reason = await within("the decode worker to fail", workers.decode.wait_failed())
        assert backend.ranks.lost
        assert "rank" in reason
        await answer.ended()
        assert answer.last is not None
        assert answer.last.error is not None
        assert answer.last.error.code == UNAVAILABLE
        # Earlier tokens are right: the stream continues elsewhere.
        assert answer.token_ids == greedy(TOKENS, len(answer.token_ids))
        assert len(answer.token_ids) >= len(said)
        with pytest.raises(BackendLost):
            backend.forward(next(warm_up_batches(1, BLOCK)))
        pids = backend.ranks.pids()
        await workers.decode.stop(0.0)
        assert gone(pids)
        await workers.release(*tickets)
        await workers.quiet()


def take(backend: RankedAheadBackend, weights: AdapterWeights) -> RankedAdapter:
    """Give a backend an adapter as packed by the adapter process."""
    return backend.adapters.build(weights.digest, *PlainForm().pack(bits_of(weights)))


def test_a_ranks_load_error_fails_the_start() -> None:
    before = set(psutil.Process().children())
    with pytest.raises(ConfigError, match="refused"):
        fake_ranks.fake_ranks(2, refused=True)
    assert set(psutil.Process().children()) <= before


def test_a_rank_that_cannot_start_fails_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes.sys, "executable", "/nowhere/python")
    with pytest.raises(ConfigError, match="rank 1 cannot be started"):
        fake_ranks.fake_ranks(2)


def check_adapters(backend: RankedAheadBackend, packed: list[RankedAdapter]) -> None:
    """Assert that a rank's packing failure is the adapter's error, and that all ranks drop unused adapters."""
    assert backend.adapters.max_adapters == 2
    assert packed[0].nbytes == 2 * 8
    with pytest.raises(Internal, match="a rank could not pack"):
        take(backend, AdapterWeights("0" * 63 + "2", 2, {"layers.1.o": PAIRS}))
    assert not backend.ranks.lost
    assert list(backend.adapters._dropped) == [packed[0].number + 1]
    packed.clear()
    take(backend, AdapterWeights("0" * 63 + "3", 2, {fake_ranks.LAYER: PAIRS}))
    assert list(backend.adapters._dropped) == [3]


@FORKED
def test_stopped_ranks_delay_steps_and_adapters_and_are_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two steps are under way while the other rank is stopped; messages between them keep their order."""
    monkeypatch.setattr(rank_processes, "END_TIMEOUT_S", 0.1)
    backend = fake_ranks.fake_ranks(2, ahead=True).backend
    assert isinstance(backend, RankedAheadBackend)
    size_bytes = 8 * backend.layout.block_bytes
    pool, connection = Segment(size_bytes), socket.socket()
    text, pid = TOKENS[:6], backend.ranks.pids()[0]
    sequences = Sequences(8, fake_ranks.BLOCK)
    (number,) = sequences.add()
    try:
        backend.ranks.map_pool(line_to_bytes(AttachReply(num_slots=8)), [pool.fileno(), connection.fileno()])
        backend.bind_pool(memoryview(map_shared(pool.fileno(), size_bytes)), 8)
        backend.bind_adapters(2, 8)
        packed = [take(backend, AdapterWeights("0" * 63 + "1", 2, {fake_ranks.LAYER: PAIRS}))]
        os.kill(pid, signal.SIGSTOP)
        steps = [
            backend.launch(sequences.step([(number, [token])]), (), rows_of([RowParameters(temperature=0.0)]))
            for token in (text[0], text[1])
        ]
        os.kill(pid, signal.SIGCONT)
        assert steps[0].wait().token_ids == (*greedy(text[:1], 1),)
        steps.append(
            backend.launch(sequences.step([(number, text[2:])]), (), rows_of([RowParameters(temperature=0.0)]))
        )
        backend.adapters.place(1, packed[0])
        assert [step.wait().token_ids for step in steps[1:]] == [(*greedy(text[:2], 1),), (*greedy(text, 1),)]
        check_adapters(backend, packed)
        os.kill(pid, signal.SIGSTOP)
    finally:
        backend.close()
        backend.close()
        pool.close()
        connection.close()
    backend.check_integrity()
    assert gone([pid])
    assert not backend.ranks.lost
    memory = backend.ranks._memory
    assert isinstance(memory, fake_ranks.FakeMemory)
    assert memory.fd < 0, "its descriptor is closed"


PARENT = """
import time
from pillion.engine.ranks import rank_processes
from tests.support import fake_ranks
rank_processes.MODULE = "tests.support.fake_ranks"
print(*fake_ranks.fake_ranks(3).backend.ranks.pids(), flush=True)
time.sleep(600)
"""


@pytest.mark.long
def test_no_rank_outlives_rank_0() -> None:
    """Waiting or stopped."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        # Ctrl-C reaches the whole process group; only rank 0 handles it.
        os.kill(pids[0], signal.SIGINT)
        os.kill(pids[1], signal.SIGSTOP)
        wait_for("it to stop", lambda: psutil.Process(pids[1]).status() == psutil.STATUS_STOPPED)
        assert not gone(pids[:1])
        parent.kill()
    wait_for("both ranks to end", lambda: gone(pids))
