"""Ranks meet, or hear that one of them has ended; and what they call by NCCL, where each has a GPU of its own."""

from __future__ import annotations

from tests.support.gpu import DEVICE, NATIVE  # isort: skip  (before the kernels)

import os
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.multiprocessing

from lab.testbed.conditions import WITHIN_S, wait_for
from pillion.engine.backends.gpu.device_memory import event_on
from pillion.engine.gpu_ranks import rank_group
from pillion.engine.gpu_ranks.rank_group import GpuRankGroup
from pillion.engine.ranks.rank_shard import RankShard
from pillion.errors import ConfigError

JOIN_S = 120.0


def shard_of(rank: int, size: int) -> RankShard:
    return RankShard(range(1), rank, size, range(rank, rank + 1))


@pytest.fixture
def rendezvous() -> Iterator[int]:
    descriptor = os.memfd_create("rendezvous")
    yield descriptor
    os.close(descriptor)


def test_a_meeting_ends_when_a_rank_has_ended(rendezvous, monkeypatch):
    """Rank 0 waits for a rank that never comes; it hears of its end, or gives up after a while."""
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
    group.spread(mine)
    assert mine.tolist() == [0] * 3
    assert group.agree(True)
    assert not group.agree(rank > 0)
    assert group.agree(True)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        group.sum(values)
        group.gather(mine, every)
        group.meet()
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
def test_calls_by_nccl(rendezvous, size):
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
