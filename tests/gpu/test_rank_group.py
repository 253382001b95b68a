"""Ranks meet, or detect that one of them has ended; and their NCCL calls, if each has a GPU."""

from __future__ import annotations

from tests.support.gpu import DEVICE, NATIVE  # isort: skip  (before the kernels)

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.multiprocessing

from lab.testbed.conditions import WITHIN_S, wait_for
from pillion.engine.backends.gpu.device_memory import event_on
from pillion.engine.gpu_ranks import rank_group
from pillion.engine.gpu_ranks.rank_group import GpuRankGroup
from pillion.engine.models.model_shard import ModelShard
from pillion.errors import ConfigError

JOIN_S = 120.0


def shard_of(rank: int, size: int) -> ModelShard:
    return ModelShard(range(1), rank, size, range(rank, rank + 1))


@pytest.fixture
def rendezvous() -> Iterator[int]:
    descriptor = os.memfd_create("rendezvous")
    yield descriptor
    os.close(descriptor)


def test_joining_fails_when_another_rank_has_exited(rendezvous, monkeypatch):
    """Rank 0 waits for a rank that never comes; it detects its end, or times out."""
    looks, let_go = iter([False, False]), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(rank_group, "_gloo", lambda store, shard: let_go.wait(WITHIN_S))
        with pytest.raises(ConfigError, match="rank 0 of 2 did not find the others: another rank has ended"):
            GpuRankGroup.join(shard_of(0, 2), rendezvous, DEVICE, own_device=False, aborted=lambda: next(looks, True))
    let_go.set()
    monkeypatch.setattr(rank_group, "RENDEZVOUS_TIMEOUT_S", 1.0)
    with pytest.raises(ConfigError, match="rank 0 of 2 did not find the others"):
        GpuRankGroup.join(shard_of(0, 2), rendezvous, DEVICE, own_device=False)
    wait_for(
        "the threads that met nobody", lambda: "pillion-rank-group" not in {each.name for each in threading.enumerate()}
    )


class QueuedCalls:
    """A group whose calls only record their options, and the values passed."""

    def __init__(self, brings: Sequence[torch.Tensor] = ()) -> None:
        self.called: list[tuple[str, bool]] = []
        self._brings = brings

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*args: Any) -> None:
            self.called.append((name, args[-1].asyncOp))
            if name == "allgather":
                for place, values in zip(args[0][0], self._brings, strict=True):
                    place.copy_(values)

        return call


def group_of(size: int, calls: QueuedCalls) -> GpuRankGroup:
    return GpuRankGroup(shard_of(0, size), calls, -1, torch.device("cpu"), lambda: False, f"rank 0 of {size}")


def test_calls_are_queued_on_the_stream_of_the_step():
    """On a separate stream they would have to be synchronized with the step's."""
    calls = QueuedCalls()
    group = group_of(2, calls)
    values = torch.zeros(3)
    group.sum(values)
    group.gather(values, [torch.zeros(3), torch.zeros(3)])
    group.broadcast(values)
    wanted = [("allreduce", False), ("gather", False), ("broadcast", False)]
    assert calls.called == wanted
    with group.no_collectives():
        group.sum(values)
        group.broadcast(values)
    assert calls.called == wanted
    group.sum(values)
    assert len(calls.called) == 4


def test_sums_in_the_order_of_ranks():
    """They are rounded once; the order of two values does not matter."""
    parts = [torch.tensor([value, 1.0], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    calls, values = QueuedCalls(parts), parts[0].clone()
    group_of(3, calls).sum(values, in_order=True)
    assert values.tolist() == [258.0, 3.0]
    assert calls.called == [("allgather", False)]
    two = QueuedCalls()
    group_of(2, two).sum(values, in_order=True)
    assert two.called == [("allreduce", False)]


def test_nccl_stays_on_the_loopback_and_connects_at_once(monkeypatch):
    """NCCL's buffers are allocated at once: later there is no memory left, and it fails with a RuntimeError."""
    seen = {}

    def options():
        seen.update({name: os.environ.get(name) for name in rank_group.NCCL_ENVIRONMENT})
        raise RuntimeError("no GPU")

    for name in rank_group.NCCL_ENVIRONMENT:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_RUNTIME_CONNECT", "1")
    monkeypatch.setattr(rank_group, "_DIST", SimpleNamespace(ProcessGroupNCCL=SimpleNamespace(Options=options)))
    with pytest.raises(RuntimeError, match="no GPU"):
        rank_group._nccl(None, shard_of(0, 2), DEVICE)
    assert seen == {"NCCL_SOCKET_IFNAME": "=lo", "NCCL_RUNTIME_CONNECT": "1"}


@pytest.mark.parametrize(("mebibytes", "words"), [(64, "/dev/shm has 64 MiB"), (4096, "no memory$")])
def test_small_shared_memory_is_reported(rendezvous, monkeypatch, mebibytes, words):
    def meet(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(rank_group, "_nccl", meet)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_blocks=mebibytes * 256, f_frsize=4096))
    with pytest.raises(ConfigError, match=words):
        GpuRankGroup.join(shard_of(0, 2), rendezvous, DEVICE, own_device=True)


def test_a_waiting_thread_sleeps_no_longer_than_it_says():
    def slack() -> int:
        group_of(2, QueuedCalls()).wait(SimpleNamespace(query=lambda: True))
        return ctypes.CDLL(None).prctl(30, 0, 0, 0, 0)

    assert rank_group._in_thread(slack).result(WITHIN_S) == rank_group.TIMER_SLACK_NS


def by_nccl(rank: int, size: int, path: str) -> None:
    """Each call, queued and in a graph."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    rendezvous = os.open(path, os.O_RDWR)
    group = GpuRankGroup.join(shard_of(rank, size), rendezvous, device, own_device=True)
    assert group.capturable
    values = torch.full((5,), float(rank + 1), device=device)
    group.sum(values)
    assert values.tolist() == [size * (size + 1) / 2] * 5
    mine = torch.full((3,), rank, dtype=torch.int32, device=device)
    every = [torch.zeros_like(mine) for _ in range(size if rank == 0 else 0)]
    group.gather(mine, every)
    assert [part.tolist() for part in every] == [[other] * 3 for other in range(len(every))]
    group.broadcast(mine)
    assert mine.tolist() == [0] * 3
    assert group.agree(True)
    assert not group.agree(rank > 0)
    assert group.agree(True)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        group.sum(values)
        group.gather(mine, every)
        group.barrier()
    before = values[0].item()
    for turn in range(1, 4):
        mine.fill_(rank + 10)
        graph.replay()
        group.wait(event_on(device))
        assert values.tolist() == [before * size**turn] * 5
    assert [part.tolist() for part in every] == [[other + 10] * 3 for other in range(len(every))]
    graph.reset()
    group.close()
    group.close()
    os.close(rendezvous)


@pytest.mark.skipif(not NATIVE, reason="NCCL needs a GPU")
@pytest.mark.parametrize("size", [1, 2])
def test_collectives_run_over_nccl(rendezvous, size):
    if torch.cuda.device_count() < size:
        pytest.skip(f"NCCL needs {size} GPUs for {size} ranks")
    context = torch.multiprocessing.get_context("spawn")
    path = f"/proc/{os.getpid()}/fd/{rendezvous}"
    processes = [context.Process(target=by_nccl, args=(rank, size, path), daemon=True) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(JOIN_S)
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in processes] == [0] * size
