"""How many cores a process may use, by the quotas of its control groups."""

from __future__ import annotations

import math
import pathlib

import pytest

from pillion.host import cores
from pillion.host.cores import quota_cores, usable_cores

V2 = "0::/kube.slice/pod.slice/app.scope"
V1 = "11:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc"


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        (V2, {}, math.inf),
        (V2, {"cpu.max": "max 100000"}, math.inf),
        # A container with a namespace of its own for groups sees its own one at the root.
        ("0::/", {"cpu.max": "250000 100000"}, 2.5),
        (V2, {"kube.slice/pod.slice/app.scope/cpu.max": "400000 100000"}, 4.0),
        # The tightest one counts, wherever around the process it is.
        (
            V2,
            {"kube.slice/cpu.max": "300000 100000", "kube.slice/pod.slice/cpu.max": "200000 100000"}
            | {"kube.slice/pod.slice/app.scope/cpu.max": "800000 100000"},
            2.0,
        ),
        # With the host's path and without the host's groups, the container's own one is at the root.
        (V1, {"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "50000"}, 3.0),
        (V1, {"cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "200000", "cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000"}
         | {"cpu,cpuacct/docker/cpu.cfs_quota_us": "100000", "cpu,cpuacct/docker/cpu.cfs_period_us": "100000"}, 1.0),
        (V1, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf),
        ("4:cpuset:/a", {"cpuset/a/cpu.cfs_quota_us": "1", "cpuset/a/cpu.cfs_period_us": "1"}, math.inf),
        ("damaged", {"cpu.max": "a b c"}, math.inf),
    ],
)  # fmt: skip
def test_the_tightest_quota_counts(groups: str, files: dict[str, str], expected: float, tmp_path: pathlib.Path) -> None:
    written = {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}
    for name, text in written.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert quota_cores(tmp_path) == expected


def test_a_fraction_of_a_core_counts_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "allowed_cores", lambda: frozenset(range(8)))
    for quota, expected in ((0.5, 1), (2.9, 2), (64.0, 8), (math.inf, 8)):
        monkeypatch.setattr(cores, "quota_cores", lambda quota=quota: quota)
        assert usable_cores() == expected
