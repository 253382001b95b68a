"""Assignment of GPUs, by the driver's count and CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import pytest

from pillion.engine.backends.gpu import gpu_devices as devices


@pytest.mark.parametrize(
    ("named", "rank", "seen"),
    [
        ("", 2, "2,0,1,3"),
        ("3, 1,0,2", 1, "1,3,0,2"),
        ("GPU-aa,GPU-bb,GPU-cc,GPU-dd", 3, "GPU-dd,GPU-aa,GPU-bb,GPU-cc"),
        # The driver stops at the first unknown id, after four.
        ("0,1,2,3,-1,5", 1, "1,0,2,3"),
    ],
)
def test_a_ranks_gpu_is_its_first_visible_one(
    monkeypatch: pytest.MonkeyPatch, named: str, rank: int, seen: str
) -> None:
    monkeypatch.setattr(devices, "device_count", lambda: 4)
    monkeypatch.setenv("OTHER", "kept")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    environ = devices.first_gpu(rank)
    assert environ["CUDA_VISIBLE_DEVICES"] == seen
    assert environ["OTHER"] == "kept"


@pytest.mark.parametrize(
    ("count", "ranks", "each"), [(0, 2, False), (1, 2, False), (2, 1, False), (2, 2, True), (3, 2, True)]
)
def test_ranks_have_a_gpu_each_where_there_are_enough(
    monkeypatch: pytest.MonkeyPatch, count: int, ranks: int, each: bool
) -> None:
    monkeypatch.setattr(devices, "device_count", lambda: count)
    assert devices.gpu_for_each(ranks) == each
