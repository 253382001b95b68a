"""Rejections for workers of several ranks, and ranks' shares of a worker's cores."""

from __future__ import annotations

import pytest

from lab.testbed.tiny_model import save_model
from pillion.config import PrepareFlags
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.load_model import is_ready, make_ready
from pillion.engine.ranks.rank_loading import check_ranks, shared_cores
from pillion.errors import ConfigError

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize(
    ("flags", "device", "words"),
    [
        ({"tensor_parallel_size": 2, "cpu_kernels": "torch"}, "cpu", "2 needs the CPU kernels: --cpu-kernels torch"),
        ({"tensor_parallel_size": 3}, "cpu", "3 does not fit 4 heads over 2 KV heads"),
        ({"tensor_parallel_size": 4}, "cuda", "4 needs a GPU for each rank, and there are 2"),
    ],
)
def test_unsupported_ranks_are_refused_by_name(tmp_path, monkeypatch, flags, device, words):
    if device == "cuda":
        monkeypatch.setattr("pillion.engine.backends.gpu.gpu_devices.device_count", lambda: 2)
    named = PrepareFlags(model=str(save_model(tmp_path / "model")), dtype="float32", **flags)
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size {words}"):
        check_ranks(named, device, prepare(named))
    if device == "cpu":
        with pytest.raises(ConfigError, match=f"--tensor-parallel-size {words}"):
            make_ready(named, print)
        with pytest.raises(ConfigError, match=f"--tensor-parallel-size {words}"):
            is_ready(named)


def test_ranks_need_linux(tmp_path, monkeypatch):
    flags = PrepareFlags(model=str(save_model(tmp_path / "model")), dtype="float32", tensor_parallel_size=2)
    monkeypatch.setattr("pillion.engine.ranks.rank_loading.sys.platform", "win32")
    with pytest.raises(ConfigError, match="--tensor-parallel-size 2 needs Linux"):
        check_ranks(flags, "cpu", prepare(flags))


@pytest.mark.parametrize(
    ("threads", "ranks", "shares"),
    [
        (4, 2, [(2, (4, 5)), (2, (6, 7))]),
        (3, 2, [(1, (4,)), (2, (5, 6))]),
        (1, 2, [(1, (4,)), (1, (4,))]),
        (2, 4, [(1, (4,)), (1, (5,)), (1, (4,)), (1, (5,))]),
    ],
)
def test_ranks_share_the_cores_of_their_worker(threads, ranks, shares):
    cores = tuple(range(4, 4 + threads))
    assert [shared_cores(threads, cores, rank, ranks) for rank in range(ranks)] == shares
    assert [shared_cores(threads, (), rank, ranks) for rank in range(ranks)] == [(count, ()) for count, _ in shares]
